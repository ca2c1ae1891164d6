// STOKER_CHECK: a condition that only a bug in Stoker can break. Always on; prints the condition
// and aborts. What a user, a disk or a peer can cause is an Error, never a CHECK.
#pragma once

namespace stoker {
[[noreturn]] void check_failed(const char* condition, const char* file, int line) noexcept;
}  // namespace stoker

#define STOKER_CHECK(condition)                        \
  (static_cast<bool>(condition) ? static_cast<void>(0) \
                                : ::stoker::check_failed(#condition, __FILE__, __LINE__))
