#include "bench_updates.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"

namespace stoker::cli {
namespace {

using Time = std::chrono::steady_clock;

double microseconds(Time::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

class StoreTarget final : public UpdateTarget {
 public:
  explicit StoreTarget(Store& store) : store_(store) {}

  Status update(const Update& update, Slice from) override {
    STOKER_ASSIGN(const auto change, store_.begin());
    for (const UpdatePiece& piece : update) {
      STOKER_TRY(change
                     ->write(std::to_string(piece.object), piece.offset,
                             from.sub(0, static_cast<size_t>(piece.bytes)))
                     .wait());
    }
    if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    return {};
  }

 private:
  Store& store_;
};

class PlainTarget final : public UpdateTarget {
 public:
  explicit PlainTarget(std::string folder) : folder_(std::move(folder)) {}
  ~PlainTarget() override {
    for (const int file : files_) close(file);
  }
  PlainTarget(const PlainTarget&) = delete;
  PlainTarget& operator=(const PlainTarget&) = delete;

  // Written once, so that an update finds its blocks there.
  Status make(size_t files, uint64_t bytes) {
    const std::vector<std::byte> piece(kMiB, std::byte{0x5A});
    for (size_t i = 0; i < files; ++i) {
      const std::string path = folder_ + "/" + std::to_string(i);
      const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      if (file < 0) return failed("make");
      files_.push_back(file);
      for (uint64_t at = 0; at < bytes; at += kMiB)
        STOKER_TRY(write_all(file, at, {piece.data(), std::min<uint64_t>(kMiB, bytes - at)}));
      if (fdatasync(file) != 0) return failed("flush");
    }
    return {};
  }

  Status update(const Update& update, Slice from) override {
    std::set<int> written;
    for (const UpdatePiece& piece : update) {
      const int file = files_[piece.object];
      STOKER_TRY(write_all(file, piece.offset, {from.data, static_cast<size_t>(piece.bytes)}));
      written.insert(file);
    }
    for (const int file : written) {
      if (fdatasync(file) != 0) return failed("flush");
    }
    return {};
  }

 private:
  Error failed(const char* what) const {
    return fail(errno, "cannot {} a file in '{}'", what, folder_);
  }
  Status write_all(int file, uint64_t offset, std::span<const std::byte> bytes) const {
    for (size_t moved = 0; moved < bytes.size();) {
      const ssize_t got = pwrite(file, bytes.data() + moved, bytes.size() - moved,
                                 static_cast<off_t>(offset + moved));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return failed("write");
      moved += static_cast<size_t>(got);
    }
    return {};
  }

  const std::string folder_;
  std::vector<int> files_;
};

// What the writers share.
struct Shared {
  explicit Shared(size_t objects) : busy(objects) {}
  std::vector<Mutex> busy;  // by object
  Mutex mutex;              // guards what follows
  Status status;
  std::vector<double> waited;
  uint64_t bytes = 0;
};

// The objects in order, so that no two writers wait for each other.
std::vector<std::unique_lock<Mutex>> hold(Shared& shared, const Update& update) {
  std::set<size_t> objects;
  for (const UpdatePiece& piece : update) objects.insert(piece.object);
  std::vector<std::unique_lock<Mutex>> held;
  held.reserve(objects.size());
  for (const size_t object : objects) held.emplace_back(shared.busy[object]);
  return held;
}

void write(UpdateTarget& target, Shared& shared, size_t writer,
           const std::function<std::optional<Update>(size_t writer)>& next) {
  std::vector<std::byte> content(4 * kKiB, std::byte{0x42});
  std::vector<double> waited;
  uint64_t bytes = 0;
  Status status;
  while (const auto update = next(writer)) {
    {
      const MutexLock lock(shared.mutex);
      if (!shared.status) break;
    }
    for (const UpdatePiece& piece : *update) {
      if (piece.bytes > content.size()) content.resize(piece.bytes, std::byte{0x42});
      bytes += piece.bytes;
    }
    const auto begun = Time::now();
    std::memcpy(content.data(), &begun, sizeof begun);
    const auto held = hold(shared, *update);
    status = target.update(*update, {content.data(), content.size(), -1});
    if (!status) break;
    waited.push_back(microseconds(Time::now() - begun));
  }
  const MutexLock lock(shared.mutex);
  if (!status && shared.status) shared.status = status;
  shared.waited.insert(shared.waited.end(), waited.begin(), waited.end());
  shared.bytes += bytes;
}

}  // namespace

std::unique_ptr<UpdateTarget> store_target(Store& store) {
  return std::make_unique<StoreTarget>(store);
}

Result<std::unique_ptr<UpdateTarget>> plain_target(const std::string& folder, size_t files,
                                                   uint64_t bytes) {
  auto target = std::make_unique<PlainTarget>(folder);
  STOKER_TRY(target->make(files, bytes));
  return std::unique_ptr<UpdateTarget>(std::move(target));
}

Result<UpdateRun> run_updates(UpdateTarget& target, size_t writers, size_t objects,
                              const std::function<std::optional<Update>(size_t writer)>& next) {
  Shared shared(objects);
  const auto begun = Time::now();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < writers; ++i)
    threads.emplace_back([&, i] { write(target, shared, i, next); });
  for (std::thread& thread : threads) thread.join();
  if (!shared.status) return shared.status.error();
  UpdateRun run;
  run.seconds = std::chrono::duration<double>(Time::now() - begun).count();
  run.updates = shared.waited.size();
  run.bytes = shared.bytes;
  if (shared.waited.empty())
    return fail(Code::invalid_argument,
                "there was no update to time: give more seconds, or a trace with writes");
  std::sort(shared.waited.begin(), shared.waited.end());
  run.p50_us = shared.waited[shared.waited.size() / 2];
  run.p99_us = shared.waited[shared.waited.size() * 99 / 100];
  run.max_us = shared.waited.back();
  return run;
}

Json to_json(const UpdateRun& run) {
  return {{"updates", run.updates},
          {"per_second", run.per_second()},
          {"p50_us", run.p50_us},
          {"p99_us", run.p99_us},
          {"max_us", run.max_us}};
}

}  // namespace stoker::cli
