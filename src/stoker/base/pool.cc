#include "stoker/base/pool.h"

#include <pthread.h>

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker {

constexpr unsigned kBeforeLater = 7;

Pool::Pool(size_t threads) {
  STOKER_CHECK(threads > 0);
  threads_.reserve(threads);
  for (size_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { work(); });
    pthread_setname_np(threads_.back().native_handle(), "stoker-cpu");
  }
}

Pool::~Pool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run(std::function<void()> task) {
  // Notified with the mutex: the task may be what lets the pool go, and then wakes nobody.
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  wake_.notify_one();
}

void Pool::run_later(std::function<void()> task) {
  MutexLock lock(mutex_);
  later_.push_back(std::move(task));
  wake_.notify_one();
}

bool Pool::here() const {
  const auto self = std::this_thread::get_id();
  return std::any_of(threads_.begin(), threads_.end(),
                     [self](const std::thread& thread) { return thread.get_id() == self; });
}

void Pool::work() {
  MutexLock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this]() REQUIRES(mutex_) {
      return stopping_ || !tasks_.empty() || !later_.empty();
    });
    if (tasks_.empty() && later_.empty()) return;
    const bool now = !tasks_.empty() && (later_.empty() || before_later_ < kBeforeLater);
    before_later_ = now && !later_.empty() ? before_later_ + 1 : 0;
    auto& queue = now ? tasks_ : later_;
    auto task = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // captures die here, outside the lock
    lock.lock();
  }
}

}  // namespace stoker
