// Writer: the one thread that writes. It commits what waits, in batches, does what it is told to,
// and works on the background between.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/store/coded/commit/committer.h"
#include "stoker/store/coded/shards/pace.h"
#include "stoker/store/coded/upkeep/background.h"

namespace stoker::coded {

// Any thread. Its end waits for what is queued, but not for jobs.
class Writer {
 public:
  // `by_itself`: it works on the background.
  Writer(const Shape& shape, Committer& committer, Background& background, bool by_itself);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  Future<Version> commit(std::shared_ptr<TransactionState> state);
  // Done at once, after what waits; nothing else is done meanwhile.
  Future<void> work(std::function<Status()> work);
  // Done between batches, a step at a time, until one returns false. It keeps to this pace.
  Future<void> add_job(std::function<Result<bool>()> step, Pace& pace);
  // It ends as soon as nothing is queued.
  void stop();

 private:
  struct Request {
    CommitRequest commit;  // no state: `work` is to be done
    std::function<Status()> work;
    Promise<void> done;
  };
  struct Job {
    std::function<Result<bool>()> step;
    Pace* pace;
    Promise<void> done;
  };
  void run();
  void serve(std::vector<Request> batch);
  void work_on(Job& job);
  void push(Request request);

  const Shape& shape_;
  Committer& committer_;
  Background& background_;
  const bool by_itself_;
  Mutex mutex_;
  CondVar queued_;
  std::deque<Request> queue_ GUARDED_BY(mutex_);
  std::deque<Job> jobs_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member
};

}  // namespace stoker::coded
