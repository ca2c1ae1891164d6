#include "stoker/io/nvme/command.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "stoker/base/bytes.h"
#include "stoker/io/transfer.h"

namespace stoker::nvme {
namespace {

constexpr std::string_view kPrefix = "nvme:";
constexpr uint8_t kFlush = 0x00, kWrite = 0x01, kRead = 0x02, kWriteZeroes = 0x08, kIdentify = 0x06;
constexpr uint64_t kBlocksMax = 1 << 16;      // of one command
constexpr uint32_t kDeallocate = 1U << 25;    // of write zeroes: the blocks may be given back
constexpr uint64_t kTransferMax = 16 * kMiB;  // where the drive names no bound

template <typename Word>
Word word_at(std::span<const std::byte> bytes, size_t at) {
  Word word{};
  std::memcpy(&word, bytes.data() + at, sizeof word);  // as x86 and NVMe have it: little-endian
  return word;
}

// Fields of text are filled up with blanks.
std::string text_at(std::span<const std::byte> bytes, size_t at, size_t size) {
  std::string text(reinterpret_cast<const char*>(bytes.data()) + at, size);
  text.erase(text.find_last_not_of(std::string(" \0", 2)) + 1);
  return text;
}

Error bad_target(std::string_view path, const std::string& why) {
  return fail(Code::invalid_argument,
              "'{}' names no NVMe namespace: {}; write for example nvme:/dev/ng0n1, or "
              "nvme:/dev/ng0n1@1GiB+64MiB for 64 MiB from 1 GiB on",
              path, why);
}

struct Known {
  uint16_t status;  // type << 8 | code
  int sys_errno;
  const char* sentence;
};

constexpr std::array kKnown = {
    Known{0x001, EOPNOTSUPP, "the drive does not know this command"},
    Known{0x002, EINVAL, "the drive finds a field of the command invalid"},
    Known{0x004, EIO, "the data did not get through to the drive (transfer error)"},
    Known{0x005, EIO, "the drive lost power and gave the command up"},
    Known{0x006, EIO, "the drive has an internal error"},
    Known{0x007, ECANCELED, "the command was aborted, as was asked"},
    Known{0x008, ECANCELED, "the command was aborted, as its queue was deleted"},
    Known{0x00B, ENODEV, "the drive has no such namespace (any more)"},
    Known{0x020, EROFS, "the namespace is write-protected"},
    Known{0x021, EAGAIN, "the drive interrupted the command; it may be repeated"},
    Known{0x080, EIO, "the blocks lie beyond the end of the namespace"},
    Known{0x081, ENOSPC,
          "the drive's capacity is exceeded: it has no room for the blocks of its namespaces"},
    Known{0x082, EAGAIN, "the namespace is not ready; it may be repeated"},
    Known{0x083, EBUSY, "somebody has reserved the namespace"},
    Known{0x180, EIO, "the blocks conflict with an attribute of the namespace"},
    Known{0x182, EROFS, "the blocks may only be read"},
    Known{0x280, EIO, "media error: the drive could not write the blocks"},
    Known{0x281, EIO, "media error: the drive cannot read the blocks any more"},
    Known{0x282, EIO, "media error: a guard checksum of the blocks differs"},
    Known{0x286, EACCES, "the drive denies access to the blocks"},
    Known{0x287, EIO, "the blocks are deallocated or were never written"},
    Known{0x370, EIO, "the path to the drive failed inside the host"},
    Known{0x371, ECANCELED, "the host gave the command up (a reset, or a removal)"},
};

}  // namespace

Command identify(uint8_t what, uint32_t space, std::span<std::byte, kIdentifyBytes> answer) {
  return {.opcode = kIdentify,
          .space = space,
          .data = answer.data(),
          .bytes = static_cast<uint32_t>(answer.size()),
          .word10 = what};
}

Controller read_controller(std::span<const std::byte, kIdentifyBytes> answer) {
  Controller controller;
  controller.serial = text_at(answer, 4, 20);
  controller.model = text_at(answer, 24, 40);
  controller.firmware = text_at(answer, 64, 8);
  const auto limit = word_at<uint8_t>(answer, 77);
  controller.transfer_bytes = limit == 0 ? 0 : uint64_t{4096} << std::min<unsigned>(limit, 20);
  controller.shadows = (word_at<uint16_t>(answer, 256) >> 8 & 1) != 0;
  return controller;
}

Result<Space> read_space(std::span<const std::byte, kIdentifyBytes> answer, uint32_t number,
                         const Controller& controller) {
  Space space;
  space.number = number;
  space.blocks = word_at<uint64_t>(answer, 0);
  const auto used = word_at<uint8_t>(answer, 26);
  const size_t format = (used & 0xFU) | ((used >> 1) & 0x30U);
  const auto metadata = word_at<uint16_t>(answer, 128 + 4 * format);
  const auto shift = word_at<uint8_t>(answer, 128 + 4 * format + 2);
  if (space.blocks == 0)
    return fail(
        Code::not_found,
        "the drive has no active namespace of this number; `stoker nvme list` shows those it has");
  if (metadata != 0)
    return fail(Code::unsupported,
                "its blocks carry {} bytes of metadata each; format it without (nvme format "
                "--ms=0; that deletes what it holds)",
                metadata);
  if (shift < 9 || shift > 12)
    return fail(Code::unsupported,
                "it has blocks of 2^{} bytes; format it with blocks of 512 to 4096 bytes (nvme "
                "format; that deletes what it holds)",
                shift);
  space.block_bytes = 1U << shift;
  const uint64_t transfer =
      controller.transfer_bytes == 0 ? kTransferMax : controller.transfer_bytes;
  space.transfer_bytes = std::min({transfer, kTransferMax, kBlocksMax * space.block_bytes});
  return space;
}

uint64_t bytes_of_next(const Op& op, const Space& space) {
  if (op.kind == Op::Kind::sync) return 0;
  const uint64_t most =
      op.kind == Op::Kind::trim ? kBlocksMax * space.block_bytes : space.transfer_bytes;
  return std::min<uint64_t>(op.bytes.size - op.moved, most);
}

Command command_of(const Op& op, const Space& space, uint64_t base) {
  Command command;
  command.space = space.number;
  if (op.kind == Op::Kind::sync) {
    command.opcode = kFlush;
    return command;
  }
  const uint64_t bytes = bytes_of_next(op, space);
  const uint64_t first = (base + op.offset + op.moved) / space.block_bytes;
  command.word10 = static_cast<uint32_t>(first);
  command.word11 = static_cast<uint32_t>(first >> 32);
  command.word12 = static_cast<uint32_t>(bytes / space.block_bytes - 1);
  if (op.kind == Op::Kind::trim) {
    command.opcode = kWriteZeroes;
    command.word12 |= kDeallocate;
    return command;
  }
  command.opcode = op.kind == Op::Kind::read ? kRead : kWrite;
  command.data = op.bytes.data + op.moved;
  command.bytes = static_cast<uint32_t>(bytes);
  return command;
}

Failure failure_of(uint16_t status) {
  const auto kind = static_cast<uint16_t>(status & 0x7FF);
  const auto known = std::find_if(kKnown.begin(), kKnown.end(),
                                  [kind](const Known& each) { return each.status == kind; });
  if (known != kKnown.end()) return {known->sys_errno, known->sentence};
  constexpr std::array types = {"generic", "command specific", "media", "path"};
  const size_t type = kind >> 8;
  return {EIO, "the drive answered with the " +
                   (type < types.size() ? std::string(types[type]) : "vendor's") + " status " +
                   std::to_string(kind & 0xFF)};
}

bool in_file(Op& op, uint64_t bytes, const std::string& path) {
  if (op.kind == Op::Kind::sync || op.offset + op.bytes.size <= bytes) return true;
  fail(op, EIO, path, "it lies beyond the end of the namespace, or of its range");
  return false;
}

bool settle(Op& op, int outcome, const Space& space, const std::string& path,
            IoCounters& counters) {
  if (outcome < 0) return advance(op, outcome, path, counters);
  if (outcome > 0) {
    const Failure failure = failure_of(static_cast<uint16_t>(outcome));
    fail(op, failure.sys_errno, path, failure.sentence);
    return true;
  }
  const uint64_t bytes = bytes_of_next(op, space);
  if (op.moved + bytes == op.bytes.size)
    return advance(op, static_cast<int64_t>(bytes), path, counters);
  op.moved += bytes;
  return false;
}

bool is_target(std::string_view path) { return path.starts_with(kPrefix); }

bool is_pci_target(std::string_view path) { return is_target(path) && !path.starts_with("nvme:/"); }

bool is_spdk_target(std::string_view path) { return path.starts_with("nvme:spdk:"); }

Result<Target> parse_target(std::string_view path) {
  std::string_view text = path;
  if (is_target(text)) text.remove_prefix(kPrefix.size());
  const size_t at = text.find('@');
  Target target;
  target.device = text.substr(0, at);
  if (target.device.empty()) return bad_target(path, "the device is missing");
  if (at == std::string_view::npos) return target;
  const std::string_view range = text.substr(at + 1);
  const size_t plus = range.find('+');
  if (plus == std::string_view::npos) return bad_target(path, "a range is START+BYTES");
  const auto offset = parse_bytes(range.substr(0, plus));
  const auto bytes = parse_bytes(range.substr(plus + 1));
  if (!offset || !bytes || *bytes == 0 || !is_aligned(*offset, 4096) || !is_aligned(*bytes, 4096) ||
      *offset + *bytes < *offset)
    return bad_target(path, "start and size of a range are multiples of 4096 bytes");
  target.offset = *offset;
  target.bytes = *bytes;
  return target;
}

}  // namespace stoker::nvme
