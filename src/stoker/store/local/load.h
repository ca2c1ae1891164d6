// VolumeLoad: how busy a volume is, in seconds of its own measured speed. Any thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "stoker/base/check.h"
#include "stoker/base/mutex.h"

namespace stoker::local {

class VolumeLoad {
 public:
  void begin(uint64_t bytes) {
    MutexLock lock(mutex_);
    in_flight_ += bytes;
  }
  void take_back(uint64_t bytes) {
    MutexLock lock(mutex_);
    STOKER_CHECK(in_flight_ >= bytes);
    in_flight_ -= bytes;
  }
  // The disk had them from `from_ns` on: what they waited for before that was not its doing.
  void end(uint64_t bytes, uint64_t from_ns, uint64_t now_ns, bool read) {
    MutexLock lock(mutex_);
    STOKER_CHECK(in_flight_ >= bytes);
    in_flight_ -= bytes;
    (read ? read_ : written_) += bytes;
    forget(from_ns);
    bytes_ += static_cast<double>(bytes);
    // what overlaps counts once
    busy_ns_ += static_cast<double>(now_ns - std::min(now_ns, std::max(from_ns, ended_ns_)));
    ended_ns_ = now_ns;
    if (bytes_ > kWindowBytes) {  // forget slowly: the speed of about the last gigabyte counts
      bytes_ /= 2;
      busy_ns_ /= 2;
    }
  }
  uint64_t read_bytes() const {
    MutexLock lock(mutex_);
    return read_;
  }
  uint64_t written_bytes() const {
    MutexLock lock(mutex_);
    return written_;
  }
  // It had no room for them.
  void refuse(uint64_t bytes) {
    MutexLock lock(mutex_);
    refused_ += bytes;
  }
  uint64_t refused_bytes() const {
    MutexLock lock(mutex_);
    return refused_;
  }
  double bytes_per_second() const {
    MutexLock lock(mutex_);
    return busy_ns_ > 0 ? bytes_ * 1e9 / busy_ns_ : 0.0;
  }
  // When it last ended something.
  uint64_t ended_ns() const {
    MutexLock lock(mutex_);
    return ended_ns_;
  }
  // How long what is in flight, `given` bytes that are about to be, and `more` will take, in
  // nanoseconds. `latest_ns`: when any of the volumes last ended something. One that was passed
  // over since may be faster by now: the longer ago, the less is what it once needed believed, so
  // that it is tried again, with a piece of each write.
  double wait_ns(uint64_t given, uint64_t more, uint64_t latest_ns) const {
    MutexLock lock(mutex_);
    const double ns_per_byte = bytes_ > 0 && busy_ns_ > 0 ? busy_ns_ / bytes_ : 1.0;
    return static_cast<double>(in_flight_ + given + more) * ns_per_byte *
           (in_flight_ + given > 0 ? 1.0 : belief(latest_ns));
  }

 private:
  static constexpr double kWindowBytes = 1e9;
  static constexpr double kHalfLifeNs = 5e9;  // of what is known, while nothing moves
  // that stay known: one small operation after a rest does not tell how fast a disk is
  static constexpr double kLeastBytes = 1 << 18;
  double belief(uint64_t now_ns) const REQUIRES(mutex_) {
    return now_ns > ended_ns_ ? std::exp2(-static_cast<double>(now_ns - ended_ns_) / kHalfLifeNs)
                              : 1.0;
  }
  void forget(uint64_t now_ns) REQUIRES(mutex_) {
    const double kept = bytes_ > kLeastBytes ? std::max(belief(now_ns), kLeastBytes / bytes_) : 1.0;
    bytes_ *= kept;
    busy_ns_ *= kept;
  }
  mutable Mutex mutex_;
  uint64_t in_flight_ GUARDED_BY(mutex_) = 0;
  uint64_t ended_ns_ GUARDED_BY(mutex_) = 0;
  uint64_t read_ GUARDED_BY(mutex_) = 0;
  uint64_t written_ GUARDED_BY(mutex_) = 0;
  uint64_t refused_ GUARDED_BY(mutex_) = 0;
  double bytes_ GUARDED_BY(mutex_) = 0;
  double busy_ns_ GUARDED_BY(mutex_) = 0;
};

}  // namespace stoker::local
