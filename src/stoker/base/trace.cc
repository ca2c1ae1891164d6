#include "stoker/base/trace.h"

#include <functional>
#include <thread>

namespace stoker {

void Trace::start(size_t spans_max) {
  MutexLock lock(mutex_);
  spans_.clear();
  spans_.reserve(spans_max);
  spans_max_ = spans_max;
  dropped_ = 0;
  on_ = true;
}

void Trace::add(Span span) {
  span.thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  MutexLock lock(mutex_);
  if (!on()) return;  // stopped meanwhile
  if (spans_.size() == spans_max_) {
    ++dropped_;
  } else {
    spans_.push_back(std::move(span));
  }
}

std::pair<std::vector<Span>, size_t> Trace::stop() {
  MutexLock lock(mutex_);
  on_ = false;
  return {std::exchange(spans_, {}), std::exchange(dropped_, 0)};
}

}  // namespace stoker
