// FakeNvme: an NVMe controller in this process, on a bus of its own, that fails on purpose. It does
// its work within the write of a doorbell, so tests need no time and no luck.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/nvme/bus.h"

namespace stoker {

// What a test sets and reads while the drive works; it outlives the engine.
class FakeNvme {
 public:
  explicit FakeNvme(uint64_t bytes, uint32_t block_bytes = 512)
      : block_bytes_(block_bytes), disk_(bytes) {}

  // How it fails. `silent`: so many I/O commands get no answer, until a reset.
  uint32_t silent = 0;
  bool silent_for_ever = false;    // every one, whatever is reset
  bool aborts = true;              // answers an abort, and the command that it names
  bool removed = false;            // as registers of a device that is not there
  bool fatal = false;              // reports a fatal status, until a reset
  bool answers_strangers = false;  // once: to a command that nobody sent
  uint32_t entries_max = 1024;     // of a queue
  bool offers_shadows = false;     // doorbells in memory
  bool looks = false;              // at them by itself, by look(): nobody need knock
  uint32_t pairs_max = 2;          // of queues for I/O

  // What it saw.
  uint32_t resets = 0, farewells = 0, doorbells = 0, commands = 0, aborted = 0, register_writes = 0,
           interrupts = 0;
  size_t held() const { return held_.size(); }  // commands without an answer
  uint64_t mapped_bytes = 0;                    // by the bus, now
  std::byte* disk() { return disk_.data(); }
  void look() {
    MutexLock lock(mutex_);
    for (Queue& queue : io_) serve(queue);
  }

  std::shared_ptr<nvme::Bus> bus() { return std::make_shared<FakeBus>(*this); }

 private:
  struct Entry {
    uint8_t opcode;
    uint16_t id;
    uint32_t queue = 0;
    uint64_t prp1, prp2, word10;
    uint32_t word12;
    uint32_t space;
  };
  struct Queue {
    std::byte* entries = nullptr;
    std::byte* answers = nullptr;
    uint32_t size = 0, head = 0, tail = 0;
    uint32_t answers_size = 0, answers_tail = 0, answers_head = 0;
    uint16_t phase = 1;
    bool interrupts = false;
  };

  // Devices see memory where the process has it; what is not mapped they may not touch.
  class FakeBus final : public nvme::Bus {
   public:
    explicit FakeBus(FakeNvme& drive) : drive_(drive) {}
    // As at the end of a process, which ends with all that it mapped. Nothing may work on it then.
    ~FakeBus() override {
      STOKER_CHECK(!drive_.enabled_ || drive_.removed);
      drive_.regions_.clear();
      drive_.mapped_bytes = 0;
    }
    Result<std::unique_ptr<nvme::Device>> open(const std::string& address) override {
      if (address != "0000:00:04.0") return fail(Code::not_found, "no such device");
      return std::unique_ptr<nvme::Device>(new FakeDevice(drive_));
    }
    Result<uint64_t> map(const void* data, uint64_t bytes) override {
      MutexLock lock(drive_.mutex_);
      const auto at = reinterpret_cast<uint64_t>(data);
      drive_.regions_.push_back({at, bytes});
      drive_.mapped_bytes += bytes;
      return at;
    }
    void unmap(uint64_t at, uint64_t bytes) override {
      MutexLock lock(drive_.mutex_);
      const auto found = std::find(drive_.regions_.begin(), drive_.regions_.end(),
                                   std::pair<uint64_t, uint64_t>{at, bytes});
      STOKER_CHECK(found != drive_.regions_.end());
      drive_.regions_.erase(found);
      drive_.mapped_bytes -= bytes;
    }

   private:
    FakeNvme& drive_;
  };

  class FakeDevice final : public nvme::Device {
   public:
    explicit FakeDevice(FakeNvme& drive)
        : drive_(drive), interrupt_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
      drive_.interrupt_ = interrupt_;
    }
    ~FakeDevice() override { ::close(interrupt_); }
    uint32_t read32(size_t at) const override { return static_cast<uint32_t>(drive_.read(at)); }
    uint64_t read64(size_t at) const override { return drive_.read(at); }
    void write32(size_t at, uint32_t value) override { drive_.write(at, value); }
    void write64(size_t at, uint64_t value) override { drive_.write(at, value); }
    uint64_t registers_bytes() const override { return 0x2000; }
    int interrupt() const override { return interrupt_; }
    void cut_off() override { drive_.stop(); }

   private:
    FakeNvme& drive_;
    const int interrupt_;
  };

  uint64_t read(size_t at) {
    MutexLock lock(mutex_);
    if (removed) return UINT64_MAX;
    switch (at) {
      case 0x00:  // MQES, TO, CSS
        return (entries_max - 1) | uint64_t{2} << 24 | uint64_t{1} << 37;
      case 0x14:
        return configuration_;
      case 0x1C:
        return (enabled_ ? 1U : 0U) | (fatal ? 2U : 0U) | (farewell_ ? 2U << 2 : 0U);
      default:
        return 0;
    }
  }

  void write(size_t at, uint64_t value) {
    MutexLock lock(mutex_);
    ++register_writes;
    if (removed) return;
    if (at == 0x14) return configure(static_cast<uint32_t>(value));
    if (at == 0x24) admin_.size = admin_.answers_size = static_cast<uint32_t>(value & 0xFFF) + 1;
    if (at == 0x28) admin_.entries = memory(value, size_t{admin_.size} * 64);
    if (at == 0x30) admin_.answers = memory(value, size_t{admin_.size} * 16);
    if (at < 0x1000) return;
    ++doorbells;
    const size_t number = (at - 0x1000) / 4;
    Queue& queue = number < 2 ? admin_ : io_.at(number / 2 - 1);
    if (number % 2 == 1) {
      queue.answers_head = static_cast<uint32_t>(value);
      return;
    }
    queue.tail = static_cast<uint32_t>(value);
    serve(queue);
  }

  void configure(uint32_t value) {
    if ((value & (3U << 14)) != 0 && !farewell_) {
      farewell_ = true;
      ++farewells;
    }
    const bool enable = (value & 1) != 0;
    configuration_ = value;
    if (enable == enabled_) return;
    if (enable) {
      enabled_ = true;
      farewell_ = false;
      admin_.head = admin_.tail = admin_.answers_tail = admin_.answers_head = 0;
      admin_.phase = 1;
    } else {
      stop_locked();
      ++resets;
    }
  }

  void stop() {
    MutexLock lock(mutex_);
    stop_locked();
  }
  void stop_locked() {
    enabled_ = fatal = false;
    configuration_ &= ~1U;
    if (!silent_for_ever) silent = 0;
    held_.clear();
    io_.fill({});
    shadows_ = seen_ = nullptr;
  }

  std::byte* memory(uint64_t at, uint64_t bytes) const {
    for (const auto& [begin, size] : regions_) {
      if (at >= begin && at + bytes <= begin + size) return reinterpret_cast<std::byte*>(at);
    }
    STOKER_CHECK(false);  // DMA into memory that is not mapped (any more)
    return nullptr;
  }

  static Entry decode(const std::byte* raw) {
    const auto get = [raw](auto& value, size_t at) { std::memcpy(&value, raw + at, sizeof value); };
    Entry entry{};
    get(entry.opcode, 0);
    get(entry.id, 2);
    get(entry.space, 4);
    get(entry.prp1, 24);
    get(entry.prp2, 32);
    get(entry.word10, 40);
    get(entry.word12, 48);
    return entry;
  }

  void serve(Queue& queue) {
    // Where its doorbells are: of the entries, and of the answers behind.
    const size_t doorbell =
        &queue == &admin_ ? 0 : 8 * (1 + static_cast<size_t>(&queue - io_.data()));
    const bool in_memory = &queue != &admin_ && shadows_ != nullptr && queue.size > 0;
    if (in_memory) {
      std::memcpy(&queue.tail, shadows_ + doorbell, sizeof queue.tail);
      std::memcpy(&queue.answers_head, shadows_ + doorbell + 4, sizeof queue.answers_head);
    }
    while (queue.head != queue.tail) {
      Entry entry = decode(queue.entries + size_t{queue.head} * 64);
      entry.queue = static_cast<uint32_t>(doorbell / 8);
      queue.head = (queue.head + 1) % queue.size;
      if (&queue == &admin_) {
        administer(entry);
        continue;
      }
      ++commands;
      if (answers_strangers) {
        answers_strangers = false;
        answer(queue, 999, 0);
      }
      if (silent_for_ever || silent > 0) {
        if (silent > 0) --silent;
        held_.push_back(entry);
      } else {
        answer(queue, entry.id, carry(entry));
      }
    }
    if (!in_memory) return;
    const uint32_t seen = looks ? queue.tail + 0x4000 : queue.tail;
    std::memcpy(seen_ + doorbell, &seen, sizeof seen);
  }

  void administer(const Entry& entry) {
    const auto number = static_cast<uint32_t>(entry.word10);
    switch (entry.opcode) {
      case 0x05: {
        if ((number & 0xFFFF) > pairs_max) return answer(admin_, entry.id, 0x101);
        Queue& queue = io_.at((number & 0xFFFF) - 1);
        queue.answers_size = (number >> 16) + 1;
        queue.answers = memory(entry.prp1, size_t{queue.answers_size} * 16);
        queue.interrupts = (entry.word10 >> 32 & 2) != 0;
        break;
      }
      case 0x01: {
        Queue& queue = io_.at((number & 0xFFFF) - 1);
        queue.size = (number >> 16) + 1;
        queue.entries = memory(entry.prp1, size_t{queue.size} * 64);
        break;
      }
      case 0x06:
        identify(number, entry.space, memory(entry.prp1, 4096));
        break;
      case 0x08:
        answer(admin_, entry.id, 0);
        if (aborts) abort(number & 0xFFFF, static_cast<uint16_t>(number >> 16));
        return;
      case 0x7C:
        shadows_ = memory(entry.prp1, 4096);
        seen_ = memory(entry.prp2, 4096);
        break;
      default:
        return answer(admin_, entry.id, 1);
    }
    answer(admin_, entry.id, 0);
  }

  void abort(uint32_t queue, uint16_t id) {
    for (auto at = held_.begin(); at != held_.end(); ++at) {
      if (at->queue != queue || at->id != id) continue;
      held_.erase(at);
      ++aborted;
      return answer(io_.at(queue - 1), id, 0x007);
    }
  }

  void identify(uint32_t what, uint32_t space, std::byte* data) const {
    std::memset(data, 0, 4096);
    const auto put = [data](size_t at, auto value) {
      std::memcpy(data + at, &value, sizeof value);
    };
    if (what == 1) {
      put(77, uint8_t{7});  // MDTS: 512 KiB
      put(256, static_cast<uint16_t>(offers_shadows ? 1U << 8 : 0U));
    } else if (space == 1) {
      put(0, uint64_t{disk_.size() / block_bytes_});
      put(130, static_cast<uint8_t>(block_bytes_ == 512 ? 9 : 12));
    }
  }

  // The status. A page of memory after the other, as the entry and its list name them.
  uint16_t carry(const Entry& entry) {
    if (entry.opcode == 0x00) return 0;
    const uint64_t at = entry.word10 * block_bytes_;
    const uint64_t bytes = ((entry.word12 & 0xFFFF) + 1) * uint64_t{block_bytes_};
    if (at + bytes > disk_.size()) return 0x80;
    if (entry.opcode == 0x08) {
      std::memset(disk_.data() + at, 0, bytes);
      return 0;
    }
    for (uint64_t moved = 0; moved < bytes; moved += 4096) {
      uint64_t page = moved == 0 ? entry.prp1 : entry.prp2;
      if (moved > 0 && bytes > 8192)
        std::memcpy(&page, memory(entry.prp2, 4096) + (moved / 4096 - 1) * 8, 8);
      std::byte* data = memory(page, std::min<uint64_t>(4096, bytes - moved));
      std::byte* place = disk_.data() + at + moved;
      const uint64_t part = std::min<uint64_t>(4096, bytes - moved);
      if (entry.opcode == 0x01) std::memcpy(place, data, part);
      if (entry.opcode == 0x02) std::memcpy(data, place, part);
    }
    return 0;
  }

  void answer(Queue& queue, uint16_t id, uint16_t status) {
    std::byte* at = queue.answers + size_t{queue.answers_tail} * 16;
    const uint32_t word = id | static_cast<uint32_t>(status << 1 | queue.phase) << 16;
    std::memcpy(at + 12, &word, sizeof word);
    queue.answers_tail = (queue.answers_tail + 1) % queue.answers_size;
    STOKER_CHECK(queue.answers_tail != queue.answers_head);  // it would overtake the reader
    if (queue.answers_tail == 0) queue.phase ^= 1;
    if (!queue.interrupts) return;
    ++interrupts;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t told = ::write(interrupt_, &one, sizeof one);
  }

  Mutex mutex_;
  const uint32_t block_bytes_;
  std::vector<std::byte> disk_;
  std::vector<std::pair<uint64_t, uint64_t>> regions_;
  std::deque<Entry> held_;
  Queue admin_;
  std::array<Queue, 2> io_{};
  uint32_t configuration_ = 0;
  bool enabled_ = false, farewell_ = false;
  int interrupt_ = -1;
  std::byte *shadows_ = nullptr, *seen_ = nullptr;
};

}  // namespace stoker
