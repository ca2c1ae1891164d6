// RemoteStore: the store of another process, which serves it at a socket (docs/formats/serve.md).
#pragma once

#include <memory>
#include <string>

#include "stoker/store/open.h"

namespace stoker {

// unavailable: nobody serves there. The server decides about everything in the options but
// read_only.
Result<std::unique_ptr<Store>> open_remote_store(const std::string& path,
                                                 const StoreOptions& options);

}  // namespace stoker
