#include "stoker/testing/slow_store.h"

#include <utility>

namespace stoker {

DelayLine::~DelayLine() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void DelayLine::after(std::chrono::nanoseconds delay, std::function<void()> task) {
  // Held while notifying: once the task has run, whoever waits for it may destroy the line.
  MutexLock lock(mutex_);
  tasks_.emplace(std::chrono::steady_clock::now() + delay, std::move(task));
  wake_.notify_one();
}

void DelayLine::run() {
  MutexLock lock(mutex_);
  for (;;) {
    if (tasks_.empty()) {
      if (stopping_) return;
      wake_.wait(lock);
      continue;
    }
    const auto due = tasks_.begin()->first;
    if (!stopping_ && std::chrono::steady_clock::now() < due) {
      wake_.wait_until(lock, due);
      continue;
    }
    auto task = std::move(tasks_.begin()->second);
    tasks_.erase(tasks_.begin());
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

namespace {

class SlowTransaction final : public Transaction {
 public:
  SlowTransaction(std::unique_ptr<Transaction> inner, DelayLine& line, const SlowDelays& delays)
      : inner_(std::move(inner)), line_(line), delays_(delays) {}
  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override {
    return inner_->resize(key, bytes, chunk_bytes);
  }
  Future<void> write(std::string_view key, uint64_t offset, Slice from,
                     Priority priority) override {
    return line_.delay(inner_->write(key, offset, from, priority), delays_.write);
  }
  Status remove(std::string_view key) override { return inner_->remove(key); }
  Status expect(std::string_view key, Class expected) override {
    return inner_->expect(key, expected);
  }
  Status require(std::string_view key, std::string_view tag) override {
    return inner_->require(key, tag);
  }
  Status name(std::string_view snapshot) override { return inner_->name(snapshot); }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    return line_.delay(inner_->read(key, offset, into, options), delays_.read);
  }
  Future<Version> commit(Durability durability) override {
    return line_.delay(inner_->commit(durability), delays_.commit);
  }

 private:
  const std::unique_ptr<Transaction> inner_;
  DelayLine& line_;
  const SlowDelays& delays_;
};

}  // namespace

Result<std::unique_ptr<Transaction>> SlowStore::begin() {
  STOKER_ASSIGN(auto change, inner_->begin());
  return std::unique_ptr<Transaction>(new SlowTransaction(std::move(change), line_, delays_));
}

}  // namespace stoker
