#include "stoker/io/scheduler.h"

#include <algorithm>

namespace stoker {
namespace {
constexpr uint32_t kDispatch = 100;  // credit that buys one dispatch
}

bool Scheduler::later(const Dated& a, const Dated& b) {
  return a.deadline_ns != b.deadline_ns ? a.deadline_ns > b.deadline_ns : a.arrival > b.arrival;
}

void Scheduler::push(Op& op) {
  Class& to = classes_[static_cast<size_t>(op.priority)];
  ++size_;
  if (op.deadline_ns == 0) {
    to.undated.push(op);
    return;
  }
  to.dated.push_back({op.deadline_ns, arrivals_++, &op});
  std::push_heap(to.dated.begin(), to.dated.end(), later);
}

// Of the first `classes`: the most urgent that is owed a dispatch, else the most urgent that waits;
// kPriorities: none waits.
size_t Scheduler::choose(size_t classes) const {
  size_t waiting = kPriorities;
  for (size_t c = 0; c < classes; ++c) {
    if (classes_[c].empty()) continue;
    if (classes_[c].credit >= kDispatch) return c;
    waiting = std::min(waiting, c);
  }
  return waiting;
}

Op* Scheduler::pop(Priority least) {
  const size_t classes = static_cast<size_t>(least) + 1;
  if (size_ == 0 || choose(classes) == kPriorities) return nullptr;
  for (size_t c = 0; c < classes; ++c) {
    Class& each = classes_[c];
    each.credit =
        each.empty() ? 0
                     : std::min<uint32_t>(each.credit + floor_percent_[c], kPriorities * kDispatch);
  }
  Class& chosen = classes_[choose(classes)];
  chosen.credit -= std::min(chosen.credit, kDispatch);
  --size_;
  return take(chosen);
}

Op* Scheduler::take(Class& from) {
  if (from.dated.empty()) return from.undated.pop();
  std::pop_heap(from.dated.begin(), from.dated.end(), later);
  Op* op = from.dated.back().op;
  from.dated.pop_back();
  return op;
}

}  // namespace stoker
