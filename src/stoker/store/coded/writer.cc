// The writer thread: commits first, in batches; between them, and when nobody comes, what goes on in the background.
#include <algorithm>
#include <chrono>

#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"

namespace stoker::coded {
namespace {

constexpr size_t kFoldsAnImage = 8;                     // of stripes, while less than half of the log is free
constexpr auto kIdle = std::chrono::milliseconds(100);  // without a commit, before the background works by itself

}  // namespace

// What a commit may add to a shard's log at most: VALs, and the record that names its stripes.
uint64_t CodedStore::log_bytes(const TransactionState& state) const {
  uint64_t bytes = state.log_bytes + state.log_bytes / 16 + kBlock;
  for (const auto& [key, object] : state.objects) bytes += 3 * (key.size() + 30) + object.stripes.size() * (13 + 4 * shape_.n());
  return bytes;
}

void CodedStore::run() {
  for (;;) {
    std::vector<Request> batch;
    std::optional<Job> job;
    bool idle = false;
    const uint64_t wait_ns = pace_.wait_ns();
    {
      std::unique_lock lock(queue_mutex_);
      const auto called = [&] { return stopping_ || !queue_.empty(); };
      const auto ready = [&] { return called() || !jobs_.empty(); };
      if (!jobs_.empty()) {
        if (wait_ns > 0) queued_.wait_for(lock, std::chrono::nanoseconds(wait_ns), called);
      } else if (coded_.background) {
        idle = !queued_.wait_for(lock, kIdle, ready);
      } else {
        queued_.wait(lock, ready);
      }
      if (queue_.empty() && stopping_) break;
      uint64_t bytes = 0;
      while (!queue_.empty()) {
        Request& next = queue_.front();
        if (!next.state && !batch.empty()) break;
        if (next.state) bytes += log_bytes(*next.state);
        if (!batch.empty() && bytes > shape_.segment_bytes / 2) break;  // a frame holds a batch
        const bool alone = !next.state;
        batch.push_back(std::move(next));
        queue_.pop_front();
        if (alone) break;
      }
      if (!jobs_.empty()) {
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
    }
    if (!batch.empty()) serve(std::move(batch));
    const auto waits = [&] {
      std::lock_guard lock(queue_mutex_);
      return stopping_ || !queue_.empty() || !jobs_.empty();
    };
    if (job) {
      work_on(*job);
    } else if (idle) {
      while (!waits() && pace_.wait_ns() == 0 && background_step()) {
      }
    } else if (coded_.background && pace_.wait_ns() == 0) {
      // Who lacks a shard must not wait for it until nobody writes any more.
      const auto stepped = repair_step();
      if (!stepped) log().warn("{}", stepped.error().message());
      if (stepped && !*stepped) patrol_step();
    }
  }
  // Nobody waits for these any more who could still be told.
  for (Job& job : jobs_) job.done.complete(make_error(Code::cancelled, "the store was closed meanwhile", "store/coded/writer"));
}

void CodedStore::serve(std::vector<Request> batch) {
  if (batch.size() == 1 && !batch[0].state) {
    batch[0].done.complete(batch[0].work());
  } else {
    commit_batch(std::move(batch));
  }
}

// A step if its rate allows; then it stands first in the line again.
void CodedStore::work_on(Job& job) {
  Result<bool> more = true;
  if (pace_.wait_ns() == 0) more = job.step();
  if (!more || !*more) {
    job.done.complete(more ? Status() : Status(more.error()));
    return;
  }
  std::lock_guard lock(queue_mutex_);
  jobs_.push_front(std::move(job));
}

bool CodedStore::background_step() {
  if (const std::lock_guard lock(mutex_); refused_) return false;
  const auto repaired = repair_step();
  if (repaired && *repaired) return true;
  const bool half_free = 2 * free_segments() >= shape_.segments;
  const bool enough = !half_free && folded_since_image_ >= kFoldsAnImage;
  const auto folded = enough ? Result<size_t>(0) : fold_step(1, half_free);
  if (folded && *folded > 0) return true;
  if (!folded) log().warn("folding: {}", folded.error().message());
  if (folded && !half_free && !since_image_.empty()) {
    // What is folded still holds its segments until an image of the table makes it superfluous. No more than has to be is folded then.
    const Status written = checkpoint();
    if (!written) log().warn("{}", written.error().message());
    if (written) return true;
  }
  return patrol_step();
}

Future<void> CodedStore::add_job(std::function<Result<bool>()> step) {
  Job job{std::move(step), {}};
  Future<void> future = job.done.future();
  std::lock_guard lock(queue_mutex_);
  jobs_.push_back(std::move(job));
  queued_.notify_all();
  return future;
}

}  // namespace stoker::coded
