// A PCI device in the hands of this process, by vfio-pci: its registers, its interrupt, and the
// memory that it may reach. All of it ends with the process, whatever way that ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "stoker/base/result.h"

namespace stoker::nvme {

// The addresses by which devices reach memory: an IOMMU's. Memory is pinned while it is mapped.
class DmaSpace {
 public:
  static Result<std::unique_ptr<DmaSpace>> make();
  ~DmaSpace();
  DmaSpace(const DmaSpace&) = delete;
  DmaSpace& operator=(const DmaSpace&) = delete;

  // Takes the group of a device; the first one decides on the IOMMU.
  Status take_group(int group, const std::string& what);
  // Where devices see `bytes` at `data`, both multiples of 4 KiB. Large pages stay large.
  Result<uint64_t> map(const void* data, uint64_t bytes);
  void unmap(uint64_t at, uint64_t bytes);

 private:
  explicit DmaSpace(int fd) : fd_(fd) {}
  uint64_t find_room(uint64_t bytes) const;

  const int fd_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> used_;  // where each begins -> bytes; guarded by mutex_
  bool ready_ = false;                 // guarded by mutex_
};

// Memory that a device may reach at any time: for queues.
class DmaMemory {
 public:
  static Result<std::unique_ptr<DmaMemory>> make(DmaSpace& space, uint64_t bytes);
  ~DmaMemory();
  DmaMemory(const DmaMemory&) = delete;
  DmaMemory& operator=(const DmaMemory&) = delete;
  std::byte* data() const { return data_; }
  uint64_t at() const { return at_; }  // for the device

 private:
  DmaMemory(DmaSpace& space, std::byte* data, uint64_t bytes, uint64_t at)
      : space_(space), data_(data), bytes_(bytes), at_(at) {}
  DmaSpace& space_;
  std::byte* const data_;
  const uint64_t bytes_, at_;
};

class PciDevice {
 public:
  // `address` as "0000:00:04.0". Errors say how to bind the device, where it is not.
  static Result<std::unique_ptr<PciDevice>> open(const std::string& address, DmaSpace& space);
  ~PciDevice();
  PciDevice(const PciDevice&) = delete;
  PciDevice& operator=(const PciDevice&) = delete;

  volatile std::byte* registers() const { return registers_; }
  uint64_t registers_bytes() const { return registers_bytes_; }
  int fd() const { return device_; }
  void cut_off();  // it reaches no memory any more
  // An eventfd that is readable once the device has raised its interrupt of that number.
  int interrupt() const { return interrupt_; }

 private:
  PciDevice() = default;
  Status take(const std::string& address, DmaSpace& space);
  Status map_registers();
  Status enable();
  Status let_reach_memory(bool may);

  int group_ = -1, device_ = -1, interrupt_ = -1;
  volatile std::byte* registers_ = nullptr;
  uint64_t registers_bytes_ = 0;
};

}  // namespace stoker::nvme
