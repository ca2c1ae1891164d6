#include "stoker/data/pipeline_threads.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/clock.h"

namespace stoker::data {

PipelineThreads::PipelineThreads(size_t threads, size_t most)
    : most_(most), booked_(Clock::real().now_ns()) {
  STOKER_CHECK(threads > 0 && threads <= most);
  use(threads);
}

PipelineThreads::~PipelineThreads() {
  std::vector<std::thread> all;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    all = std::move(all_);
  }
  wake_.notify_all();
  for (auto& thread : all) thread.join();
}

void PipelineThreads::run(std::function<void()> task) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  wake_.notify_one();
}

void PipelineThreads::use(size_t threads) {
  MutexLock lock(mutex_);
  used_ = std::clamp<size_t>(threads, 1, most_);
  while (all_.size() < used_) {
    all_.emplace_back([this] { work(); });
    pthread_setname_np(all_.back().native_handle(), "stoker-data");
  }
  wake_.notify_all();
}

size_t PipelineThreads::threads() const {
  MutexLock lock(mutex_);
  return used_;
}

uint64_t PipelineThreads::busy_ns() const {
  MutexLock lock(mutex_);
  return busy_until(Clock::real().now_ns());
}

uint64_t PipelineThreads::busy_until(uint64_t now) const {
  return busy_ns_ + running_ * (now - booked_);
}

void PipelineThreads::book() {
  const uint64_t now = Clock::real().now_ns();
  busy_ns_ = busy_until(now);
  booked_ = now;
}

void PipelineThreads::work() {
  MutexLock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this]() REQUIRES(mutex_) {
      return stopping_ || (!tasks_.empty() && running_ < used_);
    });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    book();
    ++running_;
    lock.unlock();
    task();
    task = nullptr;  // captures die here, outside the lock
    lock.lock();
    book();
    --running_;
  }
}

PipelineTasks::~PipelineTasks() {
  Left& left = *left_;
  MutexLock lock(left.mutex);
  left.none.wait(lock, [&left]() REQUIRES(left.mutex) { return left.count == 0; });
}

void PipelineTasks::run(std::function<void()> task) {
  {
    MutexLock lock(left_->mutex);
    ++left_->count;
  }
  threads_->run([left = left_, task = std::move(task)]() mutable {
    task();
    task = nullptr;  // before it is told that it is over
    MutexLock lock(left->mutex);
    if (--left->count == 0) left->none.notify_all();
  });
}

}  // namespace stoker::data
