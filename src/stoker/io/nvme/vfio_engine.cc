#include "stoker/io/nvme/vfio_engine.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>

#include "stoker/base/bytes.h"
#include "stoker/base/clock.h"
#include "stoker/base/log.h"
#include "stoker/io/nvme/device.h"
#include "stoker/io/transfer.h"

namespace stoker::nvme {
namespace {

constexpr uint32_t kDepthMax = 1023;
constexpr uint64_t kSpinMin = 10'000;
constexpr uint32_t kLooks = 32;       // for an answer, between two looks at the clock
constexpr uint64_t kNapMin = 50'000;  // of one without an interrupt to end it
constexpr uint64_t kWatchNs = 100'000'000;
constexpr uint16_t kAborted = 0x007;  // a status of the drive's: as was asked

struct Place {
  std::string address;
  uint32_t space = 1;
};

// "0000:00:04.0" or "0000:00:04.0/2".
Result<Place> parse_place(const std::string& device, const std::string& path) {
  Place place;
  const size_t slash = device.find('/');
  place.address = device.substr(0, slash);
  const char* end = device.data() + device.size();
  const bool wrong =
      slash != std::string::npos &&
      (std::from_chars(device.data() + slash + 1, end, place.space).ptr != end || place.space == 0);
  if (!wrong && !place.address.empty()) return place;
  return fail(Code::invalid_argument,
              "'{}' names no drive by its PCI address; write for example nvme:0000:00:04.0, or "
              "nvme:0000:00:04.0/2 for its second namespace",
              path);
}

void drain(int fd) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(fd, &count, sizeof count);
}

}  // namespace

Result<std::unique_ptr<VfioEngine>> VfioEngine::make(uint32_t depth, const VfioOptions& options) {
  if (depth == 0) return fail(Code::invalid_argument, "an engine needs a depth of at least 1");
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) return fail(errno, "cannot make an eventfd");
  return std::unique_ptr<VfioEngine>(new VfioEngine(std::min(depth, kDepthMax), wake_fd, options));
}

VfioEngine::~VfioEngine() {
  STOKER_CHECK(in_flight_ == 0);
  ::close(wake_fd_);
  // Others may go on with the bus: the drives stop, then the memory is theirs no more.
  for (std::unique_ptr<Drive>& drive : drives_) drive.reset();
  for (const auto& [id, region] : arenas_) {
    if (region.at != 0) bus_->give_back_arena(id);
  }
}

Result<FileInfo> VfioEngine::open(const OpenFile& request) {
  STOKER_ASSIGN(const Target target, parse_target(request.path));
  STOKER_ASSIGN(const Place place, parse_place(target.device, request.path));
  STOKER_ASSIGN(const size_t drive, drive_at(place.address));
  auto space = drives_[drive]->driver->space(place.space);
  if (!space) return space.error().with("cannot open '" + request.path + "'");
  FileTable::File file;
  STOKER_TRY(fill_in(file, request, target, *space));
  file.fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // a descriptor marks an open file
  if (file.fd < 0) return fail(errno, "cannot open '{}'", request.path);
  file.drive = drive;
  return files_.add(std::move(file));
}

Status VfioEngine::close(FileId file) { return files_.close(file); }

// The drive of that address, started where it is new. It stays until the engine ends.
Result<size_t> VfioEngine::drive_at(const std::string& address) {
  MutexLock lock(mutex_);
  const size_t made = drives();
  for (size_t i = 0; i < made; ++i) {
    if (drives_[i]->driver->address() == address) return i;
  }
  if (made == kDrivesMax)
    return fail(Code::unsupported, "'{}' is one drive too many: a process drives at most 16",
                address);
  if (!bus_) {
    STOKER_ASSIGN(bus_, options_.make_bus());
  }
  auto drive = std::make_unique<Drive>();
  STOKER_ASSIGN(drive->driver, Driver::make(address, *bus_, depth_));
  drives_[made] = std::move(drive);
  drives_made_.store(made + 1, std::memory_order_release);
  for (const auto& [id, region] : arenas_) {
    if (region.at == 0) map_arena(id);
  }
  return made;
}

// Each arena once, for all drives.
void VfioEngine::map_arena(int32_t id) {
  Region& region = arenas_.at(id);
  const auto at = bus_->map_arena(id, region.data, region.bytes);
  if (at) region.at = *at;
  arenas_changed_.store(true, std::memory_order_release);
  if (!at) log().warn("{}: each transfer maps its memory, which is slower", at.error().message());
}

Status VfioEngine::adopt(const Arena& arena) {
  MutexLock lock(mutex_);
  if (!arenas_.emplace(arena.id(), Region{arena.data(), arena.size(), 0}).second) return {};
  if (bus_ && drives() > 0) map_arena(arena.id());
  return {};
}

Status VfioEngine::unadopt(const Arena& arena) {
  MutexLock lock(mutex_);
  const auto found = arenas_.find(arena.id());
  if (found == arenas_.end()) return {};
  if (found->second.at != 0) bus_->give_back_arena(arena.id());
  arenas_.erase(found);
  arenas_changed_.store(true, std::memory_order_release);
  return {};
}

// Where drives see the bytes, if their arena is mapped; else 0. Takes the lock after a change only.
uint64_t VfioEngine::find(const Slice& bytes) {
  if (arenas_changed_.load(std::memory_order_acquire)) {
    MutexLock lock(mutex_);
    arenas_changed_ = false;
    known_arenas_ = arenas_;
  }
  const auto found = known_arenas_.find(bytes.arena);
  if (found == known_arenas_.end() || found->second.at == 0) return 0;
  const Region& region = found->second;
  const auto offset = static_cast<uint64_t>(bytes.data - region.data);
  if (bytes.data < region.data || offset + bytes.size > region.bytes) return 0;
  return region.at + offset;
}

size_t VfioEngine::submit(std::span<Op* const> ops) {
  const size_t taken = std::min<size_t>(ops.size(), depth_ - in_flight_);
  if (in_flight_ == 0) waits_since_ns_ = 0;
  batch_ns_ = Clock::real().now_ns();
  in_flight_ += static_cast<uint32_t>(taken);
  for (Op* op : ops.first(taken)) {
    const FileTable::File* file = files_.find(op->file);
    if (startable(*op, file) && in_file(*op, file->info.bytes, file->path)) {
      start(*op, *file);
    } else {
      failed_.push(*op);
    }
  }
  ring();
  return taken;
}

// What waits for room comes first.
void VfioEngine::start(Op& op, const FileTable::File& file) {
  Drive& drive = *drives_[file.drive];
  if (drive.gone) {
    fail(op, drive.lost->sys_errno, file.path, "the drive was given up: " + drive.lost->what);
    return failed_.push(op);
  }
  drive.waiting.push(op);
  start_waiting(drive);
}

void VfioEngine::start_waiting(Drive& drive) {
  while (drive.driver->room()) {
    Op* op = drive.waiting.pop();
    if (op == nullptr) return;
    send(drive, *op);
  }
}

// Lays what is left of the op into the drive's queue, which has room.
void VfioEngine::send(Drive& drive, Op& op) {
  const FileTable::File& file = *files_.find(op.file);
  const Command command = command_of(op, *file.space, file.base);
  uint64_t at = 0;
  if (command.bytes > 0) {
    at = find({command.data, command.bytes, op.bytes.arena});
    if (at == 0) {
      // Until its answer the IOMMU keeps the memory, whatever its owner does.
      const auto mapped = bus_->map(command.data, command.bytes);
      vfio_counters_.system_calls.add(1);
      if (!mapped) {
        op.result = mapped.error().with("a transfer of '" + file.path + "'");
        return failed_.push(op);
      }
      vfio_counters_.mapped_ops.add(1);
      at = *mapped;
      mapped_.emplace(&op, Mapped{at, command.bytes});
    }
  }
  if (!quiet()) vfio_counters_.loud_ops.add(1);
  drive.driver->send(op, command, at, batch_ns_, quiet());
}

// The drive is done with the memory of the op's command.
void VfioEngine::end(Op& op) {
  if (mapped_.empty()) return;
  const auto found = mapped_.find(&op);
  if (found == mapped_.end()) return;
  bus_->unmap(found->second.at, found->second.bytes);
  vfio_counters_.system_calls.add(1);
  mapped_.erase(found);
}

void VfioEngine::ring() {
  bool rang = false;
  for (size_t i = 0; i < drives(); ++i) rang |= drives_[i]->driver->ring();
  if (rang) counters_.submissions.add(1);
}

size_t VfioEngine::complete_failed() {
  OpList failed = std::exchange(failed_, {});
  size_t completed = 0;
  while (Op* op = failed.pop()) {
    --in_flight_;
    ++completed;
    op->done(*op);
  }
  return completed;
}

size_t VfioEngine::reap() {
  size_t completed = 0;
  for (size_t i = 0; i < drives(); ++i) {
    Drive& drive = *drives_[i];
    // At most as many as were in flight: done() may submit again.
    bool first = true;
    for (uint32_t left = depth_; left > 0 && !drive.gone && drive.driver->done(); --left) {
      if (std::exchange(first, false)) book_wait();
      const Driver::Done done = drive.driver->take();
      if (done.op == nullptr) {
        reset(drive, "it answers to a command that it was not given");
        break;
      }
      Op& op = *done.op;
      end(op);
      const FileTable::File& file = *files_.find(op.file);
      if (repeat(drive, done)) {
        start(op, file);
        continue;
      }
      drive.resets = 0;
      if (!settle(op, done.status, *file.space, file.path, counters_)) {
        start(op, file);
        continue;
      }
      if (!repeats_.empty()) repeats_.erase(&op);
      --in_flight_;
      ++completed;
      op.done(op);
      if (!drive.gone) start_waiting(drive);
    }
    if (!drive.gone) drive.driver->acknowledge();
  }
  ring();
  return completed + complete_failed();
}

size_t VfioEngine::poll(uint64_t wait_ns) {
  size_t completed = complete_failed() + reap();
  const bool woken = woken_.exchange(false);
  // Also while another drive is busy.
  const uint64_t begin = Clock::real().now_ns();
  watch(begin);
  completed += complete_failed();
  if (completed > 0 || woken || wait_ns == 0) return completed;
  if (waits_since_ns_ == 0) waits_since_ns_ = begin;
  const uint64_t end = waits_since_ns_ + std::max(2 * mean_wait_ns_, kSpinMin);
  const bool spins = in_flight_ > 0 && quiet() && begin < end;
  if (!spins || !spin(begin + std::min(wait_ns, end - begin))) {
    if (spins) vfio_counters_.wasted_polls.add(1);
    sleep(wait_ns);
  }
  woken_ = false;
  return reap();
}

// Once there is something to take: how long that was waited for.
void VfioEngine::book_wait() {
  batch_ns_ = Clock::real().now_ns();
  const uint64_t waited = waits_since_ns_ == 0 ? 0 : batch_ns_ - waits_since_ns_;
  waits_since_ns_ = 0;
  mean_wait_ns_ = (7 * mean_wait_ns_ + waited) / 8;
}

// Whether something came until then. To look at memory costs less than to read a clock: emulated
// ones are even read by way of whoever plays the drive.
bool VfioEngine::spin(uint64_t until_ns) {
  do {
    for (uint32_t looks = 0; looks < kLooks; ++looks) {
      for (size_t i = 0; i < drives(); ++i) {
        if (!drives_[i]->gone && drives_[i]->driver->done()) return true;
      }
      if (woken_) return true;
    }
  } while (Clock::real().now_ns() < until_ns);
  return false;
}

// Until a drive interrupts, or wake(). An answer that came before raised its interrupt already, so
// none is missed. For those that raise none it naps, a fourth longer than it has waited.
void VfioEngine::sleep(uint64_t wait_ns) {
  std::array<pollfd, kDrivesMax + 1> fds{};
  const size_t count = drives();
  fds[0] = {wake_fd_, POLLIN, 0};
  for (size_t i = 0; i < count; ++i) fds[i + 1] = {drives_[i]->driver->interrupt(), POLLIN, 0};
  sleeping_ = true;
  if (!woken_) {
    uint64_t most = in_flight_ > 0 ? std::min(wait_ns, watch_ns()) : wait_ns;
    for (size_t i = 0; i < count; ++i) {
      if (drives_[i]->gone || drives_[i]->driver->quiet_idle()) continue;
      most = std::min(most, std::max(kNapMin, (Clock::real().now_ns() - waits_since_ns_) / 4));
      break;
    }
    const timespec time{static_cast<time_t>(most / 1'000'000'000),
                        static_cast<long>(most % 1'000'000'000)};
    ppoll(fds.data(), count + 1, most == UINT64_MAX ? nullptr : &time, nullptr);
    vfio_counters_.system_calls.add(1);
    for (size_t i = 0; i <= count; ++i) {
      if (fds[i].revents == 0) continue;
      drain(fds[i].fd);
      vfio_counters_.system_calls.add(1);
    }
  }
  sleeping_ = false;
}

void VfioEngine::wake() {
  woken_ = true;
  if (!sleeping_) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof one);
}

// Whether the op is sent again: its command was aborted, for it took too long.
bool VfioEngine::repeat(Drive& drive, const Driver::Done& done) {
  if (!done.aborted || (done.status & 0x7FF) != kAborted || drive.gone) return false;
  if (++repeats_[done.op] > options_.repeats_max) return false;
  counters_.retries.add(1);
  return true;
}

// How often it looks for commands that take too long.
uint64_t VfioEngine::watch_ns() const { return std::min(kWatchNs, options_.command_ns / 4); }

void VfioEngine::watch(uint64_t now_ns) {
  if (now_ns - watched_ns_ < watch_ns()) return;
  watched_ns_ = now_ns;
  for (size_t i = 0; i < drives(); ++i) {
    if (!drives_[i]->gone && !drives_[i]->driver->idle()) watch(*drives_[i], now_ns);
  }
}

// Commands that take too long are aborted; as long again, and the controller is reset.
void VfioEngine::watch(Drive& drive, uint64_t now_ns) {
  switch (drive.driver->health()) {
    case Driver::Health::gone:
      return give_up(drive, fail(ENODEV, "it was removed; check that it is plugged in"));
    case Driver::Health::failed:
      return reset(drive, "it reports a fatal error");
    case Driver::Health::good:
      break;
  }
  const uint64_t oldest = drive.driver->oldest_ns();
  const uint64_t age = now_ns > oldest ? now_ns - oldest : 0;
  // With answers that nobody took yet it is we who were slow.
  if (age < options_.command_ns || drive.driver->done()) return;
  const uint64_t asked = drive.driver->oldest_abort_ns();
  const std::string silent = "it has not answered for " + std::to_string(age / 1'000'000) + " ms";
  if (asked < now_ns && now_ns - asked >= options_.command_ns) return reset(drive, silent);
  const auto aborted = drive.driver->abort_before(now_ns - options_.command_ns, now_ns);
  if (!aborted) return reset(drive, silent + ", and " + aborted.error().message());
  if (*aborted == 0) return;
  vfio_counters_.aborts.add(*aborted);
  log().warn("the NVMe drive {}: {}; {} of its commands are aborted", drive.driver->address(),
             silent, *aborted);
}

void VfioEngine::reset(Drive& drive, const std::string& why) {
  if (drive.resets == options_.resets_max)
    return give_up(drive, fail(ETIMEDOUT, "{}, although it was reset", why));
  ++drive.resets;
  vfio_counters_.resets.add(1);
  log().warn("the NVMe drive {} is reset: {}", drive.driver->address(), why);
  if (const Status back = drive.driver->recover(Clock::real().now_ns()); !back)
    give_up(drive, back.error());
}

// The drive touches no memory any more, or is not there.
void VfioEngine::give_up(Drive& drive, const Error& error) {
  log().error("the NVMe drive {} is given up: {}", drive.driver->address(), error.message());
  drive.gone = true;
  drive.lost = error;
  std::vector<Op*> ops = drive.driver->give_back();
  while (Op* op = drive.waiting.pop()) ops.push_back(op);
  for (Op* op : ops) {
    end(*op);
    repeats_.erase(op);
    fail(*op, error.sys_errno, files_.find(op->file)->path, error.what);
    failed_.push(*op);
  }
}

}  // namespace stoker::nvme
