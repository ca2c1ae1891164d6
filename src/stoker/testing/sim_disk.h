// SimDisk: the disks of a simulated machine. They outlive the engines that use them, lose unflushed
// writes when the power goes, and misbehave by seed or on order.
//
// What counts as written: a write is *pending* from the moment it is submitted until a sync that
// was submitted after the write had completed has itself completed; from then on it is durable.
// Each pending write survives a power cut whole, vanishes, or is torn at 512-byte sectors. A
// recording keeps what a replay needs to build every such outcome. A disk that is opened to be made
// is made in three steps, each of which counts like a write: a cut before the last is done leaves
// nothing of it, an empty one, or a blank one of its full size.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/op.h"

namespace stoker {

inline constexpr size_t kSector = 512;  // the disk's unit of atomicity

// The bytes of one disk: sparse, and cheap to copy (pages are shared until written).
class SimImage {
 public:
  explicit SimImage(uint64_t bytes = 0) : bytes_(bytes) {}
  uint64_t bytes() const { return bytes_; }
  void grow(uint64_t bytes) { bytes_ = std::max(bytes_, bytes); }
  void read(uint64_t offset, std::span<std::byte> into) const;
  void write(uint64_t offset, std::span<const std::byte> from);
  // Only the sectors for which `keep(index)` says so.
  template <typename Keep>
  void write_torn(uint64_t offset, std::span<const std::byte> from, Keep keep) {
    for (size_t at = 0; at < from.size(); at += kSector) {
      if (keep(at / kSector))
        write(offset + at, from.subspan(at, std::min(kSector, from.size() - at)));
    }
  }
  void flip(uint64_t offset, unsigned bit);

 private:
  static constexpr size_t kPage = 16384;
  using Page = std::array<std::byte, kPage>;
  uint64_t bytes_;
  std::map<uint64_t, std::shared_ptr<Page>> pages_;  // by offset / kPage; missing ones are zeros
};

// Chances in a million for each transfer, by the disk's seed.
struct SimFaults {
  uint32_t eio = 0;     // fails, nothing moved
  uint32_t torn = 0;    // a write fails with EIO after some of its sectors were written
  uint32_t enospc = 0;  // a write fails with ENOSPC
  uint32_t short_transfer = 0;
  uint32_t interrupted = 0;  // EINTR
  uint32_t misdirected = 0;  // a write succeeds, but elsewhere on the same disk
  uint32_t flush_fails = 0;  // a sync fails, and what was pending stays so
  uint32_t flush_lies = 0;   // a sync succeeds and makes nothing durable
};

struct SimEvent {
  enum class Kind : uint8_t { write, flush, made, note };
  Kind kind = Kind::write;
  std::string path;
  uint64_t offset = 0;
  std::shared_ptr<const std::vector<std::byte>> bytes;  // of a write
  // of a flush: the indices of the writes that it made durable
  std::vector<size_t> covers;
  // of a note: whatever the test wants to remember
  uint64_t note = 0, value = 0;
};

// Any thread.
class SimDisk {
 public:
  explicit SimDisk(uint64_t seed = 1) : random_(seed) {}

  // Content, with the power on or off. put() makes or replaces a disk, everything on it durable.
  void put(const std::string& path, SimImage image);
  SimImage image(const std::string& path) const;  // as reads see it now
  void flip(const std::string& path, uint64_t offset, unsigned bit);
  // Adds a completed write that no flush has covered yet: what a killed process leaves behind.
  // Recorded like any other.
  void put_pending(const std::string& path, uint64_t offset,
                   std::shared_ptr<const std::vector<std::byte>> bytes);
  void remove(const std::string& path);
  // Paths that begin with `folder` share this much space.
  void limit(const std::string& folder, uint64_t bytes);
  void unlimit(const std::string& folder);  // and removes what is in it

  // A block that cannot be read (EIO, with whatever is read together with it) until it is written,
  // or until heal().
  void spoil(const std::string& path, uint64_t offset);
  void heal();

  void set_faults(const SimFaults& faults);
  // This disk alone moves so many bytes a second, on top of what the device model says; 0: no
  // longer.
  void throttle(const std::string& path, uint64_t bytes_per_s);
  // The nth (1 = the next) transfer of this kind on paths that begin with `prefix` fails with this
  // errno, once.
  void fail_nth(Op::Kind kind, uint64_t nth, int sys_errno, const std::string& prefix = {});

  // Cuts the power of paths that begin with `prefix`: each pending write survives, vanishes or is
  // torn, by seed; transfers fail with EIO until restore_power().
  void cut_power(uint64_t seed, const std::string& prefix = {});
  // The same after this many further transfers on those paths were started.
  void cut_power_after(uint64_t transfers, uint64_t seed, const std::string& prefix = {}) {
    order_cut({transfers, seed, prefix, false});
  }
  // The same, and only writes and syncs count.
  void cut_power_after_changes(uint64_t changes, uint64_t seed) {
    order_cut({changes, seed, {}, true});
  }
  void restore_power();  // and forgets the cuts and faults that were ordered and have not come

  // Transfers of this disk take so much longer from now on; 0: no longer.
  void slow(const std::string& path, uint64_t delay_ns);
  // Reads of this disk that come from now on do not start until it is let go; they are under way,
  // and nobody waits for them but their owner.
  void hold_reads(const std::string& path) { hold(path, false); }
  // The same of whatever comes: the disk stops answering.
  void hold_all(const std::string& path) { hold(path, true); }
  void let_go(const std::string& path);
  size_t held(const std::string& path) const;
  // No transfer starts while this lives: what is submitted meanwhile waits.
  std::unique_lock<Mutex> hold() { return std::unique_lock(gate_); }

  void start_recording();
  std::vector<SimEvent> stop_recording();
  void note(uint64_t note, uint64_t value);  // into the recording, between the transfers

 private:
  friend class SimEngine;
  struct Pending {
    uint64_t id = 0;  // grows with each write, over all disks
    uint64_t offset = 0;
    std::shared_ptr<const std::vector<std::byte>> bytes;
    bool completed = false;
    size_t event = SIZE_MAX;  // its index in the recording
  };
  struct Disk {
    SimImage now, durable;
    std::list<Pending> pending;  // in order of submission
    bool powered = true;
    uint64_t bytes_per_s = 0;
  };
  struct Fault {
    Op::Kind kind;
    uint64_t countdown;
    int sys_errno;
    std::string prefix;
  };
  struct Cut {
    uint64_t countdown;
    uint64_t seed;
    std::string prefix;
    bool changes = false;  // reads do not count
  };
  struct Held {
    bool all = false;  // not reads alone
    size_t waiting = 0;
  };
  // What one attempt at a transfer will do, decided when it is started.
  struct Plan {
    int sys_errno = 0;
    size_t bytes = 0;  // moved, before the error if there is one
    bool tears = false;
    bool lies = false;
    uint64_t write = 0;            // its id
    std::vector<uint64_t> covers;  // the ids of the writes that a sync makes durable
  };

  bool chance(uint32_t per_million) {
    return per_million != 0 && random_() % 1'000'000 < per_million;
  }
  void cut(uint64_t seed, const std::string& prefix);
  void hold(const std::string& path, bool all);
  Pending recorded(const std::string& path, uint64_t offset,
                   std::shared_ptr<const std::vector<std::byte>> bytes);
  void order_cut(Cut cut);
  void count_down_to_cuts(const std::string& path, bool reads);
  int planned_errno(const Op& op, const std::string& path);
  Status make(const std::string& path, uint64_t bytes);  // where there is none, or an empty one
  bool dark(const std::string& path) const;
  uint64_t room(const std::string& path) const;
  // Both with the op still to move [op.moved, size).
  Plan start(const Op& op, const std::string& path);
  int64_t finish(const Op& op, const std::string& path, Plan& plan);

  Mutex gate_;           // taken before mutex_ by whatever starts
  mutable Mutex mutex_;  // guards everything
  std::mt19937_64 random_;
  std::map<std::string, Disk> disks_;
  std::map<std::string, uint64_t> limits_;
  SimFaults faults_;
  std::vector<Fault> ordered_;
  std::map<std::string, std::set<uint64_t>> spoilt_;  // offsets, of kIoAlign each
  std::vector<Cut> cuts_;
  // prefixes of paths whose power was cut: nothing is made there either
  std::vector<std::string> dark_;
  std::map<std::string, uint64_t> slow_ns_;
  std::map<std::string, Held> held_;
  uint64_t next_id_ = 1;
  bool recording_ = false;
  std::vector<SimEvent> events_;
};

}  // namespace stoker
