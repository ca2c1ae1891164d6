// HeldReads: any Store, whose reads (or stats) are kept back while one says so. It tells what was
// asked for.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/store/store.h"

namespace stoker {

class HeldReads final : public Store {
 public:
  struct Asked {
    std::string key;
    uint64_t offset = 0, bytes = 0;
    Priority priority = Priority::demand;
  };

  explicit HeldReads(std::unique_ptr<Store> inner) : inner_(std::move(inner)) {}
  void hold() { holding_ = true; }
  // Only those that nobody waits for.
  void hold_prefetches() { holding_ = holding_prefetches_ = true; }
  void let_go() {
    holding_ = holding_prefetches_ = false;
    std::vector<Held> held;
    {
      MutexLock lock(mutex_);
      held = std::exchange(held_, {});
    }
    for (auto& [promise, run] : held) promise->complete(run().wait());
  }
  void fail_prefetches(bool failing) { failing_prefetches_ = failing; }
  void hold_stats() {
    MutexLock lock(mutex_);
    holding_stats_ = true;
  }
  void let_stats_go() {
    MutexLock lock(mutex_);
    holding_stats_ = false;
    stats_go_.notify_all();
  }
  std::vector<Asked> asked() const {
    MutexLock lock(mutex_);
    return asked_;
  }
  size_t asked(Priority priority) const {
    const auto all = asked();
    return static_cast<size_t>(std::ranges::count(all, priority, &Asked::priority));
  }

  Features features() const override { return inner_->features(); }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override {
    {
      MutexLock lock(mutex_);
      ++stats;
      if (holding_stats_) {
        ++stats_waiting;
        stats_go_.wait(lock, [this] { return !holding_stats_; });
        --stats_waiting;
      }
    }
    return inner_->stat(key, snapshot);
  }
  std::optional<ObjectInfo> stat_at_once(std::string_view key) override {
    return inner_->stat_at_once(key);
  }
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot) override {
    return inner_->list(prefix, snapshot);
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    {
      MutexLock lock(mutex_);
      asked_.push_back({std::string(key), offset, into.size, options.priority});
      if (failing_prefetches_ && options.priority == Priority::prefetch)
        return Future<void>(fail(Code::unavailable, "it is away for now"));
      if (holding_ && (!holding_prefetches_ || options.priority == Priority::prefetch)) {
        auto promise = std::make_shared<Promise<void>>();
        held_.emplace_back(promise, [this, name = std::string(key), offset, into, options] {
          return inner_->read(name, offset, into, options);
        });
        ++waiting;
        return promise->future();
      }
    }
    return inner_->read(key, offset, into, options);
  }
  Result<std::unique_ptr<Transaction>> begin() override { return inner_->begin(); }
  Future<void> snapshot(std::string_view name) override { return inner_->snapshot(name); }
  Future<void> drop(std::string_view name, Durability durability) override {
    return inner_->drop(name, durability);
  }
  StoreInfo info() const override { return inner_->info(); }

  std::atomic<int> waiting{0};  // that were kept back so far
  std::atomic<int> stats{0}, stats_waiting{0};

 private:
  using Held = std::pair<std::shared_ptr<Promise<void>>, std::function<Future<void>()>>;

  const std::unique_ptr<Store> inner_;
  std::atomic<bool> holding_{false}, holding_prefetches_{false}, failing_prefetches_{false};
  mutable Mutex mutex_;  // guards what follows
  std::vector<Held> held_;
  std::vector<Asked> asked_;
  bool holding_stats_ = false;
  CondVar stats_go_;
};

}  // namespace stoker
