#include "stoker/memory/budget.h"

#include <algorithm>
#include <utility>

#include "stoker/base/bytes.h"

namespace stoker {

Grant::Grant(Grant&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Grant& Grant::operator=(Grant&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Grant::~Grant() {
  if (budget_ != nullptr) budget_->give_back(bytes_);
}

Result<Grant> Budget::take(uint64_t bytes, std::string_view who) {
  MutexLock lock(mutex_);
  if (bytes > cap_ - used_) {
    return fail(Code::over_budget,
                "{} needs {}, but of the memory budget of {} only {} is left; give a larger budget",
                who, human_bytes(bytes), human_bytes(cap_), human_bytes(cap_ - used_));
  }
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return Grant(this, bytes);
}

void Budget::give_back(uint64_t bytes) {
  MutexLock lock(mutex_);
  STOKER_CHECK(bytes <= used_);
  used_ -= bytes;
}

uint64_t Budget::used() const {
  MutexLock lock(mutex_);
  return used_;
}

uint64_t Budget::peak() const {
  MutexLock lock(mutex_);
  return peak_;
}

}  // namespace stoker
