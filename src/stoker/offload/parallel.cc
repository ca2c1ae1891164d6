#include "stoker/offload/parallel.h"
#include "stoker/base/check.h"
#include "stoker/base/mutex.h"

#include <algorithm>
#include <atomic>

namespace stoker::offload {

void parallel(Pool& pool, size_t count, const std::function<void(size_t)>& each) {
  STOKER_CHECK(!pool.here());  // a task must not wait for another one
  if (count == 0) return;
  std::atomic<size_t> next{0};
  Mutex mutex;
  CondVar finished;
  size_t running = std::min(pool.threads(), count);  // guarded by mutex
  const size_t tasks = running;
  for (size_t task = 0; task < tasks; ++task) {
    pool.run([&] {
      for (size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) each(i);
      // Everything captured lives on the caller's stack: it may be gone once the lock is free and
      // running is 0.
      MutexLock lock(mutex);
      if (--running == 0) finished.notify_all();
    });
  }
  MutexLock lock(mutex);
  finished.wait(lock, [&]() REQUIRES(mutex) { return running == 0; });
}

}  // namespace stoker::offload
