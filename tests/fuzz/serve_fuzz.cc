// Messages of `stoker serve` on any bytes: what is taken is encoded in the same way.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "stoker/base/check.h"
#include "stoker/store/remote/protocol.h"

using namespace stoker::remote;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes = std::as_bytes(std::span(data, size));
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (size >= kHeaderBytes) {
    const auto header = decode_header(bytes.first(kHeaderBytes));
    if (header) STOKER_CHECK(encode(*header) == text.substr(0, kHeaderBytes));
    const Kind kind = header ? header->kind : Kind::read;
    const auto request = decode_request(kind, bytes.subspan(kHeaderBytes));
    if (request) STOKER_CHECK(encode(*request) == text.substr(kHeaderBytes));
  }
  if (const auto answer = decode_answer(bytes)) STOKER_CHECK(encode(*answer).size() <= size);
  (void)decode_info(text);
  Request follow{.kind = Kind::follow};
  follow.blob = text;
  if (const auto plan = decode_plan(follow)) STOKER_CHECK(encode(*plan).blob.size() == size);
  (void)Welcome::decode(text);
  return 0;
}
