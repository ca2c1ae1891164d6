// Budget: the hard cap on memory that every pool draws on. What is not granted is not allocated.
#pragma once

#include <cstdint>
#include <string_view>

#include "stoker/base/mutex.h"
#include "stoker/base/result.h"

namespace stoker {

class Budget;

// A granted share of a Budget; gives it back when destroyed. Must not outlive the Budget.
class Grant {
 public:
  Grant() = default;
  Grant(Grant&& other) noexcept;
  Grant& operator=(Grant&& other) noexcept;
  ~Grant();
  uint64_t bytes() const { return bytes_; }

 private:
  friend class Budget;
  Grant(Budget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}
  Budget* budget_ = nullptr;
  uint64_t bytes_ = 0;
};

// Any thread.
class Budget {
 public:
  explicit Budget(uint64_t cap_bytes) : cap_(cap_bytes) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // over_budget names who asked, how much, and what is left.
  Result<Grant> take(uint64_t bytes, std::string_view who);

  uint64_t cap() const { return cap_; }
  uint64_t used() const;
  uint64_t peak() const;

 private:
  friend class Grant;
  void give_back(uint64_t bytes);
  const uint64_t cap_;
  mutable Mutex mutex_;
  uint64_t used_ GUARDED_BY(mutex_) = 0;
  uint64_t peak_ GUARDED_BY(mutex_) = 0;
};

}  // namespace stoker
