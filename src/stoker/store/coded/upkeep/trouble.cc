#include "stoker/store/coded/upkeep/trouble.h"

#include "stoker/base/check.h"
#include "stoker/base/log.h"

namespace stoker::coded {
namespace {

constexpr auto kSilence = std::chrono::minutes(1);

}  // namespace

bool Trouble::met(const Error& error) {
  ++times_;
  if (std::exchange(now_, error.code) == error.code) return false;
  const bool again = last_ == error.code && std::chrono::steady_clock::now() < ended_ + kSilence;
  last_ = error.code;
  if (again) return false;
  told_ = true;
  log().warn("{} does not go on, and is tried again until it does: {}", what_, error.message());
  return true;
}

bool Trouble::over(const std::string& done) {
  if (!now_) return false;
  now_.reset();
  STOKER_CHECK(times_ > 0);
  ended_ = std::chrono::steady_clock::now();
  const uint64_t times = std::exchange(times_, 0);
  if (!std::exchange(told_, false)) return false;
  log().warn("{} goes on again: {}; it had failed {} times", what_, done, times);
  return true;
}

}  // namespace stoker::coded
