// Scheduler: which waiting Op goes next. Classes in order of urgency, with a floor for each so that
// none starves; within a class by deadline (none is last), then by arrival. Pure bookkeeping of one
// thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "stoker/io/op.h"
#include "stoker/io/op_list.h"

namespace stoker {

class Scheduler {
 public:
  // floor_percent[c]: of the dispatches made while class c waits, at least this share goes to c;
  // the sum is at most 100.
  explicit Scheduler(const std::array<uint8_t, kPriorities>& floor_percent)
      : floor_percent_(floor_percent) {}

  void push(Op& op);
  // Null when nothing waits, in the classes up to `least` that is.
  Op* pop(Priority least = Priority::scrub);
  size_t size() const { return size_; }

 private:
  struct Dated {
    uint64_t deadline_ns, arrival;
    Op* op;
  };
  struct Class {
    OpList undated;
    std::vector<Dated> dated;  // a heap, the earliest on top; keeps its memory
    uint32_t credit = 0;       // in hundredths of a dispatch owed to this class
    bool empty() const { return undated.empty() && dated.empty(); }
  };
  static bool later(const Dated& a, const Dated& b);
  size_t choose(size_t classes) const;
  Op* take(Class& from);

  const std::array<uint8_t, kPriorities> floor_percent_;
  std::array<Class, kPriorities> classes_;
  size_t size_ = 0;
  uint64_t arrivals_ = 0;
};

}  // namespace stoker
