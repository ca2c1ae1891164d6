// SlowStore: any Store, whose futures complete later than they could. It owns the store that it
// wraps.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "stoker/base/mutex.h"
#include "stoker/store/store.h"

namespace stoker {

struct SlowDelays {
  std::chrono::nanoseconds read{0}, write{0}, commit{0};  // commit: also of snapshot and drop
};

// One thread that runs what is due. Destroyed: runs all that is left at once.
class DelayLine {
 public:
  DelayLine() : thread_([this] { run(); }) {}
  ~DelayLine();
  void after(std::chrono::nanoseconds delay, std::function<void()> task);

  // The same result, `delay` after it was there.
  template <typename T>
  Future<T> delay(const Future<T>& future, std::chrono::nanoseconds by) {
    auto promise = std::make_shared<Promise<T>>();
    Future<T> later = promise->future();
    future.on_done([this, by, promise](const Result<T>& result) {
      after(by, [promise, result] { promise->complete(result); });
    });
    return later;
  }

 private:
  void run();
  Mutex mutex_;
  CondVar wake_;
  std::multimap<std::chrono::steady_clock::time_point, std::function<void()>> tasks_
      GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class SlowStore final : public Store {
 public:
  SlowStore(std::unique_ptr<Store> inner, const SlowDelays& delays)
      : inner_(std::move(inner)), delays_(delays) {}

  Features features() const override { return inner_->features(); }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot = {}) override {
    return inner_->stat(key, snapshot);
  }
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot = {}) override {
    return inner_->list(prefix, snapshot);
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options = {}) override {
    return line_.delay(inner_->read(key, offset, into, options), delays_.read);
  }
  Result<std::unique_ptr<Transaction>> begin() override;
  Future<void> snapshot(std::string_view name) override {
    return line_.delay(inner_->snapshot(name), delays_.commit);
  }
  Future<void> drop(std::string_view name, Durability durability) override {
    return line_.delay(inner_->drop(name, durability), delays_.commit);
  }
  StoreInfo info() const override { return inner_->info(); }

 private:
  const std::unique_ptr<Store> inner_;
  const SlowDelays delays_;
  DelayLine line_;  // before the store goes, nothing is under way
};

}  // namespace stoker
