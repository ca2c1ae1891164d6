#include "stoker/testing/fake_spdk/fake_spdk.h"
#include "stoker/base/mutex.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "spdk/env.h"
#include "spdk/nvme.h"
#include "stoker/base/error.h"
#include "stoker/base/result.h"

// NOLINTBEGIN(readability-identifier-naming): names of SPDK's
struct spdk_nvme_ctrlr {
  int unused;
};
struct spdk_nvme_ns {
  int unused;
};
struct spdk_nvme_qpair {
  struct Request {
    spdk_nvme_cmd command;
    std::byte* data;
    uint32_t bytes;
    spdk_nvme_cmd_cb answered;
    void* context;
  };
  std::deque<Request> requests;
};
// NOLINTEND(readability-identifier-naming)

using stoker::MutexLock;

namespace stoker {

FakeSpdk& fake_spdk() {
  static FakeSpdk spdk;
  return spdk;
}

namespace {

constexpr uint32_t kBlock = 512, kTransferMost = 128 << 10;
Mutex mutex;
std::map<const std::byte*, size_t> reachable GUARDED_BY(mutex);  // by the drive
spdk_nvme_ctrlr the_controller;
spdk_nvme_ns the_space;

bool reaches(const std::byte* data, size_t bytes) {
  MutexLock lock(mutex);
  auto after = reachable.upper_bound(data);
  if (after == reachable.begin()) return false;
  const auto& [begin, size] = *--after;
  return data + bytes <= begin + size;
}

// The status: type << 8 | code.
int carry(const spdk_nvme_qpair::Request& request) {
  FakeSpdk& spdk = fake_spdk();
  const spdk_nvme_cmd& command = request.command;
  if (command.nsid != 1) return 0x0B;
  if (command.opc == 0x00) return 0;
  const uint64_t first = command.cdw10 | uint64_t{command.cdw11} << 32;
  const uint64_t blocks = (command.cdw12 & 0xFFFF) + 1;
  if ((first + blocks) * kBlock > spdk.disk.size()) return 0x80;
  if (spdk.bad_block >= first && spdk.bad_block < first + blocks)
    return command.opc == 0x02 ? 0x281 : 0x280;
  std::byte* const place = spdk.disk.data() + first * kBlock;
  const size_t bytes = blocks * kBlock;
  if (command.opc == 0x08) {
    std::memset(place, 0, bytes);
    return 0;
  }
  STOKER_CHECK(request.bytes == bytes && bytes <= kTransferMost);
  STOKER_CHECK(reaches(request.data, bytes));  // memory that the drive was told of
  if (command.opc == 0x01) std::memcpy(place, request.data, bytes);
  if (command.opc == 0x02) std::memcpy(request.data, place, bytes);
  return 0;
}

void answer(const spdk_nvme_qpair::Request& request, int status) {
  spdk_nvme_cpl completion{};
  completion.status.sc = status & 0xFF;
  completion.status.sct = status >> 8 & 7;
  request.answered(request.context, &completion);
}

}  // namespace
}  // namespace stoker

using stoker::fake_spdk;

extern "C" {

void spdk_env_opts_init(spdk_env_opts*) {}

int spdk_env_init(const spdk_env_opts* options) {
  STOKER_CHECK(options->opts_size == sizeof(spdk_env_opts) && fake_spdk().shown.empty());
  STOKER_CHECK(options->num_pci_addr > 0);  // else it takes every drive that it finds
  for (size_t i = 0; i < options->num_pci_addr; ++i) {
    const spdk_pci_addr& each = options->pci_allowed[i];
    char text[32];
    std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", each.domain, each.bus, each.dev,
                  each.func);
    fake_spdk().shown.emplace_back(text);
  }
  return 0;
}

int spdk_pci_addr_parse(spdk_pci_addr* address, const char* text) {
  unsigned bus = 0, dev = 0, func = 0;
  if (std::sscanf(text, "%x:%x:%x.%x", &address->domain, &bus, &dev, &func) != 4) return -EINVAL;
  address->bus = static_cast<uint8_t>(bus);
  address->dev = static_cast<uint8_t>(dev);
  address->func = static_cast<uint8_t>(func);
  return 0;
}

bool spdk_iommu_is_enabled() { return fake_spdk().iommu; }

int spdk_mem_register(void* data, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(data) % (2 << 20) != 0 || bytes % (2 << 20) != 0) return -EINVAL;
  MutexLock lock(stoker::mutex);
  if (!stoker::reachable.emplace(static_cast<std::byte*>(data), bytes).second) return -EBUSY;
  ++fake_spdk().regions;
  return 0;
}

int spdk_mem_unregister(void* data, size_t) {
  MutexLock lock(stoker::mutex);
  STOKER_CHECK(stoker::reachable.erase(static_cast<std::byte*>(data)) == 1);
  --fake_spdk().regions;
  return 0;
}

void* spdk_dma_malloc(size_t bytes, size_t align, uint64_t*) {
  void* data = std::aligned_alloc(align, (bytes + align - 1) / align * align);
  MutexLock lock(stoker::mutex);
  stoker::reachable[static_cast<std::byte*>(data)] = bytes;
  ++fake_spdk().copies;
  return data;
}

void spdk_dma_free(void* data) {
  if (data == nullptr) return;
  MutexLock lock(stoker::mutex);
  STOKER_CHECK(stoker::reachable.erase(static_cast<std::byte*>(data)) == 1);
  --fake_spdk().copies;
  std::free(data);
}

int spdk_nvme_transport_id_parse(spdk_nvme_transport_id* place, const char* text) {
  return std::sscanf(text, "trtype:PCIe traddr:%256s", place->traddr) == 1 ? 0 : -EINVAL;
}

spdk_nvme_ctrlr* spdk_nvme_connect(const spdk_nvme_transport_id* place, const spdk_nvme_ctrlr_opts*,
                                   size_t) {
  const std::vector<std::string>& shown = fake_spdk().shown;
  const bool there = std::string(place->traddr) == "0000:00:04.0" &&
                     std::find(shown.begin(), shown.end(), place->traddr) != shown.end();
  if (!there) return nullptr;
  ++fake_spdk().attached;
  return &stoker::the_controller;
}

int spdk_nvme_detach(spdk_nvme_ctrlr*) {
  --fake_spdk().attached;
  return 0;
}

void spdk_nvme_ctrlr_get_default_io_qpair_opts(spdk_nvme_ctrlr*, spdk_nvme_io_qpair_opts* options,
                                               size_t) {
  *options = {256, 512};
}

spdk_nvme_qpair* spdk_nvme_ctrlr_alloc_io_qpair(spdk_nvme_ctrlr*, const spdk_nvme_io_qpair_opts*,
                                                size_t) {
  ++fake_spdk().queues;
  return new spdk_nvme_qpair;
}

int spdk_nvme_ctrlr_free_io_qpair(spdk_nvme_qpair* queue) {
  for (const auto& request : queue->requests) stoker::answer(request, 0x08);  // aborted
  delete queue;
  --fake_spdk().queues;
  return 0;
}

int spdk_nvme_ctrlr_cmd_io_raw(spdk_nvme_ctrlr*, spdk_nvme_qpair* queue, spdk_nvme_cmd* command,
                               void* data, uint32_t bytes, spdk_nvme_cmd_cb answered,
                               void* context) {
  if (queue->requests.size() >= fake_spdk().requests_max) return -ENOMEM;
  queue->requests.push_back({*command, static_cast<std::byte*>(data), bytes, answered, context});
  return 0;
}

int32_t spdk_nvme_qpair_process_completions(spdk_nvme_qpair* queue, uint32_t) {
  if (fake_spdk().lost) return -ENXIO;
  const size_t now = queue->requests.size();
  for (size_t i = 0; i < now; ++i) {
    const auto request = queue->requests.front();
    queue->requests.pop_front();
    stoker::answer(request, stoker::carry(request));
  }
  return static_cast<int32_t>(now);
}

spdk_nvme_ns* spdk_nvme_ctrlr_get_ns(spdk_nvme_ctrlr*, uint32_t number) {
  return number == 1 ? &stoker::the_space : nullptr;
}

bool spdk_nvme_ns_is_active(spdk_nvme_ns*) { return true; }
uint32_t spdk_nvme_ns_get_md_size(spdk_nvme_ns*) { return 0; }
uint32_t spdk_nvme_ns_get_sector_size(spdk_nvme_ns*) { return stoker::kBlock; }
uint64_t spdk_nvme_ns_get_num_sectors(spdk_nvme_ns*) {
  return fake_spdk().disk.size() / stoker::kBlock;
}
uint32_t spdk_nvme_ns_get_max_io_xfer_size(spdk_nvme_ns*) { return stoker::kTransferMost; }

}  // extern "C"
