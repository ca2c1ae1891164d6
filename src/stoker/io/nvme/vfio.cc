#include "stoker/io/nvme/vfio.h"

#include <fcntl.h>
#include <linux/pci_regs.h>
#include <linux/vfio.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/holders.h"

namespace stoker::nvme {
namespace {

namespace fs = std::filesystem;
// What every IOMMU reaches, without the addresses below 4 GiB, where interrupts have theirs.
constexpr uint64_t kFirst = 4 * kGiB, kEnd = 512 * kGiB;
constexpr uint64_t kLarge = 2 * kMiB;

Error device_error(int error, const std::string& address, const std::string& what) {
  return fail(error, "cannot drive the device {}: {}", address, what);
}

// vfio-pci has the device, and fails with it.
Error bound_device_error(int error, const std::string& address, const std::string& what) {
  return device_error(
      error, address,
      what + "; run `stoker nvme unbind`, then `stoker nvme bind` with its address");
}

std::string in_use_by(const std::string& holder) {
  return (holder.empty() ? "another process" : holder) +
         " drives it or another of its IOMMU group; end that first, or use another drive";
}

}  // namespace

Result<uint64_t> Bus::map_arena(int32_t id, const void* data, uint64_t bytes) {
  MutexLock lock(arenas_mutex_);
  const auto known = arenas_.find(id);
  if (known != arenas_.end()) {
    ++known->second.users;
    return known->second.at;
  }
  STOKER_ASSIGN(const uint64_t at, map(data, bytes));
  arenas_.emplace(id, Shared{at, bytes, 1});
  arenas_mapped_.add(1);
  return at;
}

void Bus::give_back_arena(int32_t id) {
  MutexLock lock(arenas_mutex_);
  const auto known = arenas_.find(id);
  STOKER_CHECK(known != arenas_.end());
  if (--known->second.users > 0) return;
  unmap(known->second.at, known->second.bytes);
  arenas_.erase(known);
}

Result<std::shared_ptr<Bus>> VfioBus::of_process() {
  static Mutex mutex;
  static std::weak_ptr<Bus> known;
  MutexLock lock(mutex);
  if (auto bus = known.lock()) return bus;
  STOKER_ASSIGN(auto bus, make());
  known = bus;
  return bus;
}

Result<std::shared_ptr<Bus>> VfioBus::make() {
  const int fd = ::open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
  if (fd < 0)
    return fail(
        errno,
        "cannot drive a device from here: opening /dev/vfio/vfio failed; run as root, and load "
        "the module with modprobe vfio-pci");
  if (ioctl(fd, VFIO_GET_API_VERSION) != VFIO_API_VERSION ||
      ioctl(fd, VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) != 1) {
    ::close(fd);
    return fail(Code::unsupported,
                "this kernel's VFIO has no IOMMU of type 1, version 2; load it (modprobe "
                "vfio_iommu_type1), or name the kernel's device (nvme:/dev/ng0n1)");
  }
  return std::shared_ptr<Bus>(new VfioBus(fd));
}

VfioBus::~VfioBus() {
  for (const auto& [number, fd] : groups_) ::close(fd);
  ::close(fd_);
}

Result<std::unique_ptr<Device>> VfioBus::open(const std::string& address) {
  return PciDevice::open(address, *this);
}

Result<int> VfioBus::group(const std::string& number, const std::string& what) {
  MutexLock lock(mutex_);
  if (const auto known = groups_.find(number); known != groups_.end()) return known->second;
  const std::string file = "/dev/vfio/" + number;
  const int group = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  if (group < 0) {
    const int error = errno;
    return device_error(
        error, what,
        error == EBUSY ? in_use_by(opener_of(file)) : "opening its group " + file + " failed");
  }
  if (const Status taken = take_group(group, what); !taken) {
    ::close(group);
    return taken.error();
  }
  groups_.emplace(number, group);
  return group;
}

Status VfioBus::claim(const std::string& address) {
  MutexLock lock(mutex_);
  if (claimed_.insert(address).second) return {};
  return device_error(EBUSY, address,
                      "this process drives it already, for another store; close that first");
}

void VfioBus::leave(const std::string& address) {
  MutexLock lock(mutex_);
  claimed_.erase(address);
}

// Under mutex_.
Status VfioBus::take_group(int group, const std::string& what) {
  vfio_group_status status{};
  status.argsz = sizeof status;
  if (ioctl(group, VFIO_GROUP_GET_STATUS, &status) != 0 ||
      (status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0)
    return fail(Code::busy,
                "cannot drive the device {}: another device of its IOMMU group has a driver of the "
                "kernel; bind all devices of the group to vfio-pci",
                what);
  int fd = fd_;
  if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &fd) != 0)
    return device_error(errno, what,
                        "its IOMMU group cannot be taken; end the programs that use a device of "
                        "it");
  if (ready_) return {};
  if (ioctl(fd_, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) != 0)
    return device_error(errno, what,
                        "the kernel gives no IOMMU; check that it is on in the firmware, and on "
                        "Intel boot the kernel with intel_iommu=on");
  ready_ = true;
  return {};
}

// The first gap that is large enough; what is large begins at a large page.
uint64_t VfioBus::find_room(uint64_t bytes) const {
  const uint64_t step = bytes >= kLarge ? kLarge : 4096;
  uint64_t at = kFirst;
  for (const auto& [begin, size] : used_) {
    if (align_up(at, step) + bytes <= begin) break;
    at = begin + size;
  }
  at = align_up(at, step);
  return at + bytes <= kEnd ? at : 0;
}

Result<uint64_t> VfioBus::map(const void* data, uint64_t bytes) {
  MutexLock lock(mutex_);
  const uint64_t at = find_room(bytes);
  if (at == 0)
    return fail(Code::out_of_space,
                "the IOMMU has no free addresses for {} more; give a smaller dram",
                human_bytes(bytes));
  vfio_iommu_type1_dma_map request{};
  request.argsz = sizeof request;
  request.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
  request.vaddr = reinterpret_cast<uintptr_t>(data);
  request.iova = at;
  request.size = bytes;
  if (ioctl(fd_, VFIO_IOMMU_MAP_DMA, &request) != 0)
    return fail(errno,
                "the IOMMU cannot map {} of memory; raise the limit of locked memory (ulimit -l)",
                human_bytes(bytes));
  used_.emplace(at, bytes);
  return at;
}

void VfioBus::unmap(uint64_t at, uint64_t bytes) {
  MutexLock lock(mutex_);
  vfio_iommu_type1_dma_unmap request{};
  request.argsz = sizeof request;
  request.iova = at;
  request.size = bytes;
  STOKER_CHECK(ioctl(fd_, VFIO_IOMMU_UNMAP_DMA, &request) == 0);
  used_.erase(at);
}

Result<std::unique_ptr<DmaMemory>> DmaMemory::make(Bus& bus, uint64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    return fail(errno, "cannot allocate {} for the queues of a drive", human_bytes(bytes));
  const auto at = bus.map(data, bytes);
  if (!at) {
    munmap(data, bytes);
    return at.error();
  }
  return std::unique_ptr<DmaMemory>(new DmaMemory(bus, static_cast<std::byte*>(data), bytes, *at));
}

DmaMemory::~DmaMemory() {
  bus_.unmap(at_, bytes_);
  munmap(data_, bytes_);
}

Result<std::unique_ptr<Device>> PciDevice::open(const std::string& address, VfioBus& bus) {
  std::unique_ptr<PciDevice> device(new PciDevice(address, bus));
  STOKER_TRY(device->take());
  STOKER_TRY(device->map_registers());
  STOKER_TRY(device->enable());
  return std::unique_ptr<Device>(std::move(device));
}

PciDevice::~PciDevice() {
  if (registers_ != nullptr) munmap(const_cast<std::byte*>(registers_), registers_bytes_);
  for (const int fd : {interrupt_, device_}) {
    if (fd >= 0) ::close(fd);
  }
  if (claimed_) bus_.leave(address_);
}

Status PciDevice::take() {
  const std::string& address = address_;
  const fs::path folder = fs::path("/sys/bus/pci/devices") / address;
  std::error_code error;
  if (!fs::exists(folder, error))
    return device_error(ENOENT, address,
                        "there is none; `stoker nvme list` names those of this machine");
  const std::string driver = fs::read_symlink(folder / "driver", error).filename();
  if (driver != "vfio-pci")
    return fail(Code::busy, "cannot drive the device {}: {}; bind it with `stoker nvme bind {}`",
                address,
                driver.empty() ? "it is not bound to vfio-pci"
                               : "the kernel's driver " + driver + " has it",
                address);
  const std::string group = fs::read_symlink(folder / "iommu_group", error).filename();
  if (group.empty())
    return fail(Code::unsupported,
                "cannot drive the device {}: it has no IOMMU group; turn the IOMMU on in the "
                "firmware, and on Intel boot the kernel with intel_iommu=on",
                address);
  STOKER_TRY(bus_.claim(address));
  claimed_ = true;
  STOKER_ASSIGN(const int group_fd, bus_.group(group, address));
  device_ = ioctl(group_fd, VFIO_GROUP_GET_DEVICE_FD, address.c_str());
  if (device_ < 0) return bound_device_error(errno, address, "vfio-pci does not open it");
  ioctl(device_, VFIO_DEVICE_RESET);  // what a process before us left; the controller's own comes
  return {};
}

Status PciDevice::map_registers() {
  vfio_region_info region{};
  region.argsz = sizeof region;
  region.index = VFIO_PCI_BAR0_REGION_INDEX;
  if (ioctl(device_, VFIO_DEVICE_GET_REGION_INFO, &region) != 0)
    return bound_device_error(errno, address_, "its registers are not available");
  void* mapped = mmap(nullptr, region.size, PROT_READ | PROT_WRITE, MAP_SHARED, device_,
                      static_cast<off_t>(region.offset));
  if (mapped == MAP_FAILED)
    return bound_device_error(errno, address_, "its registers cannot be mapped");
  registers_ = static_cast<volatile std::byte*>(mapped);
  registers_bytes_ = region.size;
  return {};
}

uint32_t PciDevice::read32(size_t at) const {
  return *reinterpret_cast<volatile const uint32_t*>(registers_ + at);
}

uint64_t PciDevice::read64(size_t at) const {
  return *reinterpret_cast<volatile const uint64_t*>(registers_ + at);
}

void PciDevice::write32(size_t at, uint32_t value) {
  *reinterpret_cast<volatile uint32_t*>(registers_ + at) = value;
}

void PciDevice::write64(size_t at, uint64_t value) {
  *reinterpret_cast<volatile uint64_t*>(registers_ + at) = value;
}

Status PciDevice::let_reach_memory(bool may) {
  vfio_region_info region{};
  region.argsz = sizeof region;
  region.index = VFIO_PCI_CONFIG_REGION_INDEX;
  if (ioctl(device_, VFIO_DEVICE_GET_REGION_INFO, &region) != 0)
    return bound_device_error(errno, address_, "its PCI registers are not available");
  const auto at = static_cast<off_t>(region.offset + PCI_COMMAND);
  uint16_t command = 0;
  if (pread(device_, &command, sizeof command, at) != sizeof command)
    return bound_device_error(errno, address_, "its PCI registers cannot be read");
  command |= PCI_COMMAND_MEMORY;
  command =
      static_cast<uint16_t>(may ? command | PCI_COMMAND_MASTER : command & ~PCI_COMMAND_MASTER);
  return pwrite(device_, &command, sizeof command, at) == sizeof command
             ? Status{}
             : bound_device_error(errno, address_, "its PCI registers cannot be written");
}

void PciDevice::cut_off() {
  // A device that was removed answers to nothing, and reaches nothing.
  static_cast<void>(let_reach_memory(false));
  ioctl(device_, VFIO_DEVICE_RESET);
}

// Lets the device reach memory, and have its interrupts as an eventfd.
Status PciDevice::enable() {
  STOKER_TRY(let_reach_memory(true));
  interrupt_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (interrupt_ < 0) return device_error(errno, address_, "cannot make an eventfd for it");
  alignas(vfio_irq_set) std::array<std::byte, sizeof(vfio_irq_set) + sizeof(int)> memory{};
  auto* set = reinterpret_cast<vfio_irq_set*>(memory.data());
  set->argsz = memory.size();
  set->flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
  set->index = VFIO_PCI_MSIX_IRQ_INDEX;
  set->count = 1;
  std::memcpy(memory.data() + sizeof(vfio_irq_set), &interrupt_, sizeof(int));
  return ioctl(device_, VFIO_DEVICE_SET_IRQS, set) == 0
             ? Status{}
             : device_error(errno, address_,
                            "its MSI-X interrupts cannot be set up; use another drive, or name the "
                            "kernel's device (nvme:/dev/ng0n1)");
}

}  // namespace stoker::nvme
