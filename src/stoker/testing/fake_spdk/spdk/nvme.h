// Of SPDK's spdk/nvme.h what our adapter uses, declared anew: see env.h.
#pragma once

#include <cstddef>
#include <cstdint>

// NOLINTBEGIN(readability-identifier-naming): names of others
extern "C" {

struct spdk_nvme_ctrlr;
struct spdk_nvme_ns;
struct spdk_nvme_qpair;
struct spdk_nvme_ctrlr_opts;

struct spdk_nvme_transport_id {
  char traddr[257];
};

struct spdk_nvme_io_qpair_opts {
  uint32_t io_queue_size, io_queue_requests;
};

struct spdk_nvme_cmd {
  uint8_t opc;
  uint32_t nsid;
  uint32_t cdw10, cdw11, cdw12;
};

struct spdk_nvme_status {
  uint16_t p : 1, sc : 8, sct : 3, crd : 2, m : 1, dnr : 1;
};

struct spdk_nvme_cpl {
  spdk_nvme_status status;
};

using spdk_nvme_cmd_cb = void (*)(void* context, const spdk_nvme_cpl* answer);

int spdk_nvme_transport_id_parse(spdk_nvme_transport_id* place, const char* text);
spdk_nvme_ctrlr* spdk_nvme_connect(const spdk_nvme_transport_id* place,
                                   const spdk_nvme_ctrlr_opts* options, size_t bytes);
int spdk_nvme_detach(spdk_nvme_ctrlr* controller);
void spdk_nvme_ctrlr_get_default_io_qpair_opts(spdk_nvme_ctrlr* controller,
                                               spdk_nvme_io_qpair_opts* options, size_t bytes);
spdk_nvme_qpair* spdk_nvme_ctrlr_alloc_io_qpair(spdk_nvme_ctrlr* controller,
                                                const spdk_nvme_io_qpair_opts* options,
                                                size_t bytes);
int spdk_nvme_ctrlr_free_io_qpair(spdk_nvme_qpair* queue);
int spdk_nvme_ctrlr_cmd_io_raw(spdk_nvme_ctrlr* controller, spdk_nvme_qpair* queue,
                               spdk_nvme_cmd* command, void* data, uint32_t bytes,
                               spdk_nvme_cmd_cb answered, void* context);
int32_t spdk_nvme_qpair_process_completions(spdk_nvme_qpair* queue, uint32_t most);
spdk_nvme_ns* spdk_nvme_ctrlr_get_ns(spdk_nvme_ctrlr* controller, uint32_t number);
bool spdk_nvme_ns_is_active(spdk_nvme_ns* space);
uint32_t spdk_nvme_ns_get_md_size(spdk_nvme_ns* space);
uint32_t spdk_nvme_ns_get_sector_size(spdk_nvme_ns* space);
uint64_t spdk_nvme_ns_get_num_sectors(spdk_nvme_ns* space);
uint32_t spdk_nvme_ns_get_max_io_xfer_size(spdk_nvme_ns* space);
}
// NOLINTEND(readability-identifier-naming)
