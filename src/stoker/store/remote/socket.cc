#include "stoker/store/remote/socket.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <utility>

namespace stoker::remote {
namespace {

constexpr int kSized = F_SEAL_SHRINK | F_SEAL_GROW;

// A range of addresses at a multiple of kHugePage, which nothing uses yet. Null: there is none.
std::byte* aligned_range(uint64_t bytes) {
  const uint64_t more = bytes + kHugePage;
  void* const range =
      mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(range);
  const auto address = reinterpret_cast<uintptr_t>(range);
  const uint64_t before = align_up(address, kHugePage) - address;
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + bytes, kHugePage - before);
  return begin + before;
}

}  // namespace

Result<Outgoing> outgoing(const Header& header, std::string body, Fd fd) {
  if (body.size() <= kMessageMax - kHeaderBytes)
    return Outgoing{encode(header) + body, std::move(fd)};
  STOKER_CHECK(!fd);
  if (body.size() > (header.kind == Kind::answer ? kAnswerMax : kRequestMax))
    return fail(Code::unsupported,
                "a message of {} is too long for `stoker serve`; ask for less at once",
                human_bytes(body.size()));
  STOKER_ASSIGN(Fd memory, make_memory("stoker message", body.size()));
  STOKER_TRY(write_memory(memory.get(), 0, std::as_bytes(std::span(body))));
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0)
    return fail(errno, "cannot seal the memory of a message");
  Header apart = header;
  apart.apart = true;
  return Outgoing{encode(apart), std::move(memory)};
}

Sent send(int socket, const Outgoing& message, bool wait) {
  iovec bytes{const_cast<char*>(message.bytes.data()), message.bytes.size()};
  msghdr packet{};
  packet.msg_iov = &bytes;
  packet.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (message.fd) {
    packet.msg_control = control;
    packet.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&packet);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = message.fd.get();
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  for (;;) {
    const ssize_t sent = sendmsg(socket, &packet, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
    if (sent >= 0) return Sent::all;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ETOOMANYREFS ? Sent::later : Sent::closed;
  }
}

Result<std::optional<Packet>> receive(int socket, size_t body_max, bool wait) {
  char bytes[kMessageMax];
  iovec into{bytes, sizeof bytes};
  msghdr packet{};
  packet.msg_iov = &into;
  packet.msg_iovlen = 1;
  // Room for one more than is allowed, so that it is seen. The kernel closes what has no room.
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  packet.msg_control = control;
  packet.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = recvmsg(socket, &packet, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  } while (got < 0 && errno == EINTR);
  if (got < 0) return fail(errno, "cannot receive a message from the other process");
  std::vector<Fd> fds;
  for (cmsghdr* each = CMSG_FIRSTHDR(&packet); each != nullptr; each = CMSG_NXTHDR(&packet, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at < (each->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++at) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(each) + at * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
  if (got == 0) return std::optional<Packet>();
  if ((packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || fds.size() > 1)
    return fail(Code::corruption,
                "a message breaks the protocol: it is too long; restart `stoker serve`, and use "
                "one version of Stoker on both sides");
  const std::string_view message(bytes, static_cast<size_t>(got));
  Packet out;
  STOKER_ASSIGN(out.header, decode_header(std::as_bytes(std::span(message))));
  if (out.header.apart) {
    if (fds.empty() || message.size() != kHeaderBytes)
      return fail(Code::corruption,
                  "a message breaks the protocol: its body is missing; restart `stoker serve`, and "
                  "use one version of Stoker on both sides");
    STOKER_ASSIGN(const uint64_t size, check_memory(fds[0].get(), body_max));
    if ((fcntl(fds[0].get(), F_GET_SEALS) & F_SEAL_WRITE) == 0)
      return fail(Code::corruption,
                  "a message breaks the protocol: its memory is not sealed; restart `stoker "
                  "serve`, and use one version of Stoker on both sides");
    out.body.resize(size);
    STOKER_TRY(read_memory(fds[0].get(), 0, std::as_writable_bytes(std::span(out.body))));
  } else {
    out.body = message.substr(kHeaderBytes);
    if (!fds.empty()) out.fd = std::move(fds[0]);
  }
  return std::optional<Packet>(std::move(out));
}

Result<Fd> connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    return fail(Code::invalid_argument, "the path of a socket has at most {} bytes; '{}' is longer",
                sizeof address.sun_path - 1, path);
  std::memcpy(address.sun_path, path.data(), path.size());
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) return fail(errno, "cannot make a socket");
  while (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) continue;
    const Error error = fail(errno, "cannot connect to '{}': start `stoker serve` there", path);
    if (errno != ENOENT && errno != ECONNREFUSED) return error;
    return Error{Code::unavailable, error.sys_errno, error.what};
  }
  return socket;
}

Result<Fd> make_memory(const char* name, uint64_t bytes) {
  Fd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, kSized) != 0)
    return fail(errno, "cannot make shared memory of {}", human_bytes(bytes));
  return fd;
}

Result<uint64_t> check_memory(int fd, uint64_t most) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat found {};
  if (seals < 0 || (seals & kSized) != kSized || fstat(fd, &found) != 0 || found.st_size < 0 ||
      static_cast<uint64_t>(found.st_size) > most)
    return fail(Code::corruption,
                "a message breaks the protocol: its descriptor is not sealed memory of a size that "
                "is allowed");
  return static_cast<uint64_t>(found.st_size);
}

Status read_memory(int fd, uint64_t offset, std::span<std::byte> into) {
  for (size_t done = 0; done < into.size();) {
    const ssize_t got =
        pread(fd, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return fail(got < 0 ? errno : EIO, "cannot read memory that the other process shares");
    done += static_cast<size_t>(got);
  }
  return {};
}

Status write_memory(int fd, uint64_t offset, std::span<const std::byte> from) {
  for (size_t done = 0; done < from.size();) {
    const ssize_t put =
        pwrite(fd, from.data() + done, from.size() - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0)
      return fail(put < 0 ? errno : EIO, "cannot write memory that the other process shares");
    done += static_cast<size_t>(put);
  }
  return {};
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Result<Mapping> Mapping::make(int fd, uint64_t offset, uint64_t bytes, How how) {
  const int rights = how == How::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  const int flags = how == How::own ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
  Mapping made;
  made.bytes_ = bytes;
  if (bytes == 0) return made;
  // Huge pages are mapped as such at multiples of their size alone.
  std::byte* const range = bytes % kHugePage == 0 ? aligned_range(bytes) : nullptr;
  void* at = mmap(range, bytes, rights, flags | (range != nullptr ? MAP_FIXED : 0), fd,
                  static_cast<off_t>(offset));
  if (at == MAP_FAILED) {
    const Error error = fail(errno, "cannot map {} of shared memory", human_bytes(bytes));
    if (range != nullptr) munmap(range, bytes);
    return error;
  }
  made.data_ = static_cast<std::byte*>(at);
  return made;
}

}  // namespace stoker::remote
