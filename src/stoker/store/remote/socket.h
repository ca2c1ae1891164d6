// Packets and descriptors between two processes of one machine, and the memory that they share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/fd.h"
#include "stoker/store/remote/protocol.h"

namespace stoker::remote {

// A message as it came: header and body, with at most one descriptor.
struct Packet {
  Header header;
  std::string body;
  Fd fd;
};

enum class Sent : uint8_t { all, later, closed };

// A message, made to be sent any number of times.
struct Outgoing {
  std::string bytes;
  Fd fd;
};
// Long bodies become a sealed memfd; `fd` goes with a short one.
Result<Outgoing> outgoing(const Header& header, std::string body, Fd fd = {});
// later: there is no room now, only without `wait`.
Sent send(int socket, const Outgoing& message, bool wait);
// Nothing: the other side closed it. A body has at most so many bytes. Without `wait` there may be
// none yet: EAGAIN.
Result<std::optional<Packet>> receive(int socket, size_t body_max, bool wait = true);

inline constexpr uint64_t kHugePage = 2 * kMiB;

// unavailable: nobody listens there.
Result<Fd> connect_to(const std::string& path);

// A memfd of so many bytes of zeros that cannot change its size.
Result<Fd> make_memory(const char* name, uint64_t bytes);
// Whether it is memory that cannot change its size, and how much: never more than `most`.
Result<uint64_t> check_memory(int fd, uint64_t most);
Status read_memory(int fd, uint64_t offset, std::span<std::byte> into);
Status write_memory(int fd, uint64_t offset, std::span<const std::byte> from);

// Shared memory in this process; move-only.
class Mapping {
 public:
  enum class How : uint8_t { shared, read_only, own };  // own: what is written stays here
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  static Result<Mapping> make(int fd, uint64_t offset, uint64_t bytes, How how);
  std::byte* data() const { return data_; }
  uint64_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace stoker::remote
