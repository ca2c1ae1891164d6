// Server: one store for the other processes of this machine (docs/formats/serve.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "stoker/store/open.h"

namespace stoker {

struct ServeOptions {
  std::string path = {};    // of the socket
  std::string prefix = {};  // nothing else is served
  bool read_only = false;
  uint32_t mode = 0600;                       // of the socket: who may connect
  uint64_t memory_bytes = uint64_t{1} << 30;  // blocks that clients read without a copy
  uint32_t block_bytes = 1 << 20;
  uint64_t pinned_bytes = uint64_t{256} << 20;  // by one client
  uint64_t list_bytes = uint64_t{4} << 20;      // of one answer to a list; the rest is asked for
  uint64_t heartbeat_ms = 30'000;
  size_t clients = 256;
};

struct ServeCounts {
  uint64_t clients = 0;                    // now
  uint64_t transactions = 0;               // open now
  uint64_t requests = 0;                   // all that were answered
  uint64_t hits = 0, fills = 0, pins = 0;  // of blocks
  uint64_t lists = 0;                      // that the store was asked for
};

class Server {
 public:
  virtual ~Server() = default;  // ends all connections, and waits for what the store is doing
  virtual ServeCounts counts() const = 0;
};

// Listens when this returns. The store must live longer. busy: somebody serves there already.
Result<std::unique_ptr<Server>> serve(Store& store, const Runtime& runtime,
                                      const ServeOptions& options);

}  // namespace stoker
