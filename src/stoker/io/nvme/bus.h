// What the driver needs of the machine: devices on a bus, and the addresses by which they reach
// memory. VFIO gives both (vfio.h); tests have a bus of their own, with drives that fail on
// purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "stoker/base/counters.h"
#include "stoker/base/mutex.h"
#include "stoker/base/result.h"

namespace stoker::nvme {

// A device in the hands of this process.
class Device {
 public:
  virtual ~Device() = default;
  // Registers, of 4 or 8 bytes.
  virtual uint32_t read32(size_t at) const = 0;
  virtual uint64_t read64(size_t at) const = 0;
  virtual void write32(size_t at, uint32_t value) = 0;
  virtual void write64(size_t at, uint64_t value) = 0;
  virtual uint64_t registers_bytes() const = 0;
  // An eventfd that is readable once the device has raised its interrupt.
  virtual int interrupt() const = 0;
  virtual void cut_off() = 0;  // it reaches no memory any more
};

// Any thread.
class Bus {
 public:
  virtual ~Bus() = default;  // after all devices
  // `address` as "0000:00:04.0". Errors say how to bind the device, where it is not.
  virtual Result<std::unique_ptr<Device>> open(const std::string& address) = 0;
  // Where devices see `bytes` at `data`, both multiples of 4 KiB.
  virtual Result<uint64_t> map(const void* data, uint64_t bytes) = 0;
  virtual void unmap(uint64_t at, uint64_t bytes) = 0;

  // The same for an arena, which is mapped once however many engines use it: by the first, and
  // until each has given it back.
  Result<uint64_t> map_arena(int32_t id, const void* data, uint64_t bytes);
  void give_back_arena(int32_t id);
  const Counter& arenas_mapped() const { return arenas_mapped_; }  // how often that was done

 private:
  struct Shared {
    uint64_t at = 0, bytes = 0;
    size_t users = 0;
  };
  Mutex arenas_mutex_;
  std::map<int32_t, Shared> arenas_ GUARDED_BY(arenas_mutex_);
  Counter arenas_mapped_;
};

// Memory that a device may reach at any time: for queues.
class DmaMemory {
 public:
  static Result<std::unique_ptr<DmaMemory>> make(Bus& bus, uint64_t bytes);
  ~DmaMemory();
  DmaMemory(const DmaMemory&) = delete;
  DmaMemory& operator=(const DmaMemory&) = delete;
  std::byte* data() const { return data_; }
  uint64_t at() const { return at_; }  // for the device

 private:
  DmaMemory(Bus& bus, std::byte* data, uint64_t bytes, uint64_t at)
      : bus_(bus), data_(data), bytes_(bytes), at_(at) {}
  Bus& bus_;
  std::byte* const data_;
  const uint64_t bytes_, at_;
};

}  // namespace stoker::nvme
