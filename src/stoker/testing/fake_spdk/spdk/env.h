// Of SPDK's spdk/env.h what our adapter uses, declared anew: enough to compile it and to run it
// over a drive made of software (fake_spdk.cc) where SPDK is not installed.
#pragma once

#include <cstddef>
#include <cstdint>

// NOLINTBEGIN(readability-identifier-naming): names of others
extern "C" {

struct spdk_pci_addr {
  uint32_t domain;
  uint8_t bus, dev, func;
};

struct spdk_env_opts {
  const char* name;
  bool no_pci;
  size_t num_pci_addr;
  spdk_pci_addr* pci_allowed;
  size_t opts_size;
};

void spdk_env_opts_init(spdk_env_opts* options);
int spdk_env_init(const spdk_env_opts* options);
int spdk_pci_addr_parse(spdk_pci_addr* address, const char* text);
bool spdk_iommu_is_enabled();
int spdk_mem_register(void* data, size_t bytes);
int spdk_mem_unregister(void* data, size_t bytes);
void* spdk_dma_malloc(size_t bytes, size_t align, uint64_t* place);
void spdk_dma_free(void* data);
}
// NOLINTEND(readability-identifier-naming)
