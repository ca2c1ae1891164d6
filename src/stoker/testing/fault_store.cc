#include "stoker/testing/fault_store.h"

#include <utility>

namespace stoker {

void FaultPlan::fail_nth(StoreCall call, uint64_t nth, Code code) {
  MutexLock lock(mutex_);
  faults_.push_back({call, nth, code});
}

std::optional<Error> FaultPlan::meet(StoreCall call) {
  MutexLock lock(mutex_);
  ++calls_[static_cast<size_t>(call)];
  for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
    if (fault->call != call || --fault->countdown != 0) continue;
    const Code code = fault->code;
    faults_.erase(fault);
    return fail(code, "a fault that the test ordered");
  }
  return std::nullopt;
}

uint64_t FaultPlan::calls(StoreCall call) const {
  MutexLock lock(mutex_);
  return calls_[static_cast<size_t>(call)];
}

namespace {

// A write that fails on order spoils the commit, as one that the store itself fails does.
class FaultTransaction final : public Transaction {
 public:
  FaultTransaction(std::unique_ptr<Transaction> inner, FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan) {}

  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override {
    if (auto fault = plan_.meet(StoreCall::resize)) return *fault;
    return inner_->resize(key, bytes, chunk_bytes);
  }
  Future<void> write(std::string_view key, uint64_t offset, Slice from,
                     Priority priority) override {
    if (auto fault = plan_.meet(StoreCall::write)) {
      MutexLock lock(mutex_);
      if (!failed_) failed_ = *fault;
      return *fault;
    }
    return inner_->write(key, offset, from, priority);
  }
  Status remove(std::string_view key) override {
    if (auto fault = plan_.meet(StoreCall::remove)) return *fault;
    return inner_->remove(key);
  }
  Status expect(std::string_view key, Class expected) override {
    return inner_->expect(key, expected);
  }
  Status require(std::string_view key, std::string_view tag) override {
    return inner_->require(key, tag);
  }
  Status name(std::string_view snapshot) override { return inner_->name(snapshot); }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    if (auto fault = plan_.meet(StoreCall::read)) return *fault;
    return inner_->read(key, offset, into, options);
  }
  Future<Version> commit(Durability durability) override {
    if (auto fault = plan_.meet(StoreCall::commit)) return *fault;
    {
      MutexLock lock(mutex_);
      if (failed_) return *failed_;
    }
    return inner_->commit(durability);
  }

 private:
  const std::unique_ptr<Transaction> inner_;
  FaultPlan& plan_;
  Mutex mutex_;
  std::optional<Error> failed_ GUARDED_BY(mutex_);
};

}  // namespace

Result<ObjectInfo> FaultStore::stat(std::string_view key, std::string_view snapshot) {
  if (auto fault = plan_.meet(StoreCall::stat)) return *fault;
  return inner_->stat(key, snapshot);
}

Result<std::vector<ObjectInfo>> FaultStore::list(std::string_view prefix,
                                                 std::string_view snapshot) {
  if (auto fault = plan_.meet(StoreCall::list)) return *fault;
  return inner_->list(prefix, snapshot);
}

Future<void> FaultStore::read(std::string_view key, uint64_t offset, Slice into,
                              ReadOptions options) {
  if (auto fault = plan_.meet(StoreCall::read)) return *fault;
  return inner_->read(key, offset, into, options);
}

Result<std::unique_ptr<Transaction>> FaultStore::begin() {
  if (auto fault = plan_.meet(StoreCall::begin)) return *fault;
  STOKER_ASSIGN(auto change, inner_->begin());
  return std::unique_ptr<Transaction>(new FaultTransaction(std::move(change), plan_));
}

Future<void> FaultStore::snapshot(std::string_view name) {
  if (auto fault = plan_.meet(StoreCall::snapshot)) return *fault;
  return inner_->snapshot(name);
}

Future<void> FaultStore::drop(std::string_view name, Durability durability) {
  if (auto fault = plan_.meet(StoreCall::drop)) return *fault;
  return inner_->drop(name, durability);
}

}  // namespace stoker
