// Folders that survive power loss.
#pragma once

#include <filesystem>

#include "stoker/base/result.h"

namespace stoker {

// And those above it; nothing where it is there.
Status make_folder(const std::filesystem::path& folder);

}  // namespace stoker
