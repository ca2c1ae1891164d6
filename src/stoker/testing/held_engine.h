// HeldEngine: disks in memory whose ops end when a test says so, and what came to them in which
// order. For tests of the Loop and of what stands on it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/engine.h"

namespace stoker {

class HeldEngine : public Engine {
 public:
  static constexpr size_t kDiskBytes = 16 * kMiB;

  // Outlives the engine. Everything is guarded by `mutex`; whoever looks while nothing moves need
  // not take it.
  struct Disks {
    Mutex mutex;
    CondVar changed;
    std::vector<Op*> held;  // submitted, not ended
    std::vector<Op> seen;   // copies, in order of submission
    size_t held_peak = 0;
    bool open = true;             // ops end at once; else only
    std::map<Op*, int> released;  // these: with success, or with this errno
    std::set<FileId> stuck;       // of these files none but the released ones
    std::map<FileId, std::vector<std::byte>> bytes;
    size_t closed = 0, wakes = 0;
    bool woken = false;  // and poll() did not return since

    void allow_all() {
      MutexLock lock(mutex);
      open = true;
      changed.notify_all();
    }
    void stick(FileId file) {
      MutexLock lock(mutex);
      stuck.insert(file);
    }
    void let_go() {
      MutexLock lock(mutex);
      stuck.clear();
      changed.notify_all();
    }
    // What a disk that is slow does: one of its ops is done. Returns once it is. `like`: the
    // caller's op, or a copy; the place in memory tells which.
    void let_one_go(const Op& like, int sys_errno = 0) {
      MutexLock lock(mutex);
      const auto found = std::find_if(held.begin(), held.end(), [&](const Op* op) {
        return op->bytes.data == like.bytes.data;
      });
      ASSERT_NE(found, held.end());
      released[*found] = sys_errno;
      changed.notify_all();
      ASSERT_TRUE(
          changed.wait_for(lock, std::chrono::seconds(30), [&] { return released.empty(); }));
    }
    void wait_for_seen(size_t count) {
      MutexLock lock(mutex);
      ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] {
        return seen.size() >= count;
      })) << seen.size();
    }
    std::vector<std::byte>& disk(FileId file) {
      auto& disk = bytes[file];
      if (disk.empty()) disk.resize(kDiskBytes);
      return disk;
    }
  };

  HeldEngine(uint32_t depth, std::shared_ptr<Disks> disks)
      : depth_(depth), disks_(std::move(disks)) {}
  ~HeldEngine() override { EXPECT_TRUE(disks_->held.empty()); }

  EngineTraits traits() const override { return {"held", depth_, false}; }
  Result<FileInfo> open(const OpenFile&) override {
    MutexLock lock(disks_->mutex);
    const auto id = static_cast<FileId>(disks_->bytes.size());
    return FileInfo{.id = id, .bytes = disks_->disk(id).size()};
  }
  Status close(FileId) override {
    MutexLock lock(disks_->mutex);
    ++disks_->closed;
    return {};
  }
  Status adopt(const Arena&) override { return {}; }

  size_t submit(std::span<Op* const> ops) override {
    MutexLock lock(disks_->mutex);
    const size_t taken = std::min<size_t>(ops.size(), depth_ - disks_->held.size());
    for (Op* op : ops.first(taken)) {
      disks_->held.push_back(op);
      disks_->seen.push_back(*op);
    }
    disks_->held_peak = std::max(disks_->held_peak, disks_->held.size());
    disks_->changed.notify_all();
    return taken;
  }

  size_t poll(uint64_t wait_ns) override {
    std::vector<Op*> done;
    {
      MutexLock lock(disks_->mutex);
      const auto ready = [&] {
        return disks_->woken || std::any_of(disks_->held.begin(), disks_->held.end(),
                                            [&](Op* op) { return may_end(*op); });
      };
      disks_->changed.wait_for(
          lock, std::chrono::nanoseconds(std::min<uint64_t>(wait_ns, 3'600'000'000'000)), ready);
      disks_->woken = false;
      std::erase_if(disks_->held, [&](Op* op) {
        if (!may_end(*op)) return false;
        end(*op);
        done.push_back(op);
        return true;
      });
    }
    for (Op* op : done) op->done(*op);
    return done.size();
  }

  void wake() override {
    MutexLock lock(disks_->mutex);
    disks_->woken = true;
    ++disks_->wakes;
    disks_->changed.notify_all();
  }

 private:
  // With the mutex.
  bool may_end(Op& op) const {
    return disks_->released.count(&op) != 0 || (disks_->stuck.count(op.file) == 0 && disks_->open);
  }
  void end(Op& op) {
    const auto released = disks_->released.find(&op);
    const int sys_errno = released == disks_->released.end() ? 0 : released->second;
    if (released != disks_->released.end()) disks_->released.erase(released);
    disks_->changed.notify_all();
    auto& disk = disks_->disk(op.file);
    if (sys_errno != 0 || op.offset + op.bytes.size > disk.size()) {
      op.result =
          fail(sys_errno, "{}", sys_errno != 0 ? "the test wants it so" : "beyond the disk");
      return;
    }
    EXPECT_TRUE(is_aligned(reinterpret_cast<uintptr_t>(op.bytes.data), kIoAlign));
    if (op.kind == Op::Kind::read)
      std::memcpy(op.bytes.data, disk.data() + op.offset, op.bytes.size);
    if (op.kind == Op::Kind::write)
      std::memcpy(disk.data() + op.offset, op.bytes.data, op.bytes.size);
    op.result = op.bytes.size;
  }

  const uint32_t depth_;
  const std::shared_ptr<Disks> disks_;
};

}  // namespace stoker
