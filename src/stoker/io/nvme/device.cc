#include "stoker/io/nvme/device.h"

#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>

#include "stoker/base/bytes.h"
#include "stoker/base/holders.h"

namespace stoker::nvme {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kPciClass = "0x0108";  // of NVMe controllers
// Where the kernel does not tell: pages of memory that one command takes in every version.
constexpr uint64_t kPagesSure = 64;

Error open_error(int error, const OpenFile& request, const std::string& device) {
  const std::string what = "cannot open '" + request.path + "'";
  switch (error) {
    case ENOENT:
      return fail(error,
                  "{}: there is no such device; `stoker nvme list` names those of this machine",
                  what);
    case EACCES:
    case EPERM:
      return fail(error, "{}: only root may send commands to a drive; run this as root", what);
    default:
      return fail(error, "{} ({})", what, device);
  }
}

Status check_type(const OpenFile& request, const std::string& device) {
  struct stat st {};
  if (stat(device.c_str(), &st) != 0 || S_ISCHR(st.st_mode)) return {};  // open(2) will say why
  return fail(Code::invalid_argument, "cannot open '{}': {}", request.path,
              S_ISBLK(st.st_mode) ? "it is a block device: name it without nvme:, or name the "
                                    "device /dev/ng... of the same number"
                                  : "it is not a device; `stoker nvme list` names those of this "
                                    "machine");
}

// Carries one command about the drive itself and waits for it.
Status administer(int fd, const Command& command, const std::string& path) {
  nvme_admin_cmd raw{};
  raw.opcode = command.opcode;
  raw.nsid = command.space;
  raw.addr = reinterpret_cast<uintptr_t>(command.data);
  raw.data_len = command.bytes;
  raw.cdw10 = command.word10;
  raw.cdw11 = command.word11;
  const int result = ioctl(fd, NVME_IOCTL_ADMIN_CMD, &raw);
  if (result == 0) return {};
  const std::string what = "the drive of '" + path + "' cannot be identified";
  if (result < 0) return fail(errno, "{}", what);
  const Failure failure = failure_of(static_cast<uint16_t>(result));
  return fail(failure.sys_errno, "{}: {}", what, failure.sentence);
}

std::string line_of(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  line.erase(line.find_last_not_of(" \t") + 1);
  return line;
}

std::optional<uint64_t> number_of(const fs::path& file) {
  std::ifstream in(file);
  uint64_t value = 0;
  return in >> value ? std::optional(value) : std::nullopt;
}

// The block device of the same namespace: /dev/nvme0n1 of /dev/ng0n1.
std::string block_name(const std::string& device) {
  std::string name = fs::path(device).filename();
  if (name.starts_with("ng")) name.replace(0, 2, "nvme");
  return name;
}

// Whoever uses the block device (a mounted file system, swap, a RAID) holds it exclusively, and
// knows nothing of commands that pass it by.
Status check_unused(const std::string& device, const std::string& path) {
  const std::string block = block_device_of(device);
  for (int tries = 0; tries < 20; ++tries) {  // another opening looks as we do, for a moment
    const int fd = ::open(block.c_str(), O_RDONLY | O_EXCL | O_CLOEXEC);
    if (fd >= 0) ::close(fd);
    if (fd >= 0 || errno != EBUSY) return {};
    usleep(5'000);
  }
  return fail(Code::busy,
              "'{}' cannot be used: its block device {} is in use (mounted, swap or part of a "
              "RAID). End that first",
              path, block);
}

// Whoever has the file open would lose the drive, or keep the kernel from taking it.
Status check_unopened(const std::string& file, const std::string& address) {
  const std::string holder = opener_of(file);
  if (holder.empty()) return {};
  return fail(Code::busy,
              "the driver of the drive {} cannot be changed: {} uses {}; end that first", address,
              holder, file);
}

// What the kernel takes as one command: it joins no more than so many pages.
uint64_t kernel_bytes(const std::string& device) {
  const fs::path queue = fs::path("/sys/block") / block_name(device) / "queue";
  const auto kib = number_of(queue / "max_hw_sectors_kb");
  const auto pages = number_of(queue / "max_segments");
  const uint64_t sure = kPagesSure * 4096;
  return std::max<uint64_t>(
      4096, std::min(kib ? *kib * 1024 : sure, pages && *pages > 1 ? (*pages - 1) * 4096 : sure));
}

Result<Space> identify_device(int fd, const std::string& path) {
  const int number = ioctl(fd, NVME_IOCTL_ID);
  if (number <= 0)
    return Error{Code::invalid_argument, errno,
                 "'" + path + "' is not an NVMe namespace; `stoker nvme list` names them"};
  alignas(4096) std::array<std::byte, kIdentifyBytes> answer{};
  STOKER_TRY(administer(fd, identify(kIdentifyController, 0, answer), path));
  const Controller controller = read_controller(answer);
  STOKER_TRY(
      administer(fd, identify(kIdentifyNamespace, static_cast<uint32_t>(number), answer), path));
  auto space = read_space(answer, static_cast<uint32_t>(number), controller);
  if (!space) return space.error().with("'" + path + "' cannot be used");
  return space;
}

Status write_line(const fs::path& file, const std::string& line, const std::string& what) {
  const int fd = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
  const bool written =
      fd >= 0 && ::write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  const int error = errno;
  if (fd >= 0) ::close(fd);
  return written ? Status{} : fail(error, "{}: writing '{}' failed", what, file.string());
}

Result<Drive> find_drive(const std::string& address, const std::string& sys) {
  STOKER_ASSIGN(const auto drives, list_drives(sys));
  const auto found = std::find_if(drives.begin(), drives.end(),
                                  [&](const Drive& each) { return each.address == address; });
  if (found != drives.end()) return *found;
  return fail(
      Code::not_found,
      "there is no NVMe drive at the address '{}'; `stoker nvme list` names those of this machine",
      address);
}

// Has the kernel choose a driver anew; `driver` empty: the one it would choose itself.
Status give_to(const Drive& drive, const std::string& driver, const std::string& sys) {
  const fs::path device = fs::path(sys) / "bus/pci/devices" / drive.address;
  const std::string what = "the driver of the drive " + drive.address + " cannot be changed";
  STOKER_TRY(write_line(device / "driver_override", driver + "\n", what));
  if (!drive.driver.empty()) STOKER_TRY(write_line(device / "driver/unbind", drive.address, what));
  return write_line(fs::path(sys) / "bus/pci/drivers_probe", drive.address, what);
}

}  // namespace

std::string block_device_of(const std::string& device) { return "/dev/" + block_name(device); }

Status bind_drive(const std::string& address, const std::string& sys) {
  STOKER_ASSIGN(const Drive drive, find_drive(address, sys));
  if (drive.driver == "vfio-pci") return {};
  std::error_code error;
  if (!fs::exists(fs::path(sys) / "bus/pci/drivers/vfio-pci", error))
    return fail(Code::unsupported,
                "the kernel's driver vfio-pci is not loaded; load it: modprobe vfio-pci");
  if (!fs::exists(fs::path(sys) / "bus/pci/devices" / address / "iommu_group", error))
    return fail(Code::unsupported,
                "the drive {} has no IOMMU group; turn the IOMMU on in the firmware, and on Intel "
                "boot the kernel with intel_iommu=on",
                address);
  for (const std::string& device : drive.devices) {
    STOKER_TRY(check_unused(device, address));
    STOKER_TRY(check_unopened(device, address));
  }
  return give_to(drive, "vfio-pci", sys);
}

Status unbind_drive(const std::string& address, const std::string& sys) {
  STOKER_ASSIGN(const Drive drive, find_drive(address, sys));
  if (drive.driver != "vfio-pci") return {};
  std::error_code error;
  const std::string group =
      fs::read_symlink(fs::path(sys) / "bus/pci/devices" / address / "iommu_group", error)
          .filename();
  // The kernel would wait for the process, and this one could not be ended meanwhile.
  if (!group.empty()) STOKER_TRY(check_unopened("/dev/vfio/" + group, address));
  return give_to(drive, "", sys);
}

Status fill_in(FileTable::File& file, const OpenFile& request, const Target& target,
               const Space& space) {
  const uint64_t all = align_down(space.bytes(), 4096);
  if (target.offset > all || target.bytes.value_or(0) > all - target.offset)
    return fail(Code::invalid_argument,
                "'{}' lies beyond the end: the namespace has {} bytes; name a range inside",
                request.path, all);
  file.path = request.path;
  file.write = request.write;
  file.info.bytes = target.bytes.value_or(all - target.offset);
  file.space = space;
  file.base = target.offset;
  return {};
}

Result<FileTable::File> open_device(const OpenFile& request) {
  STOKER_ASSIGN(const Target target, parse_target(request.path));
  if (!target.device.starts_with('/'))
    return fail(Code::unsupported,
                "cannot open '{}': only the engine vfio takes a PCI address; name the kernel's "
                "device, for example nvme:/dev/ng0n1",
                request.path);
  STOKER_TRY(check_type(request, target.device));
  if (request.write) STOKER_TRY(check_unused(target.device, request.path));
  FileTable::File file;
  file.fd = ::open(target.device.c_str(), (request.write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (file.fd < 0) return open_error(errno, request, target.device);
  auto space = identify_device(file.fd, request.path);
  if (space) space->transfer_bytes = std::min(space->transfer_bytes, kernel_bytes(target.device));
  const Status filled = space ? fill_in(file, request, target, *space) : Status(space.error());
  if (!filled) {
    ::close(file.fd);
    return filled.error();
  }
  return file;
}

Result<std::vector<Drive>> list_drives(const std::string& sys) {
  std::vector<Drive> drives;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(sys + "/bus/pci/devices", error)) {
    if (!line_of(entry.path() / "class").starts_with(kPciClass)) continue;
    Drive drive;
    drive.address = entry.path().filename();
    std::error_code none;
    drive.driver = fs::read_symlink(entry.path() / "driver", none).filename();
    for (const auto& controller : fs::directory_iterator(entry.path() / "nvme", none)) {
      drive.model = line_of(controller.path() / "model");
      for (const auto& part : fs::directory_iterator(controller.path(), none)) {
        const std::string name = part.path().filename();
        if (name.starts_with("ng")) drive.devices.push_back("/dev/" + name);
      }
    }
    std::sort(drive.devices.begin(), drive.devices.end());
    drives.push_back(std::move(drive));
  }
  if (error && error != std::errc::no_such_file_or_directory)
    return fail(error.value(), "cannot look at the PCI devices in '{}'", sys);
  std::sort(drives.begin(), drives.end(),
            [](const Drive& a, const Drive& b) { return a.address < b.address; });
  return drives;
}

}  // namespace stoker::nvme
