// What plans name is fetched ahead of the readers, by one thread. It takes what is due first, and
// for it a place in memory and a slot before it asks SLOW. It waits for neither: without a place
// nothing begins until somebody gives one back. A quarter of the places is left to readers.
//
// As in read.cc, the tag is asked for again when bytes came: of several objects at the same time,
// and once for all bytes of an object that came meanwhile.
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/cached/cached_store.h"

namespace stoker::cached {
namespace {

constexpr int kLooks = 64;  // at what is due, before the mutex is let go

}  // namespace

void CachedStore::wake_ahead() {
  planned_reads_ = 0;
  if (std::exchange(ahead_due_, true)) return;
  ahead_wake_.notify_one();
}

void CachedStore::fetch_ahead() {
  MutexLock lock(mutex_);
  for (;;) {
    ahead_wake_.wait(lock, [this]() REQUIRES(mutex_) {
      return ahead_stopping_ ? moving_ahead_ == 0 : ahead_due_;
    });
    if (ahead_stopping_) return;
    begin_ahead();
  }
}

void CachedStore::begin_ahead() {
  ahead_due_ = false;
  counts_.prefetched_in_vain_bytes += ahead_.drop_passed();
  std::vector<AheadJob> jobs;
  int looks = 0;
  for (; looks < kLooks && ahead_.room(); ++looks) {
    const auto due = ahead_.due(followers_);
    if (!due) break;
    if (!begin_one(*due, jobs)) {
      ahead_.pressed();
      break;
    }
    ahead_.advance(*due);
  }
  if (looks == kLooks) ahead_due_ = true;
  moving_ahead_ += jobs.size();
  mutex_.unlock();
  for (AheadJob& each : jobs) {
    const Slice into = each.piece.block->slice();
    auto job = std::make_shared<AheadJob>(std::move(each));
    slow_->read(job->key, job->piece.offset, into, {.priority = Priority::prefetch})
        .on_done([this, job](const Status& status) {
          MutexLock held(mutex_);
          job->status = status;
          const auto [at, is_new] = arrived_.try_emplace(job->key);
          at->second.push_back(std::move(*job));
          if (is_new) askers_.run([this, &key = at->first] { take_arrived(key); });
        });
  }
  mutex_.lock();
}

// False: there is no memory for it.
bool CachedStore::begin_one(const Ahead::Due& due, std::vector<AheadJob>& jobs) {
  const Part& part = due.part;
  const BlockId& id = part.id;
  const uint64_t at = part.offset % options_.block_bytes;
  if (kept_.contains(id) || gathered_.contains(id) || fetches_.contains(id) ||
      (policy_ && policy_->holds(id)) || ahead_.covering(id, at, part.bytes))
    return true;
  if (in_memory_.cap() - in_memory_.used() <= moving_places_ / 4) return false;
  // Admitted as its readers would: by what comes behind the read that it is fetched for.
  const bool whole = slots_ && policy_->admits(followers_.after(id, *due.follower, due.position));
  const uint64_t first = part.offset - at;
  const uint64_t block_bytes = std::min<uint64_t>(options_.block_bytes, part.object_bytes - first);
  const BlockPtr block = make_block(id, whole ? block_bytes : part.bytes);
  if (!block) return false;
  AheadJob job{.piece = {.id = id,
                         .offset = whole ? first : part.offset,
                         .at = whole ? 0 : at,
                         .block_bytes = block->size,
                         .into = {},
                         .from = Piece::From::fetch,
                         .block = block},
               .key = *part.key,
               .tag = *part.tag,
               .prefetch = std::make_shared<Prefetch>(Prefetch{.id = id,
                                                               .begin = whole ? 0 : at,
                                                               .bytes = block->size,
                                                               .left = block->size,
                                                               .follower = due.follower,
                                                               .position = due.position,
                                                               .again = due.again})};
  if (whole) {
    STOKER_CHECK(block->size == block_bytes);
    const auto evicted = policy_->add(id, followers_.next(id));
    job.piece.fetch = begin_fetch(id);
    if (evicted) forget_block(*evicted);
  } else {
    job.piece.fetch = std::make_shared<Fetch>();
    job.piece.fetch->future = job.piece.fetch->done.future();
    job.prefetch->part = block;
    job.prefetch->fetch = job.piece.fetch;
  }
  ahead_.add(job.prefetch);
  jobs.push_back(std::move(job));
  return true;
}

// Until nothing more of the object arrived while its tag was asked for.
void CachedStore::take_arrived(const std::string& key) {
  for (;;) {
    std::vector<AheadJob> jobs;
    {
      MutexLock lock(mutex_);
      const auto at = arrived_.find(key);
      STOKER_CHECK(at != arrived_.end());  // nobody else takes this key's
      jobs.swap(at->second);
      if (jobs.empty()) {
        arrived_.erase(at);
        return;
      }
    }
    std::optional<Result<ObjectInfo>> now;
    for (AheadJob& job : jobs) {
      if (!job.status) continue;
      if (!now) now = object_now(key);
      if (*now && (*now)->tag == job.tag) continue;
      job.status = *now ? fail(Code::conflict, "'{}' was replaced while it was prefetched", key)
                        : now->error();
    }
    for (AheadJob& job : jobs) arrived(job);
    const size_t count = jobs.size();
    jobs.clear();  // their memory is free again
    MutexLock lock(mutex_);
    STOKER_CHECK(moving_ahead_ >= count);
    moving_ahead_ -= count;
    ahead_wake_.notify_one();
  }
}

void CachedStore::arrived(AheadJob& job) {
  Prefetch& prefetch = *job.prefetch;
  {
    MutexLock lock(mutex_);
    STOKER_CHECK(!prefetch.arrived);
    const bool wanted = ahead_.has(prefetch);
    if (job.status) {
      prefetch.arrived = true;
      wake_ahead();
      counts_.prefetched_bytes += prefetch.bytes;
      if (!wanted && prefetch.part) counts_.prefetched_in_vain_bytes += prefetch.left;
    } else {
      ahead_.remove(prefetch);
      ahead_.pressed();
      if (job.status.error().code == Code::conflict) {
        ahead_.stop(*prefetch.follower);
        wake_ahead();  // other plans have its room
      } else {
        ahead_.failed(prefetch);
      }
    }
    if (!prefetch.part)
      gather(job.piece, job.status);
    else if (job.status)
      counts_.fetched_bytes += prefetch.bytes;
  }
  tell(job.piece, job.status);
}

}  // namespace stoker::cached
