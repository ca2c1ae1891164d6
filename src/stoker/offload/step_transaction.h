// StepTransaction: a Transaction shared by the updates that write into it, which must all have succeeded before it commits.
//
// Updates keep it alive by shared ownership. One failed update poisons it: the planes of a block would be of two steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "stoker/base/future.h"
#include "stoker/store/store.h"

namespace stoker::offload {

// Which version a transaction became. Outlives it: what was read from a transaction is judged by it later.
struct CommitFate {
  std::atomic<Version> version{0};  // 0 until committed
};

// Any thread.
class StepTransaction {
 public:
  explicit StepTransaction(std::unique_ptr<Transaction> transaction) : transaction_(std::move(transaction)) {}

  Transaction& raw() { return *transaction_; }
  const std::shared_ptr<CommitFate>& fate() const { return fate_; }

  // busy while updates still compute; the poison if there is any; else the store's commit. Call once.
  Future<Version> commit(Durability durability);
  // From now on updates that have not begun are cancelled. The bytes are given up when the last holder lets go.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

  void poison(const Error& error);
  std::optional<Error> poisoned() const;

  // One for every update that has not handed all its writes to the store.
  Status begin_job();
  void end_job();
  size_t active_jobs() const;
  void wait_idle() const;  // until no update runs

 private:
  const std::unique_ptr<Transaction> transaction_;
  const std::shared_ptr<CommitFate> fate_ = std::make_shared<CommitFate>();
  std::atomic<bool> abandoned_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable idle_;
  std::optional<Error> poison_;  // guarded by mutex_
  size_t jobs_ = 0;              // guarded by mutex_
  bool committed_ = false;       // commit() was called; guarded by mutex_
};

}  // namespace stoker::offload
