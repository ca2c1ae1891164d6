#include "stoker/io/spdk/env.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "spdk/env.h"
#include "spdk/nvme.h"
#include "stoker/base/log.h"

namespace stoker::spdk {
namespace {

Error bad_address(const std::string& address) {
  return fail(Code::invalid_argument, "'{}' is not a PCI address; write for example 0000:00:04.0",
              address);
}

Error not_shown(const std::string& address) {
  return fail(Code::busy,
              "this process started SPDK without the drive {}, and SPDK cannot add drives later. "
              "Open all drives in one store, or use Stoker's own driver: nvme:{}",
              address, address);
}

// Shows SPDK these devices of the PCI bus and no other.
Status start_environment(const std::vector<std::string>& addresses) {
  std::vector<spdk_pci_addr> allowed(addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (spdk_pci_addr_parse(&allowed[i], addresses[i].c_str()) != 0)
      return bad_address(addresses[i]);
  }
  int error = 0;
  // It pins the thread that starts it to a core.
  std::thread([&] {
    spdk_env_opts options{};
    options.opts_size = sizeof options;
    spdk_env_opts_init(&options);
    options.name = "stoker";
    options.num_pci_addr = allowed.size();
    options.pci_allowed = allowed.data();
    error = spdk_env_init(&options);
  }).join();
  if (error == 0) return {};
  return fail(error < 0 ? -error : EIO,
              "SPDK does not start; it needs huge pages (vm.nr_hugepages) and root");
}

}  // namespace

Env& Env::of_process() {
  static Env* const env = new Env;  // SPDK stays until the process ends
  return *env;
}

Status Env::start(const std::vector<std::string>& addresses) {
  MutexLock lock(mutex_);
  if (shown_.empty()) {
    // With nothing on the list all devices are shown.
    if (addresses.empty())
      return fail(Code::invalid_argument, "SPDK was given no drives; name at least one");
    STOKER_TRY(start_environment(addresses));
    shown_ = addresses;
    return {};
  }
  for (const std::string& address : addresses) {
    if (std::find(shown_.begin(), shown_.end(), address) != shown_.end()) continue;
    return not_shown(address);
  }
  return {};
}

Result<spdk_nvme_ctrlr*> Env::attach(const std::string& address) {
  MutexLock lock(mutex_);
  Controller& known = controllers_[address];
  if (known.controller == nullptr) {
    spdk_nvme_transport_id place{};
    const std::string text = "trtype:PCIe traddr:" + address;
    if (spdk_nvme_transport_id_parse(&place, text.c_str()) == 0)
      known.controller = spdk_nvme_connect(&place, nullptr, 0);
  }
  if (known.controller == nullptr) {
    controllers_.erase(address);
    return fail(ENODEV,
                "SPDK does not find the NVMe drive {}; bind it first: `stoker nvme bind {}`",
                address, address);
  }
  ++known.users;
  return known.controller;
}

void Env::detach(const std::string& address) {
  MutexLock lock(mutex_);
  const auto found = controllers_.find(address);
  if (found == controllers_.end() || --found->second.users > 0) return;
  spdk_nvme_detach(found->second.controller);
  controllers_.erase(found);
}

void Env::adopt(const Arena& arena) {
  if (arena.foreign()) return;
  MutexLock lock(mutex_);
  Region& region = regions_[arena.id()];
  if (region.users++ > 0) return;
  region.data = arena.data();
  region.bytes = arena.size();
  // Without an IOMMU drives reach pages by their places, which only those of hugetlbfs keep.
  const bool stays = arena.pages().kind == PageReport::Kind::hugetlb || spdk_iommu_is_enabled();
  region.registered = stays && spdk_mem_register(arena.data(), arena.size()) == 0;
  if (!region.registered)
    log().warn(
        "SPDK does not reach the memory of an arena: its bytes are copied; reserve huge pages with "
        "'sysctl vm.nr_hugepages'");
}

void Env::unadopt(int32_t arena) {
  MutexLock lock(mutex_);
  const auto found = regions_.find(arena);
  if (found == regions_.end() || --found->second.users > 0) return;
  const Region& region = found->second;
  if (region.registered) spdk_mem_unregister(region.data, region.bytes);
  regions_.erase(found);
}

bool Env::knows(const Slice& bytes) const {
  MutexLock lock(mutex_);
  const auto found = regions_.find(bytes.arena);
  if (found == regions_.end() || !found->second.registered) return false;
  const Region& region = found->second;
  return bytes.data >= region.data && bytes.data + bytes.size <= region.data + region.bytes;
}

}  // namespace stoker::spdk
