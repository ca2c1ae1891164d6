// Sizes, alignment and little-endian fields of on-disk formats.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "stoker/base/result.h"

namespace stoker {

static_assert(std::endian::native == std::endian::little,
              "on-disk formats are little-endian and read in place");

inline constexpr size_t kKiB = size_t{1} << 10;
inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kGiB = size_t{1} << 30;
inline constexpr size_t kIoAlign = 4096;  // every device I/O starts and ends on this

constexpr uint64_t align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }
constexpr uint64_t align_down(uint64_t value, uint64_t to) { return value / to * to; }
constexpr bool is_aligned(uint64_t value, uint64_t to) { return value % to == 0; }

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// Appends fields to a byte string, little-endian.
class ByteWriter {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
    const auto* bytes = reinterpret_cast<const char*>(&value);
    out_.append(bytes, sizeof(T));
  }
  // length (u32), then the bytes
  void put_string(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    out_.append(text);
  }
  void put_bytes(std::span<const std::byte> bytes) {
    out_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  std::string take() { return std::move(out_); }
  const std::string& bytes() const { return out_; }
  size_t size() const { return out_.size(); }

 private:
  std::string out_;
};

// Reads fields back; every read is bounds-checked. Once a read failed all later ones fail: check
// ok() once at the end.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value{};
    if (!take(sizeof(T))) return value;
    std::memcpy(&value, bytes_.data() + at_ - sizeof(T), sizeof(T));
    return value;
  }
  std::string_view get_string() {
    const auto size = get<uint32_t>();
    if (!take(size)) return {};
    return {reinterpret_cast<const char*>(bytes_.data()) + at_ - size, size};
  }
  std::span<const std::byte> get_bytes(size_t size) {
    if (!take(size)) return {};
    return bytes_.subspan(at_ - size, size);
  }
  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size() - at_; }

 private:
  bool take(size_t size) {
    if (!ok_ || size > bytes_.size() - at_) {
      ok_ = false;
      return false;
    }
    at_ += size;
    return true;
  }
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

// "1.5 GiB" style, for people.
std::string human_bytes(uint64_t bytes);
// "20GiB", "160 MiB", "7GB", "4096" -> bytes.
Result<uint64_t> parse_bytes(std::string_view text);

}  // namespace stoker
