// TaggedReads: of stores that see which object they read without asking more often.
#pragma once

#include <cstdint>
#include <string_view>

#include "stoker/base/future.h"
#include "stoker/memory/slice.h"

namespace stoker {

class TaggedReads {
 public:
  // As Store::read() of the current version, from the object that has this tag (not empty): where
  // another one is there, the error is `conflict`.
  virtual Future<void> read_tagged(std::string_view key, std::string_view tag, uint64_t offset,
                                   Slice into) = 0;

 protected:
  TaggedReads() = default;
  TaggedReads(const TaggedReads&) = default;
  TaggedReads& operator=(const TaggedReads&) = default;
  ~TaggedReads() = default;
};

}  // namespace stoker
