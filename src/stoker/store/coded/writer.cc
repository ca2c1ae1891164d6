// The writer thread: commits first, in batches; between them, and when nobody comes, what goes on
// in the background.
#include <algorithm>
#include <chrono>
#include <string>

#include "stoker/store/coded/coded_store.h"

namespace stoker::coded {
namespace {

// stripes, while less than half of the log is free
constexpr size_t kFoldedAStep = 8;
// folds move so much more than an image of the table before one is written
constexpr uint64_t kFoldsAnImage = 4;
// without a commit, before the background works by itself
constexpr auto kIdle = std::chrono::milliseconds(100);

}  // namespace

// What a commit may add to a shard's log at most: VALs, and the record that names its stripes.
uint64_t CodedStore::log_bytes(const TransactionState& state) const {
  uint64_t bytes = state.log_bytes + state.log_bytes / 16 + kBlock;
  for (const auto& [key, object] : state.objects)
    bytes += 3 * (key.size() + 30) + object.stripes.size() * (13 + 4 * shape_.n());
  return bytes;
}

void CodedStore::run() {
  for (;;) {
    std::vector<Request> batch;
    std::optional<Job> job;
    bool idle = false;
    {
      std::unique_lock lock(queue_mutex_);
      const auto called = [&] { return stopping_ || !queue_.empty(); };
      const auto ready = [&] { return called() || !jobs_.empty(); };
      if (!jobs_.empty()) {
        if (const uint64_t wait_ns = jobs_.front().pace->wait_ns(); wait_ns > 0) {
          // by then nobody may use it any more
          queued_.wait_for(
              lock, std::min<std::chrono::nanoseconds>(std::chrono::nanoseconds(wait_ns), kIdle),
              called);
        }
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
        if (!batch.empty() && !next.state->required.empty())
          break;  // its conditions are of what the commits before it leave
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
      if (coded_.background) relieve_log();
    } else if (idle) {
      while (!waits() && background_step(true)) {
      }
    } else if (coded_.background) {
      background_step(false);
    }
  }
  // Nobody waits for these any more who could still be told.
  for (Job& job : jobs_)
    job.done.complete(
        make_error(Code::cancelled, "the store was closed meanwhile", "store/coded/writer"));
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
  if (job.pace->wait_ns() == 0) more = job.step();
  if (!more || !*more) {
    job.done.complete(more ? Status() : Status(more.error()));
    return;
  }
  std::lock_guard lock(queue_mutex_);
  jobs_.push_front(std::move(job));
}

void CodedStore::used() {
  pace_.used();
  fold_pace_.used();
}

// Who lacks a shard must not wait for it until nobody writes any more, and who writes must not find
// a full log: so it also goes on between commits.
bool CodedStore::background_step(bool idle) {
  if (map_.refused()) return false;
  bool worked = false;
  if (pace_.wait_ns() == 0) {
    const auto repaired = repair_step();
    worked = repaired && *repaired;
    if (!repaired) repair_trouble_.met(repaired.error());
    if (worked) repair_trouble_.over("a piece of a chunk was rebuilt");
  }
  worked = relieve_log() || worked;
  if (worked) return true;
  if (idle && 2 * free_segments() >= shape_.segments && fold_pace_.wait_ns() == 0) {
    const auto folded = fold_watched({1, kRowsAStep, true});
    if (folded && *folded > 0) return true;
  }
  return patrol_step();
}

// A log of which less than half is free: a piece of it is folded, or an image of the table makes
// superfluous what is. No more is folded than has to be.
bool CodedStore::relieve_log() {
  const size_t free = free_segments();
  // The rate holds as long as there is room for what comes meanwhile. Then each batch waits for one
  // step, or one of them would wait for all that is missing.
  const bool pressed = free <= kReserve;
  if (2 * free >= shape_.segments || map_.refused()) return false;
  if (fold_pace_.wait_ns() > 0 && !pressed) return false;
  // With a large table a log that is nearly full does not wait until an image pays.
  const uint64_t moved = moved_ - moved_at_image_;
  const bool image_pays =
      !since_image_.empty() && (moved >= kFoldsAnImage * image_cost_ ||
                                (moved > 0 && 4 * free_segments() < shape_.segments));
  if (!image_pays) {
    const auto folded = fold_watched({kFoldedAStep, kRowsAStep});
    if (!folded || *folded > 0) return folded.has_value();
  }
  if (since_image_.empty()) return false;
  const uint64_t before = moved_;
  const Status written = checkpoint();
  fold_pace_.spend(moved_ - before);
  if (written) {
    image_trouble_.over("an image of it was written");
  } else {
    image_trouble_.met(written.error());
  }
  return written.has_value();
}

// Whoever commits must not find a line in the log for each commit.
Result<size_t> CodedStore::fold_watched(const FoldBounds& bounds) {
  auto folded = fold_paced(bounds, fold_pace_);
  if (folded) {
    fold_trouble_.over(*folded == 0
                           ? "nothing is to be folded now"
                           : std::to_string(*folded) +
                                 (*folded == 1 ? " stripe was folded" : " stripes were folded"));
  } else {
    fold_trouble_.met(folded.error());
  }
  return folded;
}

Future<void> CodedStore::add_job(std::function<Result<bool>()> step, Pace& pace) {
  Job job{std::move(step), &pace, {}};
  Future<void> future = job.done.future();
  std::lock_guard lock(queue_mutex_);
  jobs_.push_back(std::move(job));
  queued_.notify_all();
  return future;
}

}  // namespace stoker::coded
