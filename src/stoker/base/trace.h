// Trace: what threads did when, kept while somebody asks for it. Off, it costs whoever would add to
// it one load and one branch.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/clock.h"
#include "stoker/base/mutex.h"

namespace stoker {

struct Span {
  const char* track = "";  // a literal: what kind of thing it is, "disk" or "kernels"
  std::string name;
  uint64_t begin_ns = 0, end_ns = 0;  // on Clock::real()
  uint64_t bytes = 0;
  uint64_t thread = 0;  // equal numbers are one thread
};

// Any thread. Memory is taken by start() alone, except for long names.
class Trace {
 public:
  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  void start(size_t spans_max);
  void add(Span span);  // dropped, and counted, when there are spans_max already
  // What was added since start(), and how many were dropped.
  std::pair<std::vector<Span>, size_t> stop();

 private:
  std::atomic<bool> on_{false};
  Mutex mutex_;
  std::vector<Span> spans_ GUARDED_BY(mutex_);
  size_t spans_max_ GUARDED_BY(mutex_) = 0;
  size_t dropped_ GUARDED_BY(mutex_) = 0;
};

// Adds a span for its scope, if the trace is on when that begins. `name` is called at the end, and
// only then.
template <typename Name>
class TraceScope {
 public:
  TraceScope(Trace* trace, const char* track, Name name)
      : trace_(trace != nullptr && trace->on() ? trace : nullptr),
        track_(track),
        name_(std::move(name)) {
    if (trace_ != nullptr) begin_ns_ = Clock::real().now_ns();
  }
  ~TraceScope() {
    if (trace_ != nullptr)
      trace_->add({.track = track_,
                   .name = name_(),
                   .begin_ns = begin_ns_,
                   .end_ns = Clock::real().now_ns()});
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Trace* const trace_;
  const char* const track_;
  Name name_;
  uint64_t begin_ns_ = 0;
};

}  // namespace stoker
