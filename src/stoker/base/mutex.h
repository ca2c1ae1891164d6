// Mutex, MutexLock and CondVar: those of std, with clang's thread-safety annotations.
//
// A member says which mutex guards it (GUARDED_BY), and a function what its caller must hold
// (REQUIRES) or must not hold (EXCLUDES). `make tidy` lets clang prove it; gcc sees plain std.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define STOKER_ATTRIBUTE(x) __attribute__((x))
#else
#define STOKER_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) STOKER_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY STOKER_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mutex) STOKER_ATTRIBUTE(guarded_by(mutex))
#define REQUIRES(...) STOKER_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) STOKER_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) STOKER_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) STOKER_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) STOKER_ATTRIBUTE(release_capability(__VA_ARGS__))
// For the few functions whose locking clang cannot follow; each says why it is right.
#define NO_THREAD_SAFETY_ANALYSIS STOKER_ATTRIBUTE(no_thread_safety_analysis)

namespace stoker {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex to the end of its scope; may let go of it and take it again in between.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void lock() ACQUIRE() { lock_.lock(); }
  void unlock() RELEASE() { lock_.unlock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// `ready` is called with the mutex held: write it as [this]() REQUIRES(mutex_) { ... }.
class CondVar {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  template <typename Ready>
  void wait(MutexLock& lock, Ready ready) {
    changed_.wait(lock.lock_, ready);
  }
  // Whether it was notified (or became ready) before the time was over.
  template <typename Rep, typename Period>
  bool wait_for(MutexLock& lock, std::chrono::duration<Rep, Period> time) {
    return changed_.wait_for(lock.lock_, time) == std::cv_status::no_timeout;
  }
  template <typename Rep, typename Period, typename Ready>
  bool wait_for(MutexLock& lock, std::chrono::duration<Rep, Period> time, Ready ready) {
    return changed_.wait_for(lock.lock_, time, ready);
  }
  template <typename Clock, typename Duration>
  bool wait_until(MutexLock& lock, std::chrono::time_point<Clock, Duration> time) {
    return changed_.wait_until(lock.lock_, time) == std::cv_status::no_timeout;
  }
  template <typename Clock, typename Duration, typename Ready>
  bool wait_until(MutexLock& lock, std::chrono::time_point<Clock, Duration> time, Ready ready) {
    return changed_.wait_until(lock.lock_, time, ready);
  }

 private:
  std::condition_variable changed_;
};

}  // namespace stoker
