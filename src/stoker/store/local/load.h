// VolumeLoad: how busy a volume is, in seconds of its own measured speed. Any thread.
#pragma once

#include <cstdint>
#include <mutex>

namespace stoker::local {

class VolumeLoad {
 public:
  void begin(uint64_t bytes, uint64_t now_ns) {
    std::lock_guard lock(mutex_);
    if (in_flight_ == 0) busy_since_ = now_ns;
    in_flight_ += bytes;
  }
  void end(uint64_t bytes, uint64_t now_ns) {
    std::lock_guard lock(mutex_);
    in_flight_ -= bytes;
    bytes_ += static_cast<double>(bytes);
    busy_ns_ += static_cast<double>(now_ns - busy_since_);
    busy_since_ = now_ns;
    if (bytes_ > kWindowBytes) {  // forget slowly: the speed of about the last gigabyte counts
      bytes_ /= 2;
      busy_ns_ /= 2;
    }
  }
  // How long what is in flight still takes, in nanoseconds; an idle volume is as good as another.
  double wait_ns() const {
    std::lock_guard lock(mutex_);
    const double ns_per_byte = bytes_ > 0 && busy_ns_ > 0 ? busy_ns_ / bytes_ : 1.0;
    return static_cast<double>(in_flight_) * ns_per_byte;
  }

 private:
  static constexpr double kWindowBytes = 1e9;
  mutable std::mutex mutex_;
  uint64_t in_flight_ = 0, busy_since_ = 0;
  double bytes_ = 0, busy_ns_ = 0;
};

}  // namespace stoker::local
