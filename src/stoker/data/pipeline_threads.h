// PipelineThreads: the threads of one pipeline. Their number may change while they work, and they
// tell how busy they were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "stoker/base/mutex.h"

namespace stoker::data {

// Any thread, but it ends on none of its own.
class PipelineThreads {
 public:
  // 1 <= threads <= most.
  PipelineThreads(size_t threads, size_t most);
  ~PipelineThreads();  // runs what is queued, then joins
  PipelineThreads(const PipelineThreads&) = delete;
  PipelineThreads& operator=(const PipelineThreads&) = delete;

  // Begins tasks in order of arrival. A task must not wait for another one.
  void run(std::function<void()> task);

  // So many tasks may run at once from now on; at least 1, and never more than `most`. What runs
  // goes on.
  void use(size_t threads);
  size_t threads() const;
  size_t most() const { return most_; }
  // That threads were in tasks, added up; those that run now count so far.
  uint64_t busy_ns() const;

 private:
  void work();
  void book() REQUIRES(mutex_);
  uint64_t busy_until(uint64_t now) const REQUIRES(mutex_);

  const size_t most_;
  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  size_t used_ GUARDED_BY(mutex_) = 0;
  size_t running_ GUARDED_BY(mutex_) = 0;  // tasks, since booked_
  uint64_t busy_ns_ GUARDED_BY(mutex_) = 0, booked_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> all_ GUARDED_BY(mutex_);  // those above used_ sleep
};

// The tasks of one owner. Its end waits for them, so they may use what the owner has.
class PipelineTasks {
 public:
  explicit PipelineTasks(std::shared_ptr<PipelineThreads> threads) : threads_(std::move(threads)) {}
  ~PipelineTasks();  // not on a thread of the pipeline
  PipelineTasks(const PipelineTasks&) = delete;
  PipelineTasks& operator=(const PipelineTasks&) = delete;

  void run(std::function<void()> task);

 private:
  // Outlives its owner: the last task lets go of the mutex after it told that it was the last.
  struct Left {
    Mutex mutex;
    CondVar none;
    size_t count GUARDED_BY(mutex) = 0;
  };
  const std::shared_ptr<PipelineThreads> threads_;
  const std::shared_ptr<Left> left_ = std::make_shared<Left>();
};

}  // namespace stoker::data
