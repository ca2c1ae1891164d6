#include "curm/value.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::curm {

Value Value::of(std::vector<std::byte> bytes) {
  const uint64_t size = bytes.size();
  return {std::make_shared<const std::vector<std::byte>>(std::move(bytes)), 0, size};
}

std::span<const std::byte> Value::bytes() const {
  STOKER_CHECK(has_bytes() || size_ == 0);
  return has_bytes() ? std::span(*bytes_).subspan(begin_, size_) : std::span<const std::byte>();
}

Value Value::slice(uint64_t at, uint64_t bytes) const {
  STOKER_CHECK(at + bytes <= size_);
  return {bytes_, begin_ + at, bytes};
}

Value difference(const Value& a, const Value& b) {
  STOKER_CHECK(a.size() == b.size());
  if (!a.has_bytes() || !b.has_bytes()) return Value::sized(a.size());
  std::vector<std::byte> out(a.bytes().begin(), a.bytes().end());
  for (size_t i = 0; i < out.size(); ++i) out[i] ^= b.bytes()[i];
  return Value::of(std::move(out));
}

Value overlaid(const Value& base, uint64_t at, const Value& piece) {
  STOKER_CHECK(at + piece.size() <= base.size());
  if (!base.has_bytes() || !piece.has_bytes()) return Value::sized(base.size());
  std::vector<std::byte> out(base.bytes().begin(), base.bytes().end());
  std::copy(piece.bytes().begin(), piece.bytes().end(), out.begin() + static_cast<ptrdiff_t>(at));
  return Value::of(std::move(out));
}

Value advanced(const codec::ErasureCode& code, int data_chunk, int parity_index,
               const Value& parity, uint64_t at, const Value& delta, uint64_t delta_at) {
  const uint64_t begin = std::max(at, delta_at),
                 end = std::min(at + parity.size(), delta_at + delta.size());
  if (begin >= end || !parity.has_bytes() || !delta.has_bytes()) return parity;
  std::vector<std::byte> out(parity.bytes().begin(), parity.bytes().end());
  std::vector<codec::Target> targets(static_cast<size_t>(code.m()));
  targets[static_cast<size_t>(parity_index)].bytes =
      std::span(out).subspan(begin - at, end - begin);
  const Status done = code.delta(
      data_chunk, {}, {delta.bytes().subspan(begin - delta_at, end - begin), {}}, targets);
  // the ranges are ours: only a bug could make the codec refuse them
  STOKER_CHECK(done.has_value());
  return Value::of(std::move(out));
}

Value decoded(const codec::ErasureCode& code, const std::vector<Value>& present, int wanted) {
  const auto some = std::find_if(present.begin(), present.end(),
                                 [](const Value& value) { return value.size() != 0; });
  STOKER_CHECK(some != present.end());
  if (!some->has_bytes()) return Value::sized(some->size());
  std::vector<std::byte> out(some->size());
  std::vector<codec::Source> sources;
  sources.reserve(present.size());
  for (const Value& value : present) sources.push_back({value.bytes(), {}});
  std::vector<codec::Target> targets(present.size());
  targets[static_cast<size_t>(wanted)].bytes = out;
  const Status done = code.decode(sources, targets);
  STOKER_CHECK(done.has_value());
  return Value::of(std::move(out));
}

}  // namespace stoker::curm
