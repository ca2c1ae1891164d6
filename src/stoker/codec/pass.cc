#include "stoker/codec/pass.h"

#include <functional>
#include <string>
#include <utility>

namespace stoker::codec {

std::string chunk_name(int chunk) { return "chunk " + std::to_string(chunk); }
Error refuse(std::string what) { return fail(Code::invalid_argument, "{}", what); }

Status Pass::add(const Part& part) {
  if (!parts_.empty() && part.size != bytes()) {
    return refuse("the slice of " + chunk_name(part.chunk) + " has " + std::to_string(part.size) +
                  " bytes and that of " + chunk_name(parts_.front().chunk) + " has " +
                  std::to_string(bytes()) +
                  ": all slices of a call are the same range of their chunks");
  }
  if (!part.crcs.empty() && part.crcs.size() != crc_blocks(part.size)) {
    return refuse("there is room for " + std::to_string(part.crcs.size()) + " CRCs of " +
                  chunk_name(part.chunk) + ", where a slice of " + std::to_string(part.size) +
                  " bytes has " + std::to_string(crc_blocks(part.size)));
  }
  const std::less<> before;
  for (const Part& other : parts_) {
    if ((part.written || other.written) && before(part.bytes, other.bytes + other.size) &&
        before(other.bytes, part.bytes + part.size)) {
      return refuse("the slices of " + chunk_name(other.chunk) + " and " + chunk_name(part.chunk) +
                    " share memory, and one of them is written");
    }
  }
  parts_.push_back(part);
  return {};
}

}  // namespace stoker::codec
