#include "stoker/store/remote/blocks.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace stoker::remote {
namespace {}  // namespace

std::string block_name(std::string_view key, std::string_view tag, uint64_t index) {
  ByteWriter name;
  name.put_string(key);
  name.put_string(tag);
  name.put(index);
  return name.take();
}

Result<std::unique_ptr<Blocks>> Blocks::make(uint64_t bytes, uint32_t block_bytes, Budget& budget) {
  if (block_bytes < 64 * kKiB || block_bytes > 8 * kMiB || !std::has_single_bit(block_bytes))
    return fail(Code::invalid_argument,
                "a block is a power of two from 64 KiB to 8 MiB, not {} bytes", block_bytes);
  bytes = align_down(bytes, block_bytes);
  STOKER_ASSIGN(Grant grant, budget.take(bytes, "blocks for clients"));
  STOKER_ASSIGN(Fd fd, make_memory("stoker blocks", bytes));
  STOKER_ASSIGN(Mapping mapping, Mapping::make(fd.get(), 0, bytes, Mapping::How::shared));
  if (bytes != 0) {
    // Huge pages, made from one small page each: more of them would be copied. Where the kernel
    // gives none, small pages do as well, but slower.
    for (uint64_t at = 0; at < bytes; at += kHugePage)
      (void)fallocate(fd.get(), 0, static_cast<off_t>(at), 1);
    (void)madvise(mapping.data(), bytes, MADV_HUGEPAGE);
    (void)madvise(mapping.data(), bytes, MADV_COLLAPSE);
    // All of it now: later a missing page would end the process.
    if (fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)
      return Error{Code::over_budget, errno,
                   "the machine has less than " + human_bytes(bytes) +
                       " of free memory for blocks; give --memory a smaller size"};
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    return fail(errno, "cannot seal shared memory: this kernel is older than Linux 5.1");
  return std::unique_ptr<Blocks>(
      new Blocks(std::move(fd), std::move(mapping), std::move(grant), block_bytes));
}

Blocks::Blocks(Fd fd, Mapping mapping, Grant grant, uint32_t block_bytes)
    : fd_(std::move(fd)),
      mapping_(std::move(mapping)),
      grant_(std::move(grant)),
      block_bytes_(block_bytes),
      slots_(mapping_.size() / block_bytes) {}

Blocks::Place Blocks::find(const std::string& name, bool eager) {
  MutexLock lock(mutex_);
  if (const auto at = by_name_.find(name); at != by_name_.end()) {
    Slot& slot = slots_[at->second];
    ++slot.pins;
    slot.used = true;
    ++counts_.pins;
    if (slot.filling) return {Found::filling, at->second};
    ++counts_.hits;
    return {Found::full, at->second};
  }
  if (!eager && wanted_once_.insert(name).second) {
    wanted_order_.push_back(name);
    if (wanted_order_.size() > slots_.size()) {
      wanted_once_.erase(wanted_order_.front());
      wanted_order_.pop_front();
    }
    return {};
  }
  // Twice around: the first time marks of use are taken away.
  for (size_t looked = 0; looked < 2 * slots_.size(); ++looked) {
    const auto index = static_cast<uint32_t>(hand_);
    hand_ = (hand_ + 1) % slots_.size();
    Slot& slot = slots_[index];
    if (slot.pins != 0 || std::exchange(slot.used, false)) continue;
    drop(index);
    slot = Slot{.name = name, .pins = 1, .filling = true, .whole = false, .used = true};
    by_name_.emplace(name, index);
    ++counts_.fills;
    ++counts_.pins;
    return {Found::empty, index};
  }
  return {};
}

std::vector<uint32_t> Blocks::find_full(const std::vector<std::string>& names) {
  std::vector<uint32_t> slots;
  MutexLock lock(mutex_);
  for (const std::string& name : names) {
    const auto at = by_name_.find(name);
    if (at == by_name_.end() || slots_[at->second].filling) return {};
    slots.push_back(at->second);
  }
  for (const uint32_t slot : slots) {
    ++slots_[slot].pins;
    slots_[slot].used = true;
  }
  counts_.pins += slots.size();
  counts_.hits += slots.size();
  return slots;
}

void Blocks::drop(uint32_t slot) {
  const auto at = by_name_.find(slots_[slot].name);
  if (at != by_name_.end() && at->second == slot) by_name_.erase(at);
  slots_[slot].name.clear();
}

void Blocks::filled(uint32_t slot, bool whole) {
  MutexLock lock(mutex_);
  STOKER_CHECK(slots_[slot].filling && slots_[slot].pins > 0);
  slots_[slot].filling = false;
  slots_[slot].whole = whole;
  if (!whole) drop(slot);
  filled_.notify_all();
}

bool Blocks::wait(uint32_t slot) {
  MutexLock lock(mutex_);
  filled_.wait(lock, [&] { return !slots_[slot].filling; });
  return slots_[slot].whole;
}

void Blocks::unpin(uint32_t slot) {
  MutexLock lock(mutex_);
  STOKER_CHECK(slots_[slot].pins > 0);
  --slots_[slot].pins;
  --counts_.pins;
}

void Blocks::forget(const std::string& name) {
  MutexLock lock(mutex_);
  if (const auto at = by_name_.find(name); at != by_name_.end()) drop(at->second);
}

Blocks::Counts Blocks::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

}  // namespace stoker::remote
