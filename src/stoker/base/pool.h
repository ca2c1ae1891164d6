// The one fixed pool of CPU threads: checksums and optimizer kernels run here, never on the Loop
// thread.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "stoker/base/mutex.h"

namespace stoker {

class Pool {
 public:
  explicit Pool(size_t threads);
  ~Pool();  // runs what is queued, then joins
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs `task` on a pool thread, in order of arrival. Any thread. The task must not wait for
  // another task.
  void run(std::function<void()> task);
  // As run(), behind what run() was given. One task in eight is of these while there are both.
  void run_later(std::function<void()> task);
  size_t threads() const { return threads_.size(); }
  bool here() const;  // the calling thread is one of them

 private:
  void work();
  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_), later_ GUARDED_BY(mutex_);
  unsigned before_later_ GUARDED_BY(mutex_) = 0;  // tasks that went before one that waits
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace stoker
