// StepTransaction: a Transaction shared by the updates that write into it, which must all have
// succeeded before it commits.
//
// Updates keep it alive by shared ownership. One failed update poisons it: the planes of a block
// would be of two steps.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/store/store.h"

namespace stoker::offload {

// Which version a transaction became. Outlives it: what was read from a transaction is judged by it
// later.
struct CommitFate {
  std::atomic<Version> version{0};  // 0 until committed
};

// The updates of a transaction, counted. Outlives the transaction by a moment: an update lets go of
// the transaction first and is counted out then, so whoever waited for none holds the last share.
class JobCount {
 public:
  void begin();
  void hold();      // as begin(), for one that only reads from it: no commit waits for that
  void computed();  // the update has handed all its writes to the store
  void end();       // and they are done, and it let go of the transaction
  size_t computing() const;
  void wait_none() const;  // until all have ended

 private:
  mutable Mutex mutex_;
  mutable CondVar none_;
  size_t computing_ GUARDED_BY(mutex_) = 0;
  size_t holding_ GUARDED_BY(mutex_) = 0;
};

// Any thread.
class StepTransaction {
 public:
  explicit StepTransaction(std::unique_ptr<Transaction> transaction)
      : transaction_(std::move(transaction)) {}

  Transaction& raw() { return *transaction_; }
  const std::shared_ptr<CommitFate>& fate() const { return fate_; }

  // busy while updates still compute; the poison if there is any; else the store's commit. Call
  // once.
  Future<Version> commit(Durability durability);
  // From now on updates that have not begun are cancelled. The bytes are given up when the last
  // holder lets go.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

  void poison(const Error& error);
  std::optional<Error> poisoned() const;

  // Counts one update in, unless it is too late for one.
  Status begin_job();
  const std::shared_ptr<JobCount>& jobs() const { return jobs_; }

 private:
  const std::unique_ptr<Transaction> transaction_;
  const std::shared_ptr<CommitFate> fate_ = std::make_shared<CommitFate>();
  std::atomic<bool> abandoned_{false};
  const std::shared_ptr<JobCount> jobs_ = std::make_shared<JobCount>();
  mutable Mutex mutex_;
  std::optional<Error> poison_ GUARDED_BY(mutex_);
  bool committed_ GUARDED_BY(mutex_) = false;  // commit() was called
};

}  // namespace stoker::offload
