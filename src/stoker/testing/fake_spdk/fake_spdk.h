// SPDK made of software: one drive at 0000:00:04.0 with one namespace of 64 MiB.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stoker {

struct FakeSpdk {
  // How it behaves. A test may change it while a Loop polls.
  std::atomic<bool> iommu = true;
  std::atomic<uint32_t> requests_max = 1024;  // of a queue; more are refused with ENOMEM
  std::atomic<bool> lost = false;             // the drive is not there any more
  std::atomic<uint64_t> bad_block = UINT64_MAX;
  // What it saw.
  std::vector<std::string> shown;  // the devices that it may touch
  size_t attached = 0, queues = 0, regions = 0, copies = 0;
  std::vector<std::byte> disk = std::vector<std::byte>(64 << 20);
};

FakeSpdk& fake_spdk();

}  // namespace stoker
