// A JPEG of fewer pixels, for a tier that is quicker to read and to decode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "stoker/base/result.h"

namespace stoker::data {

// The whole image with a shorter side of `side` pixels, in its shape, as a JPEG of this quality (1
// to 100). Nothing where its shorter side is no longer than that: it may stay as it is. The same
// file gives the same bytes. Errors are those of decode_jpeg(); unsupported too: the longer side
// would have more than 16384 pixels.
Result<std::optional<std::vector<std::byte>>> shrink_jpeg(std::span<const std::byte> file,
                                                          uint32_t side, int quality);

}  // namespace stoker::data
