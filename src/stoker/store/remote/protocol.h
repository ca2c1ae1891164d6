// The messages of docs/formats/serve.md. Parsers take any bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/bytes.h"
#include "stoker/store/plan.h"
#include "stoker/store/store.h"

namespace stoker::remote {

inline constexpr uint8_t kVersion = 2;
inline constexpr size_t kHeaderBytes = 16;
inline constexpr size_t kMessageMax = 65'536;     // of a packet
inline constexpr size_t kRequestMax = 4 * kMiB;   // of a body that comes as a descriptor,
inline constexpr size_t kAnswerMax = 256 * kMiB;  // to the server and to the client
inline constexpr uint64_t kClientMemoryMax = 64 * kMiB;
inline constexpr uint64_t kReadMax = 1 * kMiB;  // of the pieces of a read, and of a write
inline constexpr size_t kNameMax = 4096;        // of keys, tags and names
inline constexpr size_t kUnderWayMax = 128;     // requests of a connection
inline constexpr size_t kTransactionsMax = 64;  // of a connection
inline constexpr size_t kPlansMax = 16;         // of a connection
inline constexpr size_t kPiecesMax = 1024;      // of a read
inline constexpr uint32_t kNoSlot = UINT32_MAX;

enum class Kind : uint8_t {
  answer,
  hello,
  stat,
  list,
  read,
  begin,
  resize,
  write,
  remove,
  expect,
  require,
  commit,
  abandon,
  copy,
  forget,
  remove_many,
  snapshot,
  drop,
  info,
  unpin,
  ping,
  name,
  follow,
};
inline constexpr uint8_t kKinds = 23;

// Whether nobody can know what came of a request that was sent and not answered.
bool changes_the_store(Kind kind);

struct Header {
  Kind kind = Kind::answer;
  bool apart = false;  // the body comes as a descriptor
  uint64_t id = 0;

  bool operator==(const Header&) const = default;
};

struct Range {
  uint64_t object = 0, offset = 0, bytes = 0;

  bool operator==(const Range&) const = default;
};

struct Request {
  Kind kind = Kind::ping;
  uint64_t transaction = 0, offset = 0, bytes = 0, place = 0, number = 0;
  std::string key = {}, text = {}, tag = {}, blob = {};
  std::vector<std::string> keys = {};
  std::vector<Range> pieces = {};
  std::vector<uint32_t> numbers = {};

  bool operator==(const Request&) const = default;
};

struct Span {
  uint32_t slot = kNoSlot;
  uint64_t offset = 0;
  uint32_t bytes = 0;

  bool operator==(const Span&) const = default;
};

struct Answer {
  std::optional<Error> error = {};
  uint64_t number = 0;
  std::string tag = {}, blob = {};
  std::vector<ObjectInfo> objects = {};
  std::vector<Span> spans = {};
};

struct Welcome {
  Features features;
  uint64_t heartbeat_ms = 0, blocks_bytes = 0;

  static Result<Welcome> decode(std::string_view blob);
  std::string encode() const;
};

std::string encode(const Header& header);
std::string encode(const Request& request);
std::string encode(const Answer& answer);
std::string encode(const StoreInfo& info);
// mismatch: of another version; corruption: anything else.
Result<Header> decode_header(std::span<const std::byte> bytes);
Result<Request> decode_request(Kind kind, std::span<const std::byte> body);
Result<Answer> decode_answer(std::span<const std::byte> body);
Result<StoreInfo> decode_info(std::string_view blob);
// A plan's name and keys are the request's.
Request encode(const Plan& plan);
Result<Plan> decode_plan(Request request);

}  // namespace stoker::remote
