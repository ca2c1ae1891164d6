// The encoding of docs/formats/serve.md.
#include "stoker/store/remote/protocol.h"
#include "stoker/base/bytes.h"

namespace stoker::remote {
namespace {

constexpr std::string_view kMagic = "STKR";
constexpr uint8_t kCodes = static_cast<uint8_t>(Code::unavailable) + 1;

Error broken(const std::string& what) {
  return fail(Code::corruption,
              "a message breaks the protocol: {}; restart `stoker serve`, and use one version of "
              "Stoker on both sides",
              what);
}

std::string text_of(ByteReader& in) { return std::string(in.get_string()); }

// How many elements follow. Each has at least so many bytes, so no count makes a reader allocate
// more than a message of that size may hold.
size_t count_of(ByteReader& in, size_t least) {
  const auto count = in.get<uint32_t>();
  if (in.ok() && count > in.left() / least) (void)in.get_bytes(in.left() + 1);
  return in.ok() ? count : 0;
}

void put(ByteWriter& out, const ObjectInfo& object) {
  out.put_string(object.key);
  out.put(object.bytes);
  out.put(object.chunk_bytes);
  out.put(object.version);
  out.put(static_cast<uint8_t>(object.expected ? static_cast<uint8_t>(*object.expected) + 1 : 0));
  out.put_string(object.tag);
}

ObjectInfo object_of(ByteReader& in, bool& known) {
  ObjectInfo object;
  object.key = text_of(in);
  object.bytes = in.get<uint64_t>();
  object.chunk_bytes = in.get<uint32_t>();
  object.version = in.get<uint64_t>();
  const auto expected = in.get<uint8_t>();
  known &= expected <= kClasses.size();
  if (expected != 0 && known) object.expected = static_cast<Class>(expected - 1);
  object.tag = text_of(in);
  return object;
}

void put(ByteWriter& out, double value) { out.put(std::bit_cast<uint64_t>(value)); }

void put(ByteWriter& out, const CacheInfo& cache) {
  for (const uint64_t each :
       {cache.usable_bytes, cache.held_bytes, cache.hit_bytes, cache.memory_hit_bytes,
        cache.merged_bytes, cache.fetched_bytes, cache.admitted_bytes, cache.commits,
        cache.damaged_blocks, cache.plans, cache.epochs, cache.epoch_fetched_bytes,
        cache.epoch_bound_bytes, cache.ahead_depth_bytes, cache.ahead_bytes, cache.prefetched_bytes,
        cache.prefetched_in_vain_bytes, cache.stalls})
    out.put(each);
  out.put_string(cache.off);
}

CacheInfo cache_of(ByteReader& in) {
  CacheInfo cache;
  for (uint64_t* each :
       {&cache.usable_bytes, &cache.held_bytes, &cache.hit_bytes, &cache.memory_hit_bytes,
        &cache.merged_bytes, &cache.fetched_bytes, &cache.admitted_bytes, &cache.commits,
        &cache.damaged_blocks, &cache.plans, &cache.epochs, &cache.epoch_fetched_bytes,
        &cache.epoch_bound_bytes, &cache.ahead_depth_bytes, &cache.ahead_bytes,
        &cache.prefetched_bytes, &cache.prefetched_in_vain_bytes, &cache.stalls})
    *each = in.get<uint64_t>();
  cache.off = text_of(in);
  return cache;
}

}  // namespace

bool changes_the_store(Kind kind) {
  return kind == Kind::commit || kind == Kind::copy || kind == Kind::remove_many ||
         kind == Kind::snapshot || kind == Kind::drop;
}

std::string encode(const Header& header) {
  ByteWriter out;
  out.put_bytes(bytes_of(kMagic));
  out.put(kVersion);
  out.put(header.kind);
  out.put(static_cast<uint8_t>(header.apart ? 1 : 0));
  out.put(uint8_t{0});
  out.put(header.id);
  return out.take();
}

Result<Header> decode_header(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    return broken("it has no header");
  ByteReader in(bytes.subspan(kMagic.size()));
  if (const auto version = in.get<uint8_t>(); version != kVersion)
    return fail(Code::mismatch,
                "the other side speaks version {} of the protocol of `stoker serve`, this one {}: "
                "install the same Stoker for both",
                version, kVersion);
  const auto kind = in.get<uint8_t>();
  const auto flags = in.get<uint8_t>();
  const auto zero = in.get<uint8_t>();
  if (kind >= kKinds || flags > 1 || zero != 0) return broken("its header is none of version 1");
  return Header{static_cast<Kind>(kind), flags == 1, in.get<uint64_t>()};
}

std::string encode(const Request& request) {
  ByteWriter out;
  for (const uint64_t each :
       {request.transaction, request.offset, request.bytes, request.place, request.number})
    out.put(each);
  out.put_string(request.key);
  out.put_string(request.text);
  out.put_string(request.tag);
  out.put_string(request.blob);
  out.put(static_cast<uint32_t>(request.keys.size()));
  for (const std::string& key : request.keys) out.put_string(key);
  out.put(static_cast<uint32_t>(request.pieces.size()));
  for (const Range& piece : request.pieces) {
    out.put(piece.object);
    out.put(piece.offset);
    out.put(piece.bytes);
  }
  out.put(static_cast<uint32_t>(request.numbers.size()));
  for (const uint32_t number : request.numbers) out.put(number);
  return out.take();
}

Result<Request> decode_request(Kind kind, std::span<const std::byte> body) {
  if (kind == Kind::answer) return broken("an answer came where a request was expected");
  ByteReader in(body);
  Request request;
  request.kind = kind;
  for (uint64_t* each :
       {&request.transaction, &request.offset, &request.bytes, &request.place, &request.number})
    *each = in.get<uint64_t>();
  request.key = text_of(in);
  request.text = text_of(in);
  request.tag = text_of(in);
  request.blob = text_of(in);
  bool short_names = request.key.size() <= kNameMax && request.text.size() <= kNameMax &&
                     request.tag.size() <= kNameMax;
  for (size_t left = count_of(in, sizeof(uint32_t)); left > 0; --left) {
    request.keys.push_back(text_of(in));
    short_names &= request.keys.back().size() <= kNameMax;
  }
  for (size_t left = count_of(in, 3 * sizeof(uint64_t)); left > 0; --left) {
    Range piece;
    piece.object = in.get<uint64_t>();
    piece.offset = in.get<uint64_t>();
    piece.bytes = in.get<uint64_t>();
    request.pieces.push_back(piece);
  }
  for (size_t left = count_of(in, sizeof(uint32_t)); left > 0; --left)
    request.numbers.push_back(in.get<uint32_t>());
  if (!in.ok() || in.left() != 0) return broken("its fields do not fit its length");
  if (!short_names) return broken("a name has more than " + std::to_string(kNameMax) + " bytes");
  if (kind != Kind::read) return request;
  uint64_t sum = 0;
  for (const Range& piece : request.pieces) {
    if (piece.object >= request.keys.size()) return broken("a piece is of no key");
    if (piece.bytes > kReadMax || sum > kReadMax - piece.bytes)
      return broken("a read has more than 1 MiB");
    sum += piece.bytes;
  }
  if (request.pieces.empty() || request.pieces.size() > kPiecesMax)
    return broken("a read has " + std::to_string(request.pieces.size()) + " pieces");
  return request;
}

std::string encode(const Answer& answer) {
  ByteWriter out;
  const Error none;
  const Error& error = answer.error ? *answer.error : none;
  out.put(static_cast<uint8_t>(answer.error ? static_cast<uint8_t>(error.code) + 1 : 0));
  out.put(static_cast<int32_t>(error.sys_errno));
  out.put_string(error.what);
  out.put(answer.number);
  out.put_string(answer.tag);
  out.put_string(answer.blob);
  out.put(static_cast<uint32_t>(answer.objects.size()));
  for (const ObjectInfo& object : answer.objects) put(out, object);
  out.put(static_cast<uint32_t>(answer.spans.size()));
  for (const Span& span : answer.spans) {
    out.put(span.slot);
    out.put(span.offset);
    out.put(span.bytes);
  }
  return out.take();
}

Result<Answer> decode_answer(std::span<const std::byte> body) {
  ByteReader in(body);
  Answer answer;
  const auto code = in.get<uint8_t>();
  bool known = code <= kCodes;
  Error error;
  error.sys_errno = in.get<int32_t>();
  error.what = text_of(in);
  if (code != 0 && known) {
    error.code = static_cast<Code>(code - 1);
    answer.error = std::move(error);
  }
  answer.number = in.get<uint64_t>();
  answer.tag = text_of(in);
  answer.blob = text_of(in);
  constexpr size_t kObjectLeast = 4 + 8 + 4 + 8 + 1 + 4;
  for (size_t left = count_of(in, kObjectLeast); left > 0; --left)
    answer.objects.push_back(object_of(in, known));
  for (size_t left = count_of(in, 16); left > 0; --left) {
    Span span;
    span.slot = in.get<uint32_t>();
    span.offset = in.get<uint64_t>();
    span.bytes = in.get<uint32_t>();
    answer.spans.push_back(span);
  }
  if (!in.ok() || in.left() != 0) return broken("its fields do not fit its length");
  if (!known) return broken("a code or a class is none of version 1");
  return answer;
}

std::string Welcome::encode() const {
  ByteWriter out;
  out.put(features.atomic);
  for (const bool each : {features.update, features.snapshots, features.conditional,
                          features.verified, features.versions})
    out.put(static_cast<uint8_t>(each ? 1 : 0));
  out.put(heartbeat_ms);
  out.put(blocks_bytes);
  return out.take();
}

Result<Welcome> Welcome::decode(std::string_view blob) {
  ByteReader in(bytes_of(blob));
  Welcome welcome;
  const auto atomic = in.get<uint8_t>();
  welcome.features.atomic = static_cast<AtomicUnit>(atomic == 1 ? 1 : 0);
  Features& features = welcome.features;
  for (bool* each : {&features.update, &features.snapshots, &features.conditional,
                     &features.verified, &features.versions})
    *each = in.get<uint8_t>() != 0;
  welcome.heartbeat_ms = in.get<uint64_t>();
  welcome.blocks_bytes = in.get<uint64_t>();
  if (!in.ok() || in.left() != 0 || atomic > 1 || welcome.heartbeat_ms == 0 ||
      welcome.heartbeat_ms > 86'400'000)
    return broken("its welcome is none of version 1");
  return welcome;
}

std::string encode(const StoreInfo& info) {
  ByteWriter out;
  out.put_string(info.composition);
  for (const uint64_t each :
       {info.committed, info.durable, info.capacity_bytes, info.used_bytes, info.map_bytes})
    out.put(each);
  out.put_string(info.read_only);
  out.put(static_cast<uint32_t>(info.snapshots.size()));
  for (const SnapshotInfo& snapshot : info.snapshots) {
    out.put_string(snapshot.name);
    out.put(snapshot.version);
  }
  out.put(static_cast<uint32_t>(info.volumes.size()));
  for (const VolumeInfo& volume : info.volumes) {
    out.put_string(volume.path);
    out.put(volume.read_bytes);
    out.put(volume.written_bytes);
    put(out, volume.bytes_per_second);
    out.put(volume.capacity_bytes);
    out.put(volume.free_bytes);
    out.put(volume.refused_bytes);
  }
  out.put(static_cast<uint8_t>(info.cache ? 1 : 0));
  if (info.cache) put(out, *info.cache);
  return out.take();
}

Result<StoreInfo> decode_info(std::string_view blob) {
  ByteReader in(bytes_of(blob));
  StoreInfo info;
  info.composition = text_of(in);
  for (uint64_t* each :
       {&info.committed, &info.durable, &info.capacity_bytes, &info.used_bytes, &info.map_bytes})
    *each = in.get<uint64_t>();
  info.read_only = text_of(in);
  for (size_t left = count_of(in, 12); left > 0; --left) {
    SnapshotInfo snapshot;
    snapshot.name = text_of(in);
    snapshot.version = in.get<uint64_t>();
    info.snapshots.push_back(std::move(snapshot));
  }
  for (size_t left = count_of(in, 52); left > 0; --left) {
    VolumeInfo volume;
    volume.path = text_of(in);
    volume.read_bytes = in.get<uint64_t>();
    volume.written_bytes = in.get<uint64_t>();
    volume.bytes_per_second = std::bit_cast<double>(in.get<uint64_t>());
    volume.capacity_bytes = in.get<uint64_t>();
    volume.free_bytes = in.get<uint64_t>();
    volume.refused_bytes = in.get<uint64_t>();
    info.volumes.push_back(std::move(volume));
  }
  if (in.get<uint8_t>() == 1) info.cache = cache_of(in);
  if (!in.ok() || in.left() != 0) return broken("its fields do not fit its length");
  return info;
}

Request encode(const Plan& plan) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(plan.order.index()));
  out.put(static_cast<uint8_t>(plan.ahead ? 1 : 0));
  out.put(plan.position);
  const auto* shuffled = std::get_if<Plan::Shuffled>(&plan.order);
  const auto* mixed = std::get_if<Plan::Mixed>(&plan.order);
  out.put(shuffled != nullptr ? shuffled->seed : mixed != nullptr ? mixed->seed : uint64_t{0});
  const std::vector<uint64_t> items = mixed != nullptr ? mixed->items : std::vector<uint64_t>();
  const std::vector<double> weights = mixed != nullptr ? mixed->weights : std::vector<double>();
  out.put(static_cast<uint32_t>(items.size()));
  for (const uint64_t each : items) out.put(each);
  out.put(static_cast<uint32_t>(weights.size()));
  for (const double each : weights) put(out, each);
  out.put(static_cast<uint32_t>(plan.runs.size()));
  for (const PlanRun& run : plan.runs)
    for (const uint64_t each : {run.object, run.offset, run.bytes, run.items, run.stride})
      out.put(each);
  Request request{.kind = Kind::follow};
  request.key = plan.name;
  request.keys = plan.keys;
  request.blob = out.take();
  return request;
}

Result<Plan> decode_plan(Request request) {
  ByteReader in(bytes_of(request.blob));
  const auto order = in.get<uint8_t>();
  const auto ahead = in.get<uint8_t>();
  Plan plan{.name = std::move(request.key), .keys = std::move(request.keys)};
  plan.position = in.get<uint64_t>();
  const auto seed = in.get<uint64_t>();
  Plan::Mixed mixed;
  mixed.seed = seed;
  for (size_t left = count_of(in, sizeof(uint64_t)); left > 0; --left)
    mixed.items.push_back(in.get<uint64_t>());
  for (size_t left = count_of(in, sizeof(uint64_t)); left > 0; --left)
    mixed.weights.push_back(std::bit_cast<double>(in.get<uint64_t>()));
  for (size_t left = count_of(in, 5 * sizeof(uint64_t)); left > 0; --left) {
    PlanRun run;
    for (uint64_t* each : {&run.object, &run.offset, &run.bytes, &run.items, &run.stride})
      *each = in.get<uint64_t>();
    plan.runs.push_back(run);
  }
  if (!in.ok() || in.left() != 0) return broken("its plan does not fit its length");
  if (order != 2 && (!mixed.items.empty() || !mixed.weights.empty()))
    return broken("its plan has sources, and mixes none");
  if (order == 1) plan.order = Plan::Shuffled{seed};
  if (order == 2) plan.order = std::move(mixed);
  if (ahead > 1) return broken("its plan tells nothing of what is fetched ahead");
  plan.ahead = ahead == 1;
  if (order > 2) return broken("its plan has an order that is none of version 1");
  return plan;
}

}  // namespace stoker::remote
