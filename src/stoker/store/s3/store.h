// Objects in a bucket of an S3 server. docs/stores/s3.md says what that promises, and how it is
// kept.
#pragma once

#include <memory>
#include <string>

#include "stoker/store/open.h"

namespace stoker {

// `composition`: "s3://bucket/prefix?option=value&...".
Result<std::unique_ptr<Store>> open_s3_store(const std::string& composition, const Runtime& runtime,
                                             const StoreOptions& options);

}  // namespace stoker
