// PCI devices in the hands of this process, by vfio-pci: their registers, their interrupt, and the
// memory that they may reach. All of it ends with the process, whatever way that ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "stoker/base/mutex.h"
#include "stoker/io/nvme/bus.h"

namespace stoker::nvme {

// The devices that are bound to vfio-pci. The addresses by which they reach memory are an IOMMU's:
// memory is pinned while it is mapped. Large pages stay large.
class VfioBus final : public Bus {
 public:
  // The bus of the process, which all its engines share; it ends with the last of them.
  static Result<std::shared_ptr<Bus>> of_process();
  ~VfioBus() override;
  VfioBus(const VfioBus&) = delete;
  VfioBus& operator=(const VfioBus&) = delete;

  Result<std::unique_ptr<Device>> open(const std::string& address) override;
  Result<uint64_t> map(const void* data, uint64_t bytes) override;
  void unmap(uint64_t at, uint64_t bytes) override;
  // The group of a device, open until the bus ends: with its last group an IOMMU forgets what is
  // mapped. The first one decides on the IOMMU.
  Result<int> group(const std::string& number, const std::string& what);
  // busy: an engine of this process drives it already.
  Status claim(const std::string& address);
  void leave(const std::string& address);

 private:
  explicit VfioBus(int fd) : fd_(fd) {}
  static Result<std::shared_ptr<Bus>> make();
  uint64_t find_room(uint64_t bytes) const REQUIRES(mutex_);
  Status take_group(int group, const std::string& what) REQUIRES(mutex_);

  const int fd_;
  Mutex mutex_;
  std::map<uint64_t, uint64_t> used_ GUARDED_BY(mutex_);  // where each begins -> bytes
  std::map<std::string, int> groups_ GUARDED_BY(mutex_);  // their descriptors
  std::set<std::string> claimed_ GUARDED_BY(mutex_);
  bool ready_ GUARDED_BY(mutex_) = false;
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
  PciDevice(std::string address, VfioBus& bus) : address_(std::move(address)), bus_(bus) {}
  Status take();
  Status map_registers();
  Status enable();
  Status let_reach_memory(bool may);

  const std::string address_;
  VfioBus& bus_;
  bool claimed_ = false;
  int device_ = -1, interrupt_ = -1;
  volatile std::byte* registers_ = nullptr;
  uint64_t registers_bytes_ = 0;
};

}  // namespace stoker::nvme
