#include "stoker/io/uring/engine.h"

#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"
#include "stoker/io/nvme/device.h"
#include "stoker/io/transfer.h"

namespace stoker {
namespace {

constexpr uint32_t kDepthMax = 4096;
// In the address of an op, with which its completion comes: its command named registered memory.
constexpr uint64_t kRegistered = 1;
constexpr size_t kCallBytes = kGiB;  // of one transfer; more is continued

// Why io_uring_setup was refused, for the log line of the fall-back.
Error refused(int sys_errno) {
  std::string why = "io_uring cannot be used here";
  if (sys_errno == ENOSYS) why = "this kernel (or the container's filter) has no io_uring";
  if (sys_errno == EPERM || sys_errno == EACCES)
    why =
        "io_uring is forbidden here (by the sysctl kernel.io_uring_disabled or a container's "
        "filter)";
  if (sys_errno == ENOMEM) why = "io_uring may not lock memory for its rings (see ulimit -l)";
  return Error{Code::unsupported, sys_errno, why};
}

bool has_operations(io_uring* ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(ring);
  if (probe == nullptr) return false;
  const std::array needed = {IORING_OP_READ,        IORING_OP_WRITE, IORING_OP_READ_FIXED,
                             IORING_OP_WRITE_FIXED, IORING_OP_FSYNC, IORING_OP_FALLOCATE};
  const bool all = std::all_of(needed.begin(), needed.end(),
                               [&](int op) { return io_uring_opcode_supported(probe, op) != 0; });
  io_uring_free_probe(probe);
  return all;
}

}  // namespace

Result<std::unique_ptr<UringEngine>> UringEngine::make(uint32_t depth) {
  if (depth == 0) return fail(Code::invalid_argument, "an engine needs a depth of at least 1");
  const int wake_fd = eventfd(0, EFD_CLOEXEC);
  if (wake_fd < 0) return fail(errno, "cannot make an eventfd");
  auto engine = std::unique_ptr<UringEngine>(new UringEngine(std::min(depth, kDepthMax), wake_fd));
  STOKER_TRY(engine->start());
  return engine;
}

Status UringEngine::start() {
  // Completions need not interrupt the thread, which comes to collect them anyway; one op that
  // cannot start must not hold up the rest of its batch. Older kernels know neither and refuse.
  // Commands of NVMe drives need larger entries.
  constexpr unsigned commands = IORING_SETUP_SQE128 | IORING_SETUP_CQE32;
  constexpr unsigned smooth = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL;
  int result = -EINVAL;
  for (const unsigned flags : {commands | smooth, smooth, 0U}) {
    io_uring_params params{};
    params.flags = flags;
    // one more for the wake-up read
    result = io_uring_queue_init_params(depth_ + 1, &ring_, &params);
    takes_commands_ = (flags & commands) != 0;
    if (result != -EINVAL) break;
  }
  if (result != 0) return refused(-result);
  ring_made_ = true;
  if (!has_operations(&ring_)) return refused(ENOSYS);
  // What the kernel hands to threads (syncs, say) must not wait behind those of a disk that hangs.
  // Older kernels know no limit.
  std::array<unsigned, 2> workers = {std::min(depth_, 64U), std::min(depth_, 64U)};
  static_cast<void>(io_uring_register_iowq_max_workers(&ring_, workers.data()));
  registry_.start();
  arm_wake();
  return {};
}

UringEngine::~UringEngine() {
  STOKER_CHECK(in_flight_ == 0);
  if (ring_made_) io_uring_queue_exit(&ring_);
  ::close(wake_fd_);
}

Result<FileInfo> UringEngine::open(const OpenFile& file) {
  FileInfo info;
  if (nvme::is_target(file.path) && takes_commands_) {
    STOKER_ASSIGN(auto device, nvme::open_device(file));
    info = files_.add(std::move(device));
  } else {
    STOKER_ASSIGN(info, files_.open(file));
  }
  if (const Status added = registry_.add_file(info.id, files_.find(info.id)->fd); !added) {
    STOKER_TRY(files_.close(info.id));
    return added.error().with("'" + file.path + "'");
  }
  return info;
}

Status UringEngine::close(FileId file) {
  if (files_.find(file) != nullptr) registry_.remove_file(file);
  return files_.close(file);
}

Status UringEngine::adopt(const Arena& arena) {
  registry_.add(arena);
  return {};
}

Status UringEngine::unadopt(const Arena& arena) {
  registry_.remove(arena);
  return {};
}

size_t UringEngine::submit(std::span<Op* const> ops) {
  const size_t taken = std::min<size_t>(ops.size(), depth_ - in_flight_);
  for (Op* op : ops.first(taken)) {
    const FileTable::File* file = files_.find(op->file);
    if (startable(*op, file) &&
        (!file->space || nvme::in_file(*op, file->info.bytes, file->path))) {
      prepare(*op);
    } else {
      failed_.push(*op);
    }
  }
  in_flight_ += static_cast<uint32_t>(taken);
  return taken;
}

// A free place in the submission ring. There always is one: it has room for all that may be in
// flight.
io_uring_sqe* UringEngine::slot() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  STOKER_CHECK(sqe != nullptr);
  return sqe;
}

// Puts what is left of the op into the ring.
void UringEngine::prepare(Op& op) {
  io_uring_sqe* sqe = slot();
  if (const FileTable::File* target = files_.find(op.file); target->space)
    return prepare_command(*sqe, op, *target);
  const bool numbered = registry_.has_file(op.file);
  const int file = numbered ? op.file : files_.find(op.file)->fd;
  const uint64_t at = op.offset + op.moved;
  const Slice rest =
      op.kind == Op::Kind::sync ? Slice{} : op.bytes.sub(op.moved, op.bytes.size - op.moved);
  const auto bytes = static_cast<unsigned>(std::min(rest.size, kCallBytes));
  const int memory = op.kind == Op::Kind::read || op.kind == Op::Kind::write
                         ? registry_.find({rest.data, bytes, rest.arena})
                         : -1;
  switch (op.kind) {
    case Op::Kind::read:
      if (memory >= 0)
        io_uring_prep_read_fixed(sqe, file, rest.data, bytes, at, memory);
      else
        io_uring_prep_read(sqe, file, rest.data, bytes, at);
      break;
    case Op::Kind::write:
      if (memory >= 0)
        io_uring_prep_write_fixed(sqe, file, rest.data, bytes, at, memory);
      else
        io_uring_prep_write(sqe, file, rest.data, bytes, at);
      break;
    case Op::Kind::sync:
      io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
      break;
    case Op::Kind::trim:
      io_uring_prep_fallocate(sqe, file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                              static_cast<off_t>(at), static_cast<off_t>(rest.size));
      break;
  }
  if (numbered) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(sqe, &op);
}

// The same as one command of the drive. Its answer is a status; settle() reads it.
void UringEngine::prepare_command(io_uring_sqe& sqe, const Op& op, const FileTable::File& file) {
  const nvme::Command command = nvme::command_of(op, *file.space, file.base);
  std::memset(&sqe, 0, 2 * sizeof sqe);
  nvme_uring_cmd raw{};
  raw.opcode = command.opcode;
  raw.nsid = command.space;
  raw.addr = reinterpret_cast<uintptr_t>(command.data);
  raw.data_len = command.bytes;
  raw.cdw10 = command.word10;
  raw.cdw11 = command.word11;
  raw.cdw12 = command.word12;
  std::memcpy(sqe.cmd, &raw, sizeof raw);
  const bool numbered = registry_.has_file(op.file);
  sqe.opcode = IORING_OP_URING_CMD;
  sqe.cmd_op = NVME_URING_CMD_IO;
  sqe.fd = numbered ? op.file : file.fd;
  sqe.flags = numbered ? IOSQE_FIXED_FILE : 0;
  sqe.user_data = reinterpret_cast<uintptr_t>(&op);
  const int memory =
      command.bytes == 0 ? -1 : registry_.find({command.data, command.bytes, op.bytes.arena});
  if (memory < 0 || !commands_registered_) return;
  sqe.user_data |= kRegistered;
  sqe.uring_cmd_flags = IORING_URING_CMD_FIXED;
  sqe.buf_index = static_cast<uint16_t>(memory);
}

// Books what the kernel or the drive answered. False: more of the op is left, prepare() it again.
bool UringEngine::settle(Op& op, int outcome, bool registered) {
  const FileTable::File& file = *files_.find(op.file);
  if (registered && outcome == -EINVAL) {
    // Kernels such as 6.1 count the pages of all the registered memory behind the transfer's.
    if (commands_registered_)
      log().info("the kernel takes no NVMe commands on registered memory: it pins pages at each");
    commands_registered_ = false;
    counters_.retries.add(1);
    return false;
  }
  return file.space ? nvme::settle(op, outcome, *file.space, file.path, counters_)
                    : advance(op, outcome, file.path, counters_);
}

void UringEngine::arm_wake() {
  io_uring_sqe* sqe = slot();
  io_uring_prep_read(sqe, wake_fd_, &wake_count_, sizeof wake_count_, 0);
  io_uring_sqe_set_data(sqe, nullptr);
}

size_t UringEngine::poll(uint64_t wait_ns) {
  size_t completed = complete_failed();
  enter(completed > 0 ? 0 : wait_ns);
  completed += reap();
  return completed;
}

size_t UringEngine::complete_failed() {
  OpList failed = std::exchange(failed_, {});
  size_t completed = 0;
  while (Op* op = failed.pop()) {
    --in_flight_;
    ++completed;
    op->done(*op);
  }
  return completed;
}

// Hands the filled places to the kernel and waits for the first completion. Whatever the kernel
// could not take now (interrupted, short of memory) stays in the ring for the next call.
void UringEngine::enter(uint64_t wait_ns) {
  const bool filled = io_uring_sq_ready(&ring_) > 0;
  system_calls_.add(1);
  int result = 0;
  if (wait_ns == 0) {
    result = io_uring_submit_and_get_events(&ring_);
  } else if (wait_ns == UINT64_MAX) {
    result = io_uring_submit_and_wait(&ring_, 1);
  } else {
    __kernel_timespec time{static_cast<int64_t>(wait_ns / 1'000'000'000),
                           static_cast<long long>(wait_ns % 1'000'000'000)};
    io_uring_cqe* first = nullptr;
    result = io_uring_submit_and_wait_timeout(&ring_, &first, 1, &time, nullptr);
  }
  if (filled && result > 0) counters_.submissions.add(1);
  STOKER_CHECK(result >= 0 || result == -ETIME || result == -EINTR || result == -EAGAIN ||
               result == -EBUSY || result == -ENOMEM);
}

size_t UringEngine::reap() {
  size_t completed = 0;
  // At most as many as were in flight: done() may submit again.
  for (uint32_t left = depth_ + 1; left > 0; --left) {
    io_uring_cqe* cqe = nullptr;
    if (io_uring_peek_cqe(&ring_, &cqe) != 0) break;
    const bool registered = (cqe->user_data & kRegistered) != 0;
    Op* op = reinterpret_cast<Op*>(static_cast<std::byte*>(io_uring_cqe_get_data(cqe)) -
                                   (registered ? kRegistered : 0));
    const int outcome = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    if (op == nullptr) {
      arm_wake();
    } else if (settle(*op, outcome, registered)) {
      --in_flight_;
      ++completed;
      op->done(*op);
    } else {
      prepare(*op);
    }
  }
  return completed;
}

void UringEngine::wake() {
  const uint64_t one = 1;
  // Can only fail when the count is about to overflow, and then the engine is awake already.
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof one);
}

}  // namespace stoker
