#include "stoker/io/uring/registry.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"

namespace stoker {
namespace {

constexpr uint32_t kFiles = 1024;
constexpr uint32_t kSlots = 1024;
constexpr uint64_t kSlotBytes = kGiB;  // the kernel takes at most that much as one buffer

uint32_t slots_of(uint64_t bytes) {
  return static_cast<uint32_t>((bytes + kSlotBytes - 1) / kSlotBytes);
}

}  // namespace

void UringRegistry::start() {
  rlimit open_files{};
  getrlimit(RLIMIT_NOFILE, &open_files);
  const auto files = static_cast<uint32_t>(std::min<rlim_t>(kFiles, open_files.rlim_cur));
  if (const int result = io_uring_register_files_sparse(ring_, files); result == 0) {
    files_ = files;
  } else {
    log().info(
        "the kernel keeps no table of files for io_uring ({}): they are looked up at each transfer",
        strerror(-result));
  }
  if (const int result = io_uring_register_buffers_sparse(ring_, kSlots); result == 0) {
    MutexLock lock(mutex_);
    slots_.assign(kSlots, false);
    has_memory_ = true;
  } else {
    log().info(
        "the kernel keeps no table of memory for io_uring ({}): pages are pinned at each transfer",
        strerror(-result));
  }
}

Status UringRegistry::add_file(FileId id, int fd) {
  if (!has_file(id)) return {};
  const int result = io_uring_register_files_update(ring_, static_cast<unsigned>(id), &fd, 1);
  return result == 1 ? Status{}
                     : fail(-result, "the kernel refuses to register a file for io_uring");
}

void UringRegistry::remove_file(FileId id) {
  int none = -1;
  if (has_file(id)) io_uring_register_files_update(ring_, static_cast<unsigned>(id), &none, 1);
}

int UringRegistry::take_slots(uint32_t count) {
  const auto run = std::search_n(slots_.begin(), slots_.end(), static_cast<int>(count), false);
  if (run == slots_.end()) return -1;
  std::fill_n(run, count, true);
  return static_cast<int>(run - slots_.begin());
}

// Empties the slots in the kernel too; transfers that still use them keep their pages until they
// end.
void UringRegistry::free_slots(uint32_t first, uint32_t count) {
  const std::vector<iovec> none(count, iovec{nullptr, 0});
  io_uring_register_buffers_update_tag(ring_, first, none.data(), nullptr, count);
  std::fill_n(slots_.begin() + first, count, false);
}

void UringRegistry::add(const Arena& arena) {
  MutexLock lock(mutex_);
  if (slots_.empty() || regions_.count(arena.id()) != 0) return;
  const uint32_t count = slots_of(arena.size());
  const int first = take_slots(count);
  int result = -ENOSPC;
  if (first >= 0) {
    std::vector<iovec> parts;
    for (uint64_t at = 0; at < arena.size(); at += kSlotBytes)
      parts.push_back({arena.data() + at, std::min(kSlotBytes, arena.size() - at)});
    result = io_uring_register_buffers_update_tag(ring_, static_cast<unsigned>(first), parts.data(),
                                                  nullptr, count);
    if (result == static_cast<int>(count)) {
      regions_.emplace(arena.id(),
                       Region{arena.data(), arena.size(), static_cast<uint32_t>(first)});
      changed_.store(true, std::memory_order_release);
      return;
    }
    free_slots(static_cast<uint32_t>(first), count);
  }
  if (!refusal_logged_) {
    log().warn(
        "memory of {} stays unregistered for io_uring ({}): its pages are pinned at each transfer; "
        "a higher limit of locked memory (ulimit -l) would help",
        human_bytes(arena.size()), result < 0 ? strerror(-result) : "only a part was taken");
    refusal_logged_ = true;
  }
}

void UringRegistry::remove(const Arena& arena) {
  MutexLock lock(mutex_);
  const auto region = regions_.find(arena.id());
  if (region == regions_.end()) return;
  free_slots(region->second.first_slot, slots_of(region->second.size));
  regions_.erase(region);
  changed_.store(true, std::memory_order_release);
}

int UringRegistry::find(const Slice& bytes) {
  if (bytes.arena < 0) return -1;
  if (changed_.load(std::memory_order_acquire)) {
    MutexLock lock(mutex_);
    changed_ = false;
    known_ = regions_;
  }
  const auto found = known_.find(bytes.arena);
  if (found == known_.end()) return -1;
  const Region& region = found->second;
  const auto at = static_cast<uint64_t>(bytes.data - region.data);
  if (bytes.data < region.data || at + bytes.size > region.size) return -1;
  if (at / kSlotBytes != (at + bytes.size - 1) / kSlotBytes) return -1;  // across two slots
  return static_cast<int>(region.first_slot + at / kSlotBytes);
}

}  // namespace stoker
