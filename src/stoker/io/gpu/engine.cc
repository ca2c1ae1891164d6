#include "stoker/io/gpu/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"
#include "stoker/base/mutex.h"
#include "stoker/io/posix/carrier.h"
#include "stoker/io/posix/engine.h"

namespace stoker::gpu {
namespace {

constexpr uint64_t kLane = kMiB;

// Pieces of host memory, for one thread each.
class Lanes {
 public:
  Lanes(std::unique_ptr<Arena> arena, std::shared_ptr<Gpu> gpu)
      : gpu_(std::move(gpu)), arena_(std::move(arena)), pinned_(gpu_->pin(*arena_)) {
    for (uint64_t at = 0; at + kLane <= arena_->size(); at += kLane)
      free_.push_back(std::move(*arena_->take(kLane)));
  }
  ~Lanes() {
    if (pinned_) gpu_->unpin(*arena_);
  }
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  Buffer take() {
    MutexLock lock(mutex_);
    room_.wait(lock, [this]() REQUIRES(mutex_) { return !free_.empty(); });
    Buffer lane = std::move(free_.back());
    free_.pop_back();
    return lane;
  }
  void give_back(Buffer lane) {
    {
      MutexLock lock(mutex_);
      free_.push_back(std::move(lane));
    }
    room_.notify_one();
  }

 private:
  const std::shared_ptr<Gpu> gpu_;
  const std::unique_ptr<Arena> arena_;
  const bool pinned_;
  Mutex mutex_;
  CondVar room_;
  std::vector<Buffer> free_ GUARDED_BY(mutex_);
};

class GpuCarrier final : public Carrier {
 public:
  GpuCarrier(std::shared_ptr<Gpu> gpu, std::unique_ptr<Arena> host, bool direct,
             std::shared_ptr<GpuCounters> counters)
      : gpu_(std::move(gpu)),
        cufile_(direct ? gpu_->cufile() : nullptr),
        lanes_(std::move(host), gpu_),
        counters_(std::move(counters)) {
    if (direct && cufile_ == nullptr)
      log().warn("transfers to GPU memory go through host memory: {}", gpu_->why_no_cufile());
  }
  ~GpuCarrier() override {
    for (const auto& [id, file] : files_) forget(file);
    for (const auto& [id, region] : regions_) forget(region);
  }

  const char* name() const override { return "gpu"; }

  Status adopt(const Arena& arena) override {
    if (!arena.foreign()) return {};
    MutexLock lock(mutex_);
    if (regions_.contains(arena.id())) return {};
    Region region{arena.data(), arena.size(), false};
    if (cufile_ != nullptr) {
      STOKER_TRY(gpu_->enter());
      const int error = cufile_->buffer_register(region.data, region.bytes, 0).error;
      region.registered = error == 0;
      if (error != 0)
        log().warn("an arena of GPU memory is filled through host memory: {}",
                   cufile_sentence(error));
    }
    regions_.emplace(arena.id(), region);
    return {};
  }

  Status unadopt(const Arena& arena) override {
    MutexLock lock(mutex_);
    const auto found = regions_.find(arena.id());
    if (found == regions_.end()) return {};
    forget(found->second);
    regions_.erase(found);
    return {};
  }

  void closing(FileId id) override {
    MutexLock lock(mutex_);
    const auto found = files_.find(id);
    if (found == files_.end()) return;
    forget(found->second);
    files_.erase(found);
  }

  std::optional<int64_t> carry(const Op& op, const FileTable::File& file) override {
    const Region region = region_of(op.bytes);
    if (region.data == nullptr) return {};
    if (!gpu_->enter()) return -EIO;
    if (region.registered) {
      if (const CuFileHandle handle = handle_of(file); handle != nullptr) {
        if (const auto moved = direct(op, region, handle, file)) return moved;
      }
    }
    return bounce(op, file.fd);
  }

 private:
  struct Region {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    bool registered = false;
  };
  struct File {
    CuFileHandle handle = nullptr;
    bool refused = false;  // by cuFile
  };

  Region region_of(const Slice& bytes) const {
    MutexLock lock(mutex_);
    const auto found = regions_.find(bytes.arena);
    return found == regions_.end() ? Region{} : found->second;
  }

  // Null: cuFile does not take the file.
  CuFileHandle handle_of(const FileTable::File& file) {
    MutexLock lock(mutex_);
    File& known = files_[file.info.id];
    if (known.handle != nullptr || known.refused) return known.refused ? nullptr : known.handle;
    CuFileDescriptor descriptor;
    descriptor.handle.fd = file.fd;
    const int error = cufile_->handle_register(&known.handle, &descriptor).error;
    if (error == 0) return known.handle;
    known.handle = nullptr;
    refuse(known, file.path, error);
    return nullptr;
  }

  // The handle stays, for other threads may use it.
  static void refuse(File& file, const std::string& path, int error) {
    if (std::exchange(file.refused, true)) return;
    log().warn("'{}' and GPU memory: transfers go through host memory, as {}", path,
               cufile_sentence(error));
  }

  // Nothing: cuFile does not do it.
  std::optional<int64_t> direct(const Op& op, const Region& region, CuFileHandle handle,
                                const FileTable::File& file) {
    const size_t bytes = op.bytes.size - op.moved;
    const auto at = static_cast<off_t>(op.offset + op.moved);
    const auto in_region =
        static_cast<off_t>(op.bytes.data - region.data) + static_cast<off_t>(op.moved);
    errno = 0;
    const ssize_t moved = op.kind == Op::Kind::read
                              ? cufile_->read(handle, region.data, bytes, at, in_region)
                              : cufile_->write(handle, region.data, bytes, at, in_region);
    if (moved == -1) return -errno;
    if (moved < 0) {
      MutexLock lock(mutex_);
      refuse(files_[file.info.id], file.path, static_cast<int>(-moved));
      return {};
    }
    counters_->direct_bytes.add(static_cast<uint64_t>(moved));
    return moved;
  }

  // A lane after the other, until all is moved or one comes short.
  int64_t bounce(const Op& op, int fd) {
    Buffer lane = lanes_.take();
    int64_t moved = 0;
    const auto all = static_cast<int64_t>(op.bytes.size - op.moved);
    while (moved < all) {
      std::byte* const data = op.bytes.data + op.moved + moved;
      const auto at = static_cast<off_t>(op.offset + op.moved) + moved;
      const auto bytes = static_cast<size_t>(std::min<int64_t>(kLane, all - moved));
      const int64_t part = op.kind == Op::Kind::read ? read_lane(lane, fd, data, bytes, at)
                                                     : write_lane(lane, fd, data, bytes, at);
      if (part < 0 && moved == 0) moved = part;
      if (part <= 0) break;
      moved += part;
      if (static_cast<size_t>(part) < bytes) break;
    }
    lanes_.give_back(std::move(lane));
    if (moved > 0) counters_->bounced_bytes.add(static_cast<uint64_t>(moved));
    return moved;
  }

  int64_t read_lane(const Buffer& lane, int fd, std::byte* to, size_t bytes, off_t at) {
    const ssize_t got = pread(fd, lane.data(), bytes, at);
    if (got < 0) return -errno;
    if (got > 0 && !gpu_->copy(to, lane.data(), static_cast<size_t>(got))) return -EIO;
    return got;
  }
  int64_t write_lane(const Buffer& lane, int fd, const std::byte* from, size_t bytes, off_t at) {
    if (!gpu_->copy(lane.data(), from, bytes)) return -EIO;
    const ssize_t put = pwrite(fd, lane.data(), bytes, at);
    return put < 0 ? -errno : put;
  }

  void forget(const File& file) const {
    if (file.handle != nullptr) cufile_->handle_deregister(file.handle);
  }
  void forget(const Region& region) const {
    if (region.registered) cufile_->buffer_deregister(region.data);
  }

  const std::shared_ptr<Gpu> gpu_;
  const CuFileTable* const cufile_;  // null: not used
  Lanes lanes_;
  const std::shared_ptr<GpuCounters> counters_;
  mutable Mutex mutex_;
  std::map<int32_t, Region> regions_ GUARDED_BY(mutex_);  // by the ids of their arenas
  std::map<FileId, File> files_ GUARDED_BY(mutex_);
};

}  // namespace

Result<GpuEngine> make_gpu_engine(std::shared_ptr<Gpu> gpu, Budget& budget,
                                  const GpuEngineOptions& options) {
  STOKER_ASSIGN(auto host, Arena::make(std::max(options.bounce_bytes, kLane), budget));
  auto counters = std::make_shared<GpuCounters>();
  auto carrier =
      std::make_unique<GpuCarrier>(std::move(gpu), std::move(host), options.direct, counters);
  STOKER_ASSIGN(std::unique_ptr<Engine> engine,
                PosixEngine::make(options.depth, std::move(carrier)));
  return GpuEngine{std::move(engine), std::move(counters)};
}

}  // namespace stoker::gpu
