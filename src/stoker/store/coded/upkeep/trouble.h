// Trouble: what keeps the background from its work, told when it begins and when it ends, however
// often it is met in between.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "stoker/base/error.h"

namespace stoker::coded {

// One thread. Both return whether they wrote to the log.
class Trouble {
 public:
  explicit Trouble(std::string what) : what_(std::move(what)) {}
  // Told if there was none, or one of another code; but not if one of this code ended within the
  // last minute: what comes and goes is told once, too.
  bool met(const Error& error);
  // `done`: what could be done at last. Told if its beginning was.
  bool over(const std::string& done);

 private:
  const std::string what_;
  std::optional<Code> now_, last_;
  bool told_ = false;
  uint64_t times_ = 0;
  std::chrono::steady_clock::time_point ended_;  // the last one
};

}  // namespace stoker::coded
