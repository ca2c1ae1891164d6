// FaultStore: any Store, with faults on order. It owns the store that it wraps.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/store/store.h"

namespace stoker {

enum class StoreCall : uint8_t {
  stat,
  list,
  read,
  begin,
  resize,
  write,
  remove,
  commit,
  snapshot,
  drop
};

// The nth call (1 = the next) of a kind fails with a code before it reaches the wrapped store. Any
// thread.
class FaultPlan {
 public:
  void fail_nth(StoreCall call, uint64_t nth, Code code);
  // The error that this call meets, if it is its turn.
  std::optional<Error> meet(StoreCall call);
  uint64_t calls(StoreCall call) const;

 private:
  struct Fault {
    StoreCall call;
    uint64_t countdown;
    Code code;
  };
  mutable Mutex mutex_;
  std::vector<Fault> faults_ GUARDED_BY(mutex_);
  uint64_t calls_[10] GUARDED_BY(mutex_) = {};
};

class FaultStore final : public Store {
 public:
  explicit FaultStore(std::unique_ptr<Store> inner) : inner_(std::move(inner)) {}
  FaultPlan& plan() { return plan_; }

  Features features() const override { return inner_->features(); }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot = {}) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot = {}) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options = {}) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  StoreInfo info() const override { return inner_->info(); }

 private:
  const std::unique_ptr<Store> inner_;
  FaultPlan plan_;
};

}  // namespace stoker
