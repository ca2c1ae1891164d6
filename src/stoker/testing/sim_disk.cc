#include "stoker/testing/sim_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "stoker/base/bytes.h"

namespace stoker {
namespace {

bool starts_with(const std::string& path, const std::string& prefix) {
  return path.rfind(prefix, 0) == 0;
}

}  // namespace

void SimImage::read(uint64_t offset, std::span<std::byte> into) const {
  for (size_t moved = 0; moved < into.size();) {
    const size_t at = (offset + moved) % kPage;
    const size_t piece = std::min(kPage - at, into.size() - moved);
    const auto page = pages_.find((offset + moved) / kPage);
    if (page == pages_.end()) {
      std::memset(into.data() + moved, 0, piece);
    } else {
      std::memcpy(into.data() + moved, page->second->data() + at, piece);
    }
    moved += piece;
  }
}

void SimImage::write(uint64_t offset, std::span<const std::byte> from) {
  grow(offset + from.size());
  for (size_t moved = 0; moved < from.size();) {
    const size_t at = (offset + moved) % kPage;
    const size_t piece = std::min(kPage - at, from.size() - moved);
    auto& page = pages_[(offset + moved) / kPage];
    if (!page) {
      page = std::make_shared<Page>();
    } else if (page.use_count() > 1) {
      page = std::make_shared<Page>(*page);
    }
    std::memcpy(page->data() + at, from.data() + moved, piece);
    moved += piece;
  }
}

void SimImage::flip(uint64_t offset, unsigned bit) {
  std::byte value{};
  read(offset, {&value, 1});
  value ^= std::byte{1} << bit;
  write(offset, {&value, 1});
}

void SimDisk::put(const std::string& path, SimImage image) {
  MutexLock lock(mutex_);
  Disk& disk = disks_[path];
  disk.now = image;
  disk.durable = std::move(image);
  disk.pending.clear();
}

SimImage SimDisk::image(const std::string& path) const {
  MutexLock lock(mutex_);
  const auto disk = disks_.find(path);
  return disk == disks_.end() ? SimImage() : disk->second.now;
}

void SimDisk::flip(const std::string& path, uint64_t offset, unsigned bit) {
  MutexLock lock(mutex_);
  disks_.at(path).now.flip(offset, bit);
  disks_.at(path).durable.flip(offset, bit);
}

void SimDisk::put_pending(const std::string& path, uint64_t offset,
                          std::shared_ptr<const std::vector<std::byte>> bytes) {
  MutexLock lock(mutex_);
  Disk& disk = disks_.at(path);
  disk.now.write(offset, *bytes);
  Pending write = recorded(path, offset, std::move(bytes));
  write.completed = true;
  disk.pending.push_back(std::move(write));
}

// A new pending write, entered in the recording if there is one.
SimDisk::Pending SimDisk::recorded(const std::string& path, uint64_t offset,
                                   std::shared_ptr<const std::vector<std::byte>> bytes) {
  Pending write;
  write.id = next_id_++;
  write.offset = offset;
  write.bytes = std::move(bytes);
  if (recording_) {
    write.event = events_.size();
    SimEvent event;
    event.path = path;
    event.offset = write.offset;
    event.bytes = write.bytes;
    events_.push_back(std::move(event));
  }
  return write;
}

void SimDisk::remove(const std::string& path) {
  MutexLock lock(mutex_);
  disks_.erase(path);
}

void SimDisk::spoil(const std::string& path, uint64_t offset) {
  MutexLock lock(mutex_);
  spoilt_[path].insert(align_down(offset, kIoAlign));
}

void SimDisk::heal() {
  MutexLock lock(mutex_);
  spoilt_.clear();
}

void SimDisk::limit(const std::string& folder, uint64_t bytes) {
  MutexLock lock(mutex_);
  limits_[folder] = bytes;
}

void SimDisk::unlimit(const std::string& folder) {
  MutexLock lock(mutex_);
  limits_.erase(folder);
  std::erase_if(disks_, [&](const auto& each) { return starts_with(each.first, folder); });
}

void SimDisk::throttle(const std::string& path, uint64_t bytes_per_s) {
  MutexLock lock(mutex_);
  disks_.at(path).bytes_per_s = bytes_per_s;
}

void SimDisk::set_faults(const SimFaults& faults) {
  MutexLock lock(mutex_);
  faults_ = faults;
}

void SimDisk::fail_nth(Op::Kind kind, uint64_t nth, int sys_errno, const std::string& prefix) {
  MutexLock lock(mutex_);
  ordered_.push_back({kind, nth, sys_errno, prefix});
}

void SimDisk::cut_power(uint64_t seed, const std::string& prefix) {
  MutexLock lock(mutex_);
  cut(seed, prefix);
}

void SimDisk::order_cut(Cut cut) {
  MutexLock lock(mutex_);
  cuts_.push_back(std::move(cut));
}

void SimDisk::count_down_to_cuts(const std::string& path, bool reads) {
  for (auto at = cuts_.begin(); at != cuts_.end();) {
    if (!starts_with(path, at->prefix) || (reads && at->changes) || at->countdown-- != 0) {
      ++at;
      continue;
    }
    cut(at->seed, at->prefix);
    at = cuts_.erase(at);
  }
}

void SimDisk::cut(uint64_t seed, const std::string& prefix) {
  std::mt19937_64 random(seed);
  dark_.push_back(prefix);
  for (auto& [path, disk] : disks_) {
    if (!starts_with(path, prefix) || !disk.powered) continue;
    disk.powered = false;
    for (const Pending& write : disk.pending) {
      const uint64_t fate = random() % 3;
      if (fate == 0) disk.durable.write(write.offset, *write.bytes);
      if (fate == 1)
        disk.durable.write_torn(write.offset, *write.bytes,
                                [&](size_t) { return random() % 2 == 0; });
    }
    disk.pending.clear();
    disk.now = disk.durable;
  }
}

void SimDisk::restore_power() {
  MutexLock lock(mutex_);
  for (auto& [path, disk] : disks_) disk.powered = true;
  dark_.clear();
  cuts_.clear();
  ordered_.clear();
}

void SimDisk::slow(const std::string& path, uint64_t delay_ns) {
  MutexLock lock(mutex_);
  slow_ns_[path] = delay_ns;
}

void SimDisk::hold(const std::string& path, bool all) {
  MutexLock lock(mutex_);
  held_[path].all = all;
}

void SimDisk::let_go(const std::string& path) {
  MutexLock lock(mutex_);
  held_.erase(path);
}

size_t SimDisk::held(const std::string& path) const {
  MutexLock lock(mutex_);
  const auto held = held_.find(path);
  return held == held_.end() ? 0 : held->second.waiting;
}

void SimDisk::start_recording() {
  MutexLock lock(mutex_);
  recording_ = true;
  events_.clear();
}

std::vector<SimEvent> SimDisk::stop_recording() {
  MutexLock lock(mutex_);
  recording_ = false;
  for (auto& [path, disk] : disks_) {
    for (Pending& write : disk.pending) write.event = SIZE_MAX;
  }
  return std::exchange(events_, {});
}

void SimDisk::note(uint64_t note, uint64_t value) {
  MutexLock lock(mutex_);
  if (!recording_) return;
  SimEvent event;
  event.kind = SimEvent::Kind::note;
  event.note = note;
  event.value = value;
  events_.push_back(std::move(event));
}

// Bytes that may still be added in the limited folder that `path` lies in.
uint64_t SimDisk::room(const std::string& path) const {
  for (const auto& [folder, bytes] : limits_) {
    if (!starts_with(path, folder)) continue;
    uint64_t used = 0;
    for (const auto& [other, disk] : disks_)
      used += starts_with(other, folder) ? disk.now.bytes() : 0;
    return bytes - std::min(bytes, used);
  }
  return UINT64_MAX;
}

// As an engine does it: until the last step is done a cut leaves no file, an empty one, or a blank
// one of its full size.
Status SimDisk::make(const std::string& path, uint64_t bytes) {
  if (room(path) < bytes) {
    return fail(ENOSPC, "cannot reserve {} for '{}': the simulated disk is full",
                human_bytes(bytes), path);
  }
  const bool there = disks_.contains(path);    // and empty
  for (uint64_t step = 0; step < 3; ++step) {  // its name, its size, both made durable
    Disk& disk = disks_[path];
    disk.powered = !dark(path);
    count_down_to_cuts(path, false);
    if (disk.powered) continue;
    const uint64_t left = random_() % (step + 1);
    disk.now = disk.durable = SimImage(left == 2 ? bytes : 0);
    if (left == 0 && !there) disks_.erase(path);
    return fail(EIO, "cannot make '{}': the simulated disk has no power", path);
  }
  Disk& disk = disks_.at(path);
  disk.now = disk.durable = SimImage(bytes);
  if (recording_) {
    SimEvent event;
    event.kind = SimEvent::Kind::made;
    event.path = path;
    events_.push_back(std::move(event));
  }
  return {};
}

bool SimDisk::dark(const std::string& path) const {
  return std::any_of(dark_.begin(), dark_.end(),
                     [&](const std::string& prefix) { return starts_with(path, prefix); });
}

int SimDisk::planned_errno(const Op& op, const std::string& path) {
  for (auto fault = ordered_.begin(); fault != ordered_.end(); ++fault) {
    if (fault->kind != op.kind || !starts_with(path, fault->prefix) || --fault->countdown != 0)
      continue;
    const int sys_errno = fault->sys_errno;
    ordered_.erase(fault);
    return sys_errno;
  }
  if (chance(faults_.interrupted)) return EINTR;
  if (chance(faults_.eio)) return EIO;
  if (op.kind == Op::Kind::write && chance(faults_.enospc)) return ENOSPC;
  if (op.kind == Op::Kind::sync && chance(faults_.flush_fails)) return EIO;
  return 0;
}

SimDisk::Plan SimDisk::start(const Op& op, const std::string& path) {
  Plan plan;
  count_down_to_cuts(path, op.kind == Op::Kind::read);
  Disk& disk = disks_.at(path);
  if (!disk.powered) {
    plan.sys_errno = EIO;
    return plan;
  }
  plan.sys_errno = planned_errno(op, path);
  if (plan.sys_errno != 0) return plan;
  if (op.kind == Op::Kind::sync) {
    plan.lies = chance(faults_.flush_lies);
    for (const Pending& write : disk.pending) {
      if (write.completed) plan.covers.push_back(write.id);
    }
    return plan;
  }
  if (op.kind == Op::Kind::trim) return plan;
  plan.bytes = op.bytes.size - op.moved;
  if (plan.bytes > kSector && chance(faults_.short_transfer)) {
    plan.bytes = align_down(random_() % (plan.bytes - kSector) + kSector, kSector);
  }
  const uint64_t from = op.offset + op.moved;
  if (op.kind == Op::Kind::read) {
    plan.bytes =
        from >= disk.now.bytes() ? 0 : std::min<uint64_t>(plan.bytes, disk.now.bytes() - from);
    if (const auto spoilt = spoilt_.find(path); spoilt != spoilt_.end()) {
      const auto first = spoilt->second.lower_bound(align_down(from, kIoAlign));
      if (first != spoilt->second.end() && *first < from + plan.bytes) plan.sys_errno = EIO;
    }
    return plan;
  }
  if (from + plan.bytes > disk.now.bytes() && from + plan.bytes - disk.now.bytes() > room(path)) {
    plan.sys_errno = ENOSPC;
    plan.bytes = 0;
    return plan;
  }
  uint64_t offset = from;
  if (chance(faults_.misdirected))
    offset = align_down(random_() % std::max<uint64_t>(disk.now.bytes(), 1), kIoAlign);
  plan.tears = chance(faults_.torn);
  const std::byte* data = op.bytes.data + op.moved;
  Pending write = recorded(path, offset,
                           std::make_shared<const std::vector<std::byte>>(data, data + plan.bytes));
  plan.write = write.id;
  disk.pending.push_back(std::move(write));
  return plan;
}

int64_t SimDisk::finish(const Op& op, const std::string& path, Plan& plan) {
  const auto at = disks_.find(path);
  // the power went while it was under way; pending is cleared
  if (at == disks_.end() || !at->second.powered) return -EIO;
  Disk& disk = at->second;
  if (plan.sys_errno != 0) return -plan.sys_errno;
  if (op.kind == Op::Kind::read) {
    disk.now.read(op.offset + op.moved, {op.bytes.data + op.moved, plan.bytes});
  } else if (op.kind == Op::Kind::write) {
    const auto pending = std::find_if(disk.pending.begin(), disk.pending.end(),
                                      [&](const Pending& each) { return each.id == plan.write; });
    if (pending == disk.pending.end()) return -EIO;  // the power went and came back meanwhile
    Pending& write = *pending;
    write.completed = true;
    if (plan.tears) {
      // Whoever is told EIO knows nothing of the sectors: some are new, and all of them may still
      // vanish.
      disk.now.write_torn(write.offset, *write.bytes, [&](size_t) { return random_() % 2 == 0; });
      return -EIO;
    }
    disk.now.write(write.offset, *write.bytes);
    if (const auto spoilt = spoilt_.find(path); spoilt != spoilt_.end()) {
      std::erase_if(spoilt->second, [&](uint64_t each) {
        return each >= write.offset && each < write.offset + write.bytes->size();
      });
    }
  } else if (op.kind == Op::Kind::sync && !plan.lies) {
    SimEvent event;
    event.kind = SimEvent::Kind::flush;
    event.path = path;
    for (auto write = disk.pending.begin(); write != disk.pending.end();) {
      if (!std::binary_search(plan.covers.begin(), plan.covers.end(), write->id)) {
        ++write;
        continue;
      }
      if (write->event != SIZE_MAX) event.covers.push_back(write->event);
      disk.durable.write(write->offset, *write->bytes);
      write = disk.pending.erase(write);
    }
    if (recording_) events_.push_back(std::move(event));
  }
  return static_cast<int64_t>(plan.bytes);
}

}  // namespace stoker
