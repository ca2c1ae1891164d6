// PCI devices in the hands of this process, by vfio-pci: their registers, their interrupt, and the
// memory that they may reach. All of it ends with the process, whatever way that ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "stoker/io/nvme/bus.h"

namespace stoker::nvme {

// The devices that are bound to vfio-pci. The addresses by which they reach memory are an IOMMU's:
// memory is pinned while it is mapped. Large pages stay large.
class VfioBus final : public Bus {
 public:
  static Result<std::unique_ptr<Bus>> make();
  ~VfioBus() override;
  VfioBus(const VfioBus&) = delete;
  VfioBus& operator=(const VfioBus&) = delete;

  Result<std::unique_ptr<Device>> open(const std::string& address) override;
  Result<uint64_t> map(const void* data, uint64_t bytes) override;
  void unmap(uint64_t at, uint64_t bytes) override;
  // Takes the group of a device; the first one decides on the IOMMU.
  Status take_group(int group, const std::string& what);

 private:
  explicit VfioBus(int fd) : fd_(fd) {}
  uint64_t find_room(uint64_t bytes) const;

  const int fd_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> used_;  // where each begins -> bytes; guarded by mutex_
  bool ready_ = false;                 // guarded by mutex_
};

class PciDevice final : public Device {
 public:
  static Result<std::unique_ptr<Device>> open(const std::string& address, VfioBus& bus);
  ~PciDevice() override;
  PciDevice(const PciDevice&) = delete;
  PciDevice& operator=(const PciDevice&) = delete;

  uint32_t read32(size_t at) const override;
  uint64_t read64(size_t at) const override;
  void write32(size_t at, uint32_t value) override;
  void write64(size_t at, uint64_t value) override;
  uint64_t registers_bytes() const override { return registers_bytes_; }
  int interrupt() const override { return interrupt_; }
  void cut_off() override;

 private:
  PciDevice() = default;
  Status take(const std::string& address, VfioBus& bus);
  Status map_registers();
  Status enable();
  Status let_reach_memory(bool may);

  int group_ = -1, device_ = -1, interrupt_ = -1;
  volatile std::byte* registers_ = nullptr;
  uint64_t registers_bytes_ = 0;
};

}  // namespace stoker::nvme
