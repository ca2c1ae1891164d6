#include "stoker/io/transfer.h"

#include <cerrno>

#include "stoker/base/bytes.h"

namespace stoker {
namespace {

// The smallest logical block: a short transfer is continued from a multiple of it, re-reading what
// lies behind.
constexpr size_t kSector = 512;

const char* verb(Op::Kind kind) {
  switch (kind) {
    case Op::Kind::read:
      return "read";
    case Op::Kind::write:
      return "write";
    case Op::Kind::sync:
      return "sync";
    case Op::Kind::trim:
      return "trim";
  }
  return "op";
}

std::string place(const Op& op, const std::string& path) {
  if (op.kind == Op::Kind::sync) return "flush of '" + path + "'";
  return std::string(verb(op.kind)) + " of " + std::to_string(op.bytes.size) + " bytes at " +
         std::to_string(op.offset) + " of '" + path + "'";
}

Error refusal(const Op& op, const std::string& path, const char* why) {
  return fail(Code::invalid_argument, "{}: {}", place(op, path), why);
}

// A call that moved nothing: the end of the file for a read, a device that takes no more for a
// write.
void end_of_file(Op& op, const std::string& path) {
  const char* why = op.kind == Op::Kind::read
                        ? ": the file ends before that; it was cut short or is the wrong one"
                        : ": the device takes no more bytes there";
  op.result = fail(Code::io, "{}{}", place(op, path), why);
}

void succeed(Op& op, IoCounters& counters) {
  op.result = op.bytes.size;
  switch (op.kind) {
    case Op::Kind::read:
      counters.reads.add(1);
      counters.read_bytes.add(op.bytes.size);
      break;
    case Op::Kind::write:
      counters.writes.add(1);
      counters.written_bytes.add(op.bytes.size);
      break;
    case Op::Kind::sync:
      counters.syncs.add(1);
      break;
    case Op::Kind::trim:
      break;
  }
}

}  // namespace

Status check_op(Op& op, uint32_t align, const std::string& path) {
  op.moved = 0;
  if (op.kind == Op::Kind::sync) {
    return op.bytes.size == 0 ? Status{} : refusal(op, path, "a sync carries no bytes");
  }
  if (op.bytes.size == 0) return refusal(op, path, "nothing to move");
  if (!is_aligned(op.offset, align) || !is_aligned(op.bytes.size, align))
    return refusal(op, path, "offset and size must be multiples of the alignment");
  if (op.offset + op.bytes.size < op.offset || op.offset + op.bytes.size > uint64_t{INT64_MAX})
    return refusal(op, path, "the range is beyond any file");
  if (op.kind == Op::Kind::trim) return {};
  if (op.bytes.data == nullptr || !is_aligned(reinterpret_cast<uintptr_t>(op.bytes.data), align)) {
    return refusal(op, path, "the memory must be aligned (the Loop does that)");
  }
  return {};
}

bool advance(Op& op, int64_t outcome, const std::string& path, IoCounters& counters) {
  if (outcome == -EINTR || outcome == -EAGAIN) {
    counters.retries.add(1);
    return false;
  }
  if (outcome < 0) {
    fail(op, static_cast<int>(-outcome), path, {});
    return true;
  }
  if (op.kind == Op::Kind::sync || op.kind == Op::Kind::trim) {
    succeed(op, counters);
    return true;
  }
  op.moved += static_cast<size_t>(outcome);
  STOKER_CHECK(op.moved <= op.bytes.size);
  if (op.moved == op.bytes.size) {
    succeed(op, counters);
    return true;
  }
  // Less than a sector of progress is none: a read met the (unaligned) end of the file.
  if (static_cast<size_t>(outcome) < kSector) {
    end_of_file(op, path);
    return true;
  }
  op.moved = align_down(op.moved, kSector);
  counters.short_transfers.add(1);
  return false;
}

void fail(Op& op, int sys_errno, const std::string& path, const std::string& what) {
  op.result = fail(sys_errno, "{} failed{}{}", place(op, path), what.empty() ? "" : ": ", what);
}

}  // namespace stoker
