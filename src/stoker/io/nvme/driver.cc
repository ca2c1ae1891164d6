#include "stoker/io/nvme/driver.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"

namespace stoker::nvme {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kAdminEntries = 16;
constexpr uint32_t kLoudQueue = 1, kQuietQueue = 2;
constexpr uint32_t kEntriesMax = 1024;
constexpr uint32_t kLateness = 4;  // answers of the quiet queue are acknowledged by so many rounds
// Registers.
constexpr size_t kCapabilities = 0x00, kConfiguration = 0x14, kStatus = 0x1C, kAdminSizes = 0x24,
                 kAdminEntriesAt = 0x28, kAdminAnswersAt = 0x30, kDoorbells = 0x1000;
constexpr uint32_t kEnable = 1, kSayGoodbye = 1U << 14, kEntrySizes = (6U << 16) | (4U << 20);
constexpr uint32_t kReady = 1, kFatal = 2, kGoodbyeMask = 3U << 2, kGoodbyeDone = 2U << 2;
constexpr uint32_t kGone = UINT32_MAX;  // what registers of a removed device read as
constexpr uint8_t kMakeEntries = 0x01, kMakeAnswers = 0x05, kAbort = 0x08, kSet = 0x09,
                  kUseShadows = 0x7C;
constexpr uint32_t kQueueCount = 0x07;  // what is set: how many pairs for I/O, less one
constexpr uint32_t kContiguous = 1, kInterrupts = 2;
constexpr auto kAdminTimeout = std::chrono::seconds(5);

// Queues and lists of pages, one behind the other in one piece of memory.
constexpr uint64_t kAdminBytes = 2 * kPage;
constexpr uint64_t kScratchAt = kAdminBytes;         // answers of Identify
constexpr uint64_t kShadowsAt = kScratchAt + kPage;  // doorbells, and what the drive has seen
constexpr uint64_t kIoAt = kShadowsAt + 2 * kPage;

uint64_t entries_bytes(uint32_t size) { return align_up(uint64_t{size} * 64, kPage); }
uint64_t answers_bytes(uint32_t size) { return align_up(uint64_t{size} * 16, kPage); }

Error driver_error(const std::string& address, int error, const std::string& what) {
  return fail(error, "the NVMe drive {} {}", address, what);
}

}  // namespace

Driver::Driver(std::string address, Bus& bus, uint32_t depth)
    : address_(std::move(address)), bus_(bus), depth_(depth) {}

Result<std::unique_ptr<Driver>> Driver::make(const std::string& address, Bus& bus, uint32_t depth) {
  std::unique_ptr<Driver> driver(new Driver(address, bus, depth));
  STOKER_ASSIGN(driver->device_, bus.open(address));
  STOKER_TRY(driver->start());
  return driver;
}

// What was laid into memory is there before the device is told of it.
void Driver::write32(size_t at, uint32_t value) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  device_->write32(at, value);
}

Status Driver::start() {
  STOKER_TRY(check_capabilities());
  const uint64_t capabilities = device_->read64(kCapabilities);
  const auto most = static_cast<uint32_t>((capabilities & 0xFFFF) + 1);
  // A queue is full with one entry left.
  const uint32_t size = std::min({std::bit_ceil(depth_ + 1), most, kEntriesMax});
  sent_.resize(std::min(depth_, size - 1));
  for (size_t id = sent_.size(); id > 0; --id) free_.push_back(static_cast<uint16_t>(id - 1));
  uint64_t at = kIoAt;
  const auto plan = [&](Queue& queue, uint32_t number, uint32_t answers) {
    queue.number = number;
    queue.size = size;
    queue.answers_size = answers;
    queue.entries_at = at;
    at += entries_bytes(size);
    queue.answers_at = at;
    at += answers_bytes(answers);
  };
  plan(loud_, kLoudQueue, size);
  plan(quiet_, kQuietQueue, std::min(kLateness * size, most));
  lists_ = at;
  admin_.size = admin_.answers_size = kAdminEntries;
  admin_.answers_at = kPage;
  STOKER_ASSIGN(memory_, DmaMemory::make(bus_, lists_ + sent_.size() * kPage));
  for (Queue* queue : {&admin_, &loud_, &quiet_}) {
    queue->entries = memory_->data() + queue->entries_at;
    queue->answers = memory_->data() + queue->answers_at;
    queue->entries_at += memory_->at();
    queue->answers_at += memory_->at();
    queue->doorbell = kDoorbells + uint64_t{2} * queue->number * stride_;
  }
  return reset();
}

Status Driver::check_capabilities() {
  if (device_->read32(kStatus) == kGone)
    return driver_error(address_, ENODEV, "does not answer; check that it is plugged in");
  const uint64_t capabilities = device_->read64(kCapabilities);
  stride_ = size_t{4} << ((capabilities >> 32) & 0xF);
  ready_ns_ = std::max<uint64_t>(1, (capabilities >> 24) & 0xFF) * 500'000'000;
  if (((capabilities >> 48) & 0xF) != 0)
    return driver_error(address_, EOPNOTSUPP, "does not support pages of 4 KiB; use another drive");
  if (((capabilities >> 37) & 1) == 0)
    return driver_error(address_, EOPNOTSUPP,
                        "does not support the NVM command set; use another drive");
  if (kDoorbells + size_t{2} * (kLoudQueue + 1) * stride_ > device_->registers_bytes())
    return driver_error(
        address_, EOPNOTSUPP,
        fmt::format("maps {} bytes of registers, too few for {} queues; use another drive",
                    device_->registers_bytes(), kQuietQueue + 1));
  return {};
}

Status Driver::wait_ready(bool ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(ready_ns_);
  for (;;) {
    const auto status = device_->read32(kStatus);
    if (status == kGone)
      return driver_error(address_, ENODEV, "was removed; check that it is plugged in");
    if (((status & kReady) != 0) == ready) return {};
    if ((status & kFatal) != 0 && ready)
      return driver_error(address_, EIO,
                          "reports a fatal error on its start; switch it off and on");
    if (std::chrono::steady_clock::now() > end)
      return driver_error(
          address_, ETIMEDOUT,
          std::string(ready ? "does not start" : "does not stop") + "; switch it off and on");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// After it is stopped the controller touches no memory, and knows no queues.
Status Driver::reset() {
  MutexLock lock(admin_mutex_);
  write32(kConfiguration, device_->read32(kConfiguration) & ~kEnable);
  STOKER_TRY(wait_ready(false));
  for (Queue* queue : {&admin_, &loud_, &quiet_}) {
    std::memset(queue->answers, 0, size_t{queue->answers_size} * 16);
    queue->tail = queue->head = queue->rung = queue->acknowledged = queue->busy = 0;
    queue->phase = 1;
  }
  shadowing_ = false;
  std::memset(memory_->data() + kShadowsAt, 0, 2 * kPage);
  write32(kAdminSizes, (kAdminEntries - 1) << 16 | (kAdminEntries - 1));
  device_->write64(kAdminEntriesAt, admin_.entries_at);
  device_->write64(kAdminAnswersAt, admin_.answers_at);
  write32(kConfiguration, kEntrySizes | kEnable);
  STOKER_TRY(wait_ready(true));
  return make_queues();
}

// A controller that has one pair only gets the loud one.
Status Driver::make_queues() {
  const Command count{.opcode = kSet, .word10 = kQueueCount, .word11 = 1U << 16 | 1};
  // Some refuse to count, and make what they are asked for all the same.
  if (Status told = administer_locked(count); !told && told.error().sys_errno == ETIMEDOUT)
    return told;
  STOKER_TRY(make_pair(loud_, kInterrupts));
  has_quiet_ = kDoorbells + size_t{2} * (kQuietQueue + 1) * stride_ <= device_->registers_bytes();
  if (has_quiet_) {
    if (const Status made = make_pair(quiet_, 0); !made) {
      log().info("{}; each answer of it interrupts", made.error().message());
      has_quiet_ = false;
    }
  }
  return use_shadows();
}

Status Driver::make_pair(const Queue& queue, uint32_t interrupts) {
  const Command answers{.opcode = kMakeAnswers,
                        .word10 = (queue.answers_size - 1) << 16 | queue.number,
                        .word11 = kContiguous | interrupts};
  STOKER_TRY(administer_locked(answers, queue.answers_at));
  const Command entries{.opcode = kMakeEntries,
                        .word10 = (queue.size - 1) << 16 | queue.number,
                        .word11 = queue.number << 16 | kContiguous};
  return administer_locked(entries, queue.entries_at);
}

// A write of a register costs the processor much more than one of memory. Where the drive looks at
// memory it is knocked at only while it does not look.
Status Driver::use_shadows() {
  const std::span<std::byte, kIdentifyBytes> answer(memory_->data() + kScratchAt, kIdentifyBytes);
  const Command ask = identify(kIdentifyController, 0, answer);
  STOKER_TRY(administer_locked(ask, memory_->at() + kScratchAt));
  if (!read_controller(answer).shadows || size_t{2} * (kQuietQueue + 1) * stride_ > kPage)
    return {};
  const Command command{.opcode = kUseShadows, .bytes = 2 * kPage};
  if (const Status taken = administer_locked(command, memory_->at() + kShadowsAt); !taken)
    log().info("{}; its registers are written each time", taken.error().message());
  else
    shadowing_ = true;
  return {};
}

// Whether the drive is to be told by its register: it said up to where it looks by itself.
void Driver::knock(size_t doorbell, uint32_t before, uint32_t value) {
  if (shadowing_) {
    std::byte* shadow = memory_->data() + kShadowsAt + (doorbell - kDoorbells);
    std::atomic_thread_fence(std::memory_order_release);
    *reinterpret_cast<volatile uint32_t*>(shadow) = value;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t seen = *reinterpret_cast<volatile const uint32_t*>(shadow + kPage);
    if (static_cast<uint16_t>(value - seen - 1) >= static_cast<uint16_t>(value - before)) return;
  }
  write32(doorbell, value);
}

std::array<std::byte, 64> Driver::encode(const Command& command, uint16_t id, uint64_t data_at) {
  std::array<std::byte, 64> entry{};
  const auto set = [&entry](size_t at, auto value) {
    std::memcpy(entry.data() + at, &value, sizeof value);
  };
  set(0, uint32_t{command.opcode} | uint32_t{id} << 16);
  set(4, command.space);
  set(24, data_at);
  set(40, command.word10);
  set(44, command.word11);
  set(48, command.word12);
  // One page is named in the entry, and a second; of more the list is.
  if (command.bytes > 2 * kPage) {
    const uint64_t list = lists_ + id * kPage;
    auto* pages = reinterpret_cast<uint64_t*>(memory_->data() + list);
    for (uint64_t at = kPage; at < command.bytes; at += kPage) *pages++ = data_at + at;
    set(32, memory_->at() + list);
  } else if (command.bytes > kPage) {
    set(32, data_at + kPage);
  }
  return entry;
}

void Driver::put(Queue& queue, const std::array<std::byte, 64>& entry) {
  std::memcpy(queue.entries + size_t{queue.tail} * 64, entry.data(), entry.size());
  queue.tail = (queue.tail + 1) % queue.size;
}

// An answer is 16 bytes: what came of it, the head of the entries, and in the last word the id, the
// phase, which turns over each round, and the status.
bool Driver::answered(const Queue& queue) const {
  const auto* word =
      reinterpret_cast<volatile const uint32_t*>(queue.answers + size_t{queue.head} * 16 + 12);
  const bool yes = ((*word >> 16) & 1) == queue.phase;
  std::atomic_thread_fence(std::memory_order_acquire);
  return yes;
}

// Sends it to the admin queue and waits for the answer.
Status Driver::administer_locked(const Command& command, uint64_t data_at) {
  put(admin_, encode(command, 0, data_at));
  write32(admin_.doorbell, admin_.tail);
  const auto end = std::chrono::steady_clock::now() + kAdminTimeout;
  while (!answered(admin_)) {
    if (device_->read32(kStatus) == kGone)
      return driver_error(address_, ENODEV, "was removed; check that it is plugged in");
    if (std::chrono::steady_clock::now() > end)
      return driver_error(address_, ETIMEDOUT,
                          "does not answer to the admin command " + std::to_string(command.opcode) +
                              "; switch it off and on");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  uint32_t word = 0;
  std::memcpy(&word, admin_.answers + size_t{admin_.head} * 16 + 12, sizeof word);
  admin_.head = (admin_.head + 1) % admin_.answers_size;
  if (admin_.head == 0) admin_.phase ^= 1;
  write32(admin_.doorbell + stride_, admin_.head);
  const auto status = static_cast<uint16_t>(word >> 17);
  if (status == 0) return {};
  const Failure failure = failure_of(status);
  return driver_error(
      address_, failure.sys_errno,
      "refuses the admin command " + std::to_string(command.opcode) + ": " + failure.sentence);
}

Result<Space> Driver::space(uint32_t number) {
  MutexLock lock(admin_mutex_);
  std::span<std::byte, kIdentifyBytes> answer(memory_->data() + kScratchAt, kIdentifyBytes);
  const auto ask = [&](uint8_t what, uint32_t space) {
    return administer_locked(identify(what, space, answer), memory_->at() + kScratchAt);
  };
  STOKER_TRY(ask(kIdentifyController, 0));
  const Controller controller = read_controller(answer);
  STOKER_TRY(ask(kIdentifyNamespace, number));
  auto found = read_space(answer, number, controller);
  if (!found) return found.error().with("namespace " + std::to_string(number) + " of " + address_);
  // A list of pages is one page.
  found->transfer_bytes = std::min<uint64_t>(found->transfer_bytes, 2 * kMiB);
  return found;
}

void Driver::send(Op& op, const Command& command, uint64_t data_at, uint64_t now_ns, bool quiet) {
  const uint16_t id = free_.back();
  free_.pop_back();
  Sent& sent = sent_[id];
  sent = {&op, now_ns, 0, quiet && has_quiet_, encode(command, id, data_at)};
  Queue& queue = queue_of(sent.quiet);
  ++queue.busy;
  put(queue, sent.entry);
}

bool Driver::ring() {
  bool rang = false;
  for (Queue* queue : {&quiet_, &loud_}) {
    if (queue->rung == queue->tail) continue;
    knock(queue->doorbell, std::exchange(queue->rung, queue->tail), queue->tail);
    rang = true;
  }
  return rang;
}

bool Driver::done() const { return answered(quiet_) || answered(loud_); }

Driver::Health Driver::health() const {
  const uint32_t status = device_->read32(kStatus);
  if (status == kGone) return Health::gone;
  return (status & kFatal) != 0 ? Health::failed : Health::good;
}

Driver::Done Driver::take() {
  Queue& queue = queue_of(answered(quiet_));
  uint32_t word = 0;
  std::memcpy(&word, queue.answers + size_t{queue.head} * 16 + 12, sizeof word);
  queue.head = (queue.head + 1) % queue.answers_size;
  if (queue.head == 0) queue.phase ^= 1;
  const auto id = static_cast<uint16_t>(word);
  if (id >= sent_.size() || sent_[id].op == nullptr || &queue_of(sent_[id].quiet) != &queue)
    return {nullptr, 0, false};
  --queue.busy;
  free_.push_back(id);
  return {std::exchange(sent_[id].op, nullptr), static_cast<int>(word >> 17),
          sent_[id].aborted_ns != 0};
}

// The quiet queue has room for the answers of all commands several times over, so the drive is told
// before half of that is used. It may raise no interrupt for the loud one before it was told.
void Driver::acknowledge() {
  for (Queue* queue : {&quiet_, &loud_}) {
    const uint32_t taken =
        (queue->head + queue->answers_size - queue->acknowledged) % queue->answers_size;
    const uint32_t bear = queue == &quiet_ && queue->answers_size >= 2 * queue->size
                              ? queue->answers_size / 2 - 1
                              : 0;
    if (taken <= bear) continue;
    knock(queue->doorbell + stride_, std::exchange(queue->acknowledged, queue->head), queue->head);
  }
}

uint64_t Driver::oldest_ns() const {
  uint64_t oldest = UINT64_MAX;
  for (const Sent& sent : sent_) {
    if (sent.op != nullptr) oldest = std::min(oldest, sent.sent_ns);
  }
  return oldest;
}

uint64_t Driver::oldest_abort_ns() const {
  uint64_t oldest = UINT64_MAX;
  for (const Sent& sent : sent_) {
    if (sent.op != nullptr && sent.aborted_ns != 0) oldest = std::min(oldest, sent.aborted_ns);
  }
  return oldest;
}

Result<size_t> Driver::abort_before(uint64_t time_ns, uint64_t now_ns) {
  MutexLock lock(admin_mutex_);
  size_t asked = 0;
  for (size_t id = 0; id < sent_.size(); ++id) {
    Sent& sent = sent_[id];
    if (sent.op == nullptr || sent.aborted_ns != 0 || sent.sent_ns >= time_ns) continue;
    sent.aborted_ns = now_ns;
    const Command command{.opcode = kAbort,
                          .word10 = static_cast<uint32_t>(id) << 16 | queue_of(sent.quiet).number};
    STOKER_TRY(administer_locked(command));
    ++asked;
  }
  return asked;
}

Status Driver::recover(uint64_t now_ns) {
  STOKER_TRY(reset());
  for (Sent& sent : sent_) {
    if (sent.op == nullptr) continue;
    sent.sent_ns = now_ns;
    sent.aborted_ns = 0;
    sent.quiet = sent.quiet && has_quiet_;
    Queue& queue = queue_of(sent.quiet);
    ++queue.busy;
    put(queue, sent.entry);
  }
  ring();
  return {};
}

std::vector<Op*> Driver::give_back() {
  device_->cut_off();
  std::vector<Op*> ops;
  for (size_t id = 0; id < sent_.size(); ++id) {
    if (sent_[id].op == nullptr) continue;
    ops.push_back(std::exchange(sent_[id].op, nullptr));
    free_.push_back(static_cast<uint16_t>(id));
  }
  return ops;
}

// Its caches are then on its media, and it touches no memory of ours.
Driver::~Driver() {
  if (!memory_ || device_->read32(kStatus) == kGone) return;
  if ((device_->read32(kConfiguration) & kEnable) == 0) return;  // it was given up, or never began
  write32(kConfiguration, device_->read32(kConfiguration) | kSayGoodbye);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while ((device_->read32(kStatus) & kGoodbyeMask) != kGoodbyeDone) {
    if (device_->read32(kStatus) == kGone) return;
    if (std::chrono::steady_clock::now() > end) {
      log().warn("the NVMe drive {} did not confirm its shutdown", address_);
      break;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  write32(kConfiguration, device_->read32(kConfiguration) & ~kEnable);
  static_cast<void>(wait_ready(false));
}

}  // namespace stoker::nvme
