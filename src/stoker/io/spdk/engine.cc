#include "stoker/io/spdk/engine.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <deque>
#include <set>
#include <thread>
#include <utility>

#include "spdk/env.h"
#include "spdk/nvme.h"
#include "stoker/base/log.h"
#include "stoker/base/mutex.h"
#include "stoker/io/file_table.h"
#include "stoker/io/nvme/command.h"
#include "stoker/io/nvme/device.h"
#include "stoker/io/op_list.h"
#include "stoker/io/spdk/env.h"
#include "stoker/io/transfer.h"

namespace stoker {
namespace {

constexpr uint32_t kDepthMax = 1023;
constexpr size_t kDrivesMax = 16;
constexpr size_t kPage = 4096;

struct Place {
  std::string address;
  uint32_t space = 1;
};

// Of "nvme:spdk:0000:00:04.0/2".
Result<Place> parse_place(const std::string& path) {
  STOKER_ASSIGN(const nvme::Target target, nvme::parse_target(path));
  const std::string device = target.device.substr(std::string_view("spdk:").size());
  Place place;
  const size_t slash = device.find('/');
  place.address = device.substr(0, slash);
  const char* end = device.data() + device.size();
  if (slash != std::string::npos &&
      (std::from_chars(device.data() + slash + 1, end, place.space).ptr != end || place.space == 0))
    return fail(Code::invalid_argument,
                "'{}' has no valid namespace number; write it after the address, for example "
                "nvme:spdk:{}/2",
                path, place.address);
  return place;
}

class Driven final : public Engine {
 public:
  Driven(uint32_t depth, std::shared_ptr<SpdkCounters> counters)
      : depth_(depth), env_(spdk::Env::of_process()), counted_(std::move(counters)) {
    flights_.resize(depth);
    for (Flight& flight : flights_) free_.push_back(&flight);
  }

  ~Driven() override {
    STOKER_CHECK(in_flight_ == 0);
    for (size_t i = 0; i < drives(); ++i) {
      Drive& drive = *drives_[i];
      if (drive.queue != nullptr) spdk_nvme_ctrlr_free_io_qpair(drive.queue);
      env_.detach(drive.address);
    }
    for (const int32_t arena : adopted_) env_.unadopt(arena);
  }

  EngineTraits traits() const override { return {"spdk", depth_, true}; }

  Result<FileInfo> open(const OpenFile& request) override {
    if (!nvme::is_spdk_target(request.path))
      return fail(Code::unsupported,
                  "cannot open '{}': SPDK drives what is named like nvme:spdk:0000:00:04.0",
                  request.path);
    STOKER_ASSIGN(const Place place, parse_place(request.path));
    STOKER_ASSIGN(const nvme::Target target, nvme::parse_target(request.path));
    STOKER_TRY(env_.start({place.address}));
    STOKER_ASSIGN(Drive * drive, drive_at(place.address));
    STOKER_ASSIGN(const nvme::Space space, space_of(*drive, place, request.path));
    FileTable::File file;
    STOKER_TRY(nvme::fill_in(file, request, target, space));
    file.fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // a descriptor marks an open file
    if (file.fd < 0) return fail(errno, "cannot open '{}'", request.path);
    const FileInfo info = files_.add(std::move(file));
    MutexLock lock(mutex_);
    const auto at = static_cast<size_t>(info.id);
    if (of_file_.size() <= at) of_file_.resize(at + 1);
    of_file_[at] = drive;
    return info;
  }

  Status close(FileId file) override { return files_.close(file); }

  Status adopt(const Arena& arena) override {
    MutexLock lock(mutex_);
    if (adopted_.insert(arena.id()).second) env_.adopt(arena);
    return {};
  }
  Status unadopt(const Arena& arena) override {
    MutexLock lock(mutex_);
    if (adopted_.erase(arena.id()) > 0) env_.unadopt(arena.id());
    return {};
  }

  size_t submit(std::span<Op* const> ops) override {
    const size_t taken = std::min<size_t>(ops.size(), depth_ - in_flight_);
    in_flight_ += static_cast<uint32_t>(taken);
    for (Op* op : ops.first(taken)) {
      const FileTable::File* file = files_.find(op->file);
      if (startable(*op, file) && nvme::in_file(*op, file->info.bytes, file->path)) {
        start(*op);
      } else {
        failed_.push(*op);
      }
    }
    if (taken > 0) counters_.submissions.add(1);
    return taken;
  }

  // SPDK has no interrupts: it looks again and again while anything is under way.
  size_t poll(uint64_t wait_ns) override {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      const size_t completed = reap();
      if (completed > 0 || woken_.exchange(false)) return completed;
      const auto passed = static_cast<uint64_t>(
          std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
      if (passed >= wait_ns) return 0;
      if (in_flight_ > 0) {
        std::this_thread::yield();
      } else {
        sleep(wait_ns - passed);
      }
    }
  }

  void wake() override {
    {
      MutexLock lock(sleep_mutex_);
      woken_ = true;
    }
    wakes_.notify_one();
  }

 private:
  struct Drive {
    std::string address;
    spdk_nvme_ctrlr* controller = nullptr;
    spdk_nvme_qpair* queue = nullptr;  // null: it is gone
    std::deque<Op*> waiting;           // for room in its queue
  };
  // One command.
  struct Flight {
    Driven* engine = nullptr;
    Op* op = nullptr;
    std::byte* copy = nullptr;  // of SPDK's memory, where the op's own cannot be reached
    uint32_t bytes = 0;
  };

  size_t drives() const { return drives_made_.load(std::memory_order_acquire); }

  Result<Drive*> drive_at(const std::string& address) {
    MutexLock lock(mutex_);
    const size_t made = drives();
    for (size_t i = 0; i < made; ++i) {
      if (drives_[i]->address == address) return drives_[i].get();
    }
    if (made == kDrivesMax)
      return fail(Code::unsupported, "'{}' is one drive too many: a process drives at most 16",
                  address);
    auto drive = std::make_unique<Drive>();
    drive->address = address;
    STOKER_ASSIGN(drive->controller, env_.attach(address));
    spdk_nvme_io_qpair_opts options{};
    spdk_nvme_ctrlr_get_default_io_qpair_opts(drive->controller, &options, sizeof options);
    options.io_queue_requests = std::max(options.io_queue_requests, depth_);
    drive->queue = spdk_nvme_ctrlr_alloc_io_qpair(drive->controller, &options, sizeof options);
    if (drive->queue == nullptr) {
      env_.detach(address);
      return fail(EBUSY, "the NVMe drive {} has no queue left; end other programs that use it",
                  address);
    }
    drives_[made] = std::move(drive);
    drives_made_.store(made + 1, std::memory_order_release);
    return drives_[made].get();
  }

  static Result<nvme::Space> space_of(const Drive& drive, const Place& place,
                                      const std::string& path) {
    spdk_nvme_ns* const space = spdk_nvme_ctrlr_get_ns(drive.controller, place.space);
    if (space == nullptr || !spdk_nvme_ns_is_active(space))
      return fail(Code::not_found,
                  "cannot open '{}': the drive has no namespace {}; `stoker nvme list` shows those "
                  "it has",
                  path, place.space);
    if (spdk_nvme_ns_get_md_size(space) != 0)
      return fail(Code::unsupported,
                  "cannot open '{}': its blocks carry metadata; format it without (nvme format "
                  "--ms=0; that deletes what it holds)",
                  path);
    return nvme::Space{place.space, spdk_nvme_ns_get_sector_size(space),
                       spdk_nvme_ns_get_num_sectors(space),
                       spdk_nvme_ns_get_max_io_xfer_size(space)};
  }

  Drive& drive_of(FileId file) const {
    MutexLock lock(mutex_);
    return *of_file_[static_cast<size_t>(file)];
  }

  void start(Op& op) {
    Drive& drive = drive_of(op.file);
    drive.waiting.push_back(&op);
    pump(drive);
  }

  void pump(Drive& drive) {
    while (!drive.waiting.empty()) {
      Op& op = *drive.waiting.front();
      const int error = drive.queue == nullptr ? -ENODEV : send(drive, op);
      if (error == -ENOMEM && drive.queue != nullptr && free_.size() < flights_.size())
        return;  // what is under way makes room
      drive.waiting.pop_front();
      if (error == 0) continue;
      fail(op, -error, files_.find(op.file)->path, "SPDK refuses the command");
      failed_.push(op);
    }
  }

  // 0, or -errno: then nothing is under way.
  int send(Drive& drive, Op& op) {
    const FileTable::File& file = *files_.find(op.file);
    const nvme::Command command = nvme::command_of(op, *file.space, file.base);
    Flight& flight = *free_.back();
    flight = {this, &op, nullptr, command.bytes};
    std::byte* data = command.data;
    if (command.bytes > 0 && !env_.knows({data, command.bytes, op.bytes.arena})) {
      flight.copy = static_cast<std::byte*>(spdk_dma_malloc(command.bytes, kPage, nullptr));
      if (flight.copy == nullptr) return -ENOMEM;
      if (op.kind == Op::Kind::write) std::memcpy(flight.copy, data, command.bytes);
      data = flight.copy;
    }
    spdk_nvme_cmd sent{};
    sent.opc = command.opcode;
    sent.nsid = command.space;
    sent.cdw10 = command.word10;
    sent.cdw11 = command.word11;
    sent.cdw12 = command.word12;
    const int error = spdk_nvme_ctrlr_cmd_io_raw(drive.controller, drive.queue, &sent, data,
                                                 command.bytes, &Driven::answered, &flight);
    if (error != 0) {
      spdk_dma_free(flight.copy);
      return error;
    }
    free_.pop_back();
    return 0;
  }

  // Called by SPDK while the queue is polled.
  static void answered(void* context, const spdk_nvme_cpl* answer) {
    Flight& flight = *static_cast<Flight*>(context);
    flight.engine->landed(flight, answer->status.sc | answer->status.sct << 8);
  }

  void landed(Flight& flight, int status) {
    Op& op = *flight.op;
    if (flight.copy != nullptr) {
      if (op.kind == Op::Kind::read && status == 0)
        std::memcpy(op.bytes.data + op.moved, flight.copy, flight.bytes);
      spdk_dma_free(flight.copy);
      counted_->bounced_bytes.add(flight.bytes);
    }
    free_.push_back(&flight);
    const FileTable::File& file = *files_.find(op.file);
    (nvme::settle(op, status, *file.space, file.path, counters_) ? over_ : unfinished_).push(op);
  }

  size_t reap() {
    for (size_t i = 0; i < drives(); ++i) {
      Drive& drive = *drives_[i];
      if (drive.queue == nullptr) continue;
      if (spdk_nvme_qpair_process_completions(drive.queue, 0) < 0) {
        log().error("the NVMe drive {} is given up: SPDK lost it", drive.address);
        // It answers for what was under way.
        spdk_nvme_ctrlr_free_io_qpair(std::exchange(drive.queue, nullptr));
      }
      pump(drive);
    }
    OpList more = std::exchange(unfinished_, {});
    while (Op* op = more.pop()) start(*op);
    OpList done = std::exchange(over_, {});
    OpList failed = std::exchange(failed_, {});
    size_t completed = 0;
    for (OpList* list : {&failed, &done}) {
      while (Op* op = list->pop()) {
        --in_flight_;
        ++completed;
        op->done(*op);
      }
    }
    return completed;
  }

  void sleep(uint64_t wait_ns) {
    MutexLock lock(sleep_mutex_);
    wakes_.wait_for(lock, std::chrono::nanoseconds(std::min<uint64_t>(wait_ns, 3'600'000'000'000)),
                    [this] { return woken_.load(); });
  }

  const uint32_t depth_;
  spdk::Env& env_;
  const std::shared_ptr<SpdkCounters> counted_;
  FileTable files_;
  mutable Mutex mutex_;
  std::vector<Drive*> of_file_ GUARDED_BY(mutex_);
  std::set<int32_t> adopted_ GUARDED_BY(mutex_);
  std::array<std::unique_ptr<Drive>, kDrivesMax> drives_;
  std::atomic<size_t> drives_made_{0};
  Mutex sleep_mutex_;
  CondVar wakes_;
  std::atomic<bool> woken_{false};
  // Of the polling thread.
  std::vector<Flight> flights_;
  std::vector<Flight*> free_;
  OpList failed_, over_, unfinished_;  // the last: what is left of them is to be sent
  uint32_t in_flight_ = 0;
};

}  // namespace

Result<SpdkEngine> make_spdk_engine(const std::vector<std::string>& targets, uint32_t depth) {
  if (depth == 0) return fail(Code::invalid_argument, "an engine needs a depth of at least 1");
  std::vector<std::string> addresses;
  for (const std::string& target : targets) {
    STOKER_ASSIGN(Place place, parse_place(target));
    addresses.push_back(std::move(place.address));
  }
  STOKER_TRY(spdk::Env::of_process().start(addresses));
  auto counters = std::make_shared<SpdkCounters>();
  auto engine = std::make_unique<Driven>(std::min(depth, kDepthMax), counters);
  return SpdkEngine{std::move(engine), std::move(counters)};
}

}  // namespace stoker
