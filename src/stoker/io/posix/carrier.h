// Carrier: moves the bytes of ops that pread and pwrite cannot: those in memory that is not this
// machine's own.
#pragma once

#include <cstdint>
#include <optional>

#include "stoker/io/file_table.h"
#include "stoker/io/op.h"
#include "stoker/memory/arena.h"

namespace stoker {

// Any thread.
class Carrier {
 public:
  virtual ~Carrier() = default;
  virtual const char* name() const = 0;  // of an engine with it
  virtual Status adopt(const Arena& arena) = 0;
  virtual Status unadopt(const Arena& arena) = 0;
  // Before the file is closed; nothing of it is under way.
  virtual void closing(FileId file) = 0;
  // Moves of what is left of a read or write as much as it can: bytes, or -errno. Nothing: pread
  // and pwrite do it.
  virtual std::optional<int64_t> carry(const Op& op, const FileTable::File& file) = 0;
};

}  // namespace stoker
