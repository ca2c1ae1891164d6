// Paths: what is there, and folders that survive power loss.
#pragma once

#include <filesystem>

#include "stoker/base/result.h"

namespace stoker {

// Links are followed; file_type::not_found where there is nothing. Where that cannot be told (no
// rights, a name too long) it is an error.
Result<std::filesystem::file_status> look_at(const std::filesystem::path& path);

// And those above it; nothing where it is there.
Status make_folder(const std::filesystem::path& folder);

}  // namespace stoker
