// OpList: a first-in-first-out chain of Ops through Op::next. Allocates nothing; not thread-safe.
#pragma once

#include <utility>

#include "stoker/io/op.h"

namespace stoker {

class OpList {
 public:
  bool empty() const { return head_ == nullptr; }

  void push(Op& op) {
    op.next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = &op;
    tail_ = &op;
  }

  // The first, or null.
  Op* pop() {
    Op* op = head_;
    if (op != nullptr) head_ = std::exchange(op->next, nullptr);
    return op;
  }

 private:
  Op* head_ = nullptr;
  Op* tail_ = nullptr;  // meaningless while head_ is null
};

}  // namespace stoker
