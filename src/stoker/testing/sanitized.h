#pragma once

#include <cstdint>

namespace stoker {

// Sanitizers make everything many times slower: what is enumerated or random is done so many times
// less there. `make test` does all of it.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadsSanitized = true;
#else
inline constexpr bool kThreadsSanitized = false;
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr uint64_t kLess = 8;
#else
inline constexpr uint64_t kLess = 1;
#endif

}  // namespace stoker
