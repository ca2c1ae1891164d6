#include "curm/file_clients.h"

#include <algorithm>
#include <thread>

namespace stoker::curm {
namespace {

thread_local uint64_t answered_ns = 0;  // this thread's update was acknowledged then

}  // namespace

Clients::Held::Held(Clients& clients, uint64_t stripe, uint64_t last_seq,
                    std::unique_lock<std::mutex>& lock)
    : clients_(clients), stripe_(stripe) {
  // Who waits draws no number before it holds the stripe; counting it from now on is early, which
  // is safe.
  since_ = clients_.begun_.insert(last_seq);
  const uint64_t mine = ++clients_.tickets_;
  std::deque<uint64_t>& line = clients_.held_[stripe];
  line.push_back(mine);
  clients_.changed_.wait(lock, [&] { return line.front() == mine; });
}

Clients::Held::~Held() {
  clients_.begun_.erase(since_);
  const auto line = clients_.held_.find(stripe_);
  line->second.pop_front();
  if (line->second.empty()) clients_.held_.erase(line);
  clients_.changed_.notify_all();
}

Status Clients::run(Round& round) {
  if (round.kind == Round::Kind::acknowledge) answered_ns = now();
  if (!begun_.empty()) {
    for (Errand& errand : round.errands) {
      for (Step& step : errand.steps) {
        if (step.kind == Step::Kind::release) step.seq = std::min(step.seq, *begun_.begin());
      }
    }
  }
  mutex_.unlock();
  Status done = under_.run(round);
  mutex_.lock();
  return done;
}

void Clients::fail(const Status& status) {
  if (status_ && !status) status_ = status;
  changed_.notify_all();
}

Status Clients::write(const Work& work, std::vector<std::vector<Update>>& groups,
                      std::unique_lock<std::mutex>& lock) {
  for (std::vector<Update>& pieces : groups) {
    const Held held(*this, pieces[0].chunk.stripe, work.scheme->last_seq(), lock);
    if (!status_) return status_;
    if (work.before) STOKER_TRY(work.before(pieces[0].chunk.stripe));
    work.fill(pieces);
    updates_ += pieces.size();
    for (const Update& piece : pieces) update_bytes_ += piece.value.size();
    STOKER_TRY(pieces.size() == 1 ? work.scheme->update(pieces[0])
                                  : work.scheme->update_together(pieces));
  }
  return {};
}

Status Clients::fold(Scheme& scheme, uint64_t stripe, std::unique_lock<std::mutex>& lock) {
  const Held held(*this, stripe, scheme.last_seq(), lock);
  return status_ ? scheme.fold(stripe) : status_;
}

// As on the modelled cluster: folds go on beside updates; who fills the logs again before they are
// done waits, and all others with it.
void Clients::make_room(const Work& work, bool folds_itself, uint64_t bytes,
                        std::unique_lock<std::mutex>& lock) {
  const auto busy = [this] { return !to_fold_.empty() || folding_ != 0; };
  grown_ += bytes;
  if (busy() && grown_ >= room_) changed_.wait(lock, [&] { return !busy() || !status_; });
  if (!work.folds || busy() || !status_ || work.scheme->logged_bytes() < work.log_bytes) return;
  const std::vector<uint64_t> stripes = work.scheme->make_room(work.log_bytes);
  if (folds_itself) {
    for (const uint64_t stripe : stripes) {
      if (status_) fail(fold(*work.scheme, stripe, lock));
    }
    return;
  }
  grown_ = 0;
  room_ = stripes.size() == work.scheme->pending().size() ? work.log_bytes : work.log_bytes / 2;
  to_fold_.assign(stripes.begin(), stripes.end());
  changed_.notify_all();
}

void Clients::client(const Work& work, bool folds_itself) {
  std::unique_lock lock(mutex_);
  std::vector<std::vector<Update>> groups;
  while (status_ && work.next(groups)) {
    const uint64_t begun = now();
    fail(write(work, groups, lock));
    if (!status_) break;
    latencies_.push_back(answered_ns - begun);
    last_ns_ = std::max(last_ns_, answered_ns);
    uint64_t bytes = 0;
    for (const auto& pieces : groups) {
      for (const Update& piece : pieces) bytes += piece.value.size();
    }
    make_room(work, folds_itself, bytes, lock);
  }
}

void Clients::folder(Scheme& scheme) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !to_fold_.empty() || done_ || !status_; });
    if (to_fold_.empty() || !status_) return;
    const uint64_t stripe = to_fold_.front();
    to_fold_.pop_front();
    ++folding_;
    fail(fold(scheme, stripe, lock));
    --folding_;
    changed_.notify_all();
  }
}

Status Clients::play(const Work& work, int clients, int folders) {
  const bool alone = clients == 1;
  begun_ns_ = last_ns_ = now();
  done_ = false;
  std::vector<std::thread> threads, beside;
  for (int i = 0; i < folders && !alone; ++i)
    beside.emplace_back([this, &work] { folder(*work.scheme); });
  for (int i = 0; i < clients; ++i)
    threads.emplace_back([this, &work, alone] { client(work, alone); });
  for (std::thread& thread : threads) thread.join();
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : beside) thread.join();
  return status_;
}

Status Clients::drain(Scheme& scheme, int folders) {
  {
    const std::lock_guard lock(mutex_);
    const std::vector<uint64_t> stripes = scheme.pending();
    to_fold_.assign(stripes.begin(), stripes.end());
    done_ = true;
  }
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(folders));
  for (int i = 0; i < folders; ++i) threads.emplace_back([this, &scheme] { folder(scheme); });
  for (std::thread& thread : threads) thread.join();
  return status_;
}

}  // namespace stoker::curm
