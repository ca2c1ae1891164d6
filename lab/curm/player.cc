#include "curm/player.h"

#include <algorithm>

#include "stoker/base/check.h"

namespace stoker::curm {
namespace {

constexpr uint64_t kMessageBytes = 100;  // of every message, beside its payload
constexpr int kFold = -1;                // instead of a client
constexpr uint64_t kTurns = 4;           // every so many, a fold goes before updates
constexpr uint64_t kLog = UINT64_MAX;    // the area of a disk's log

uint64_t ns(uint64_t bytes, uint64_t bytes_per_s) { return bytes * 1'000'000'000 / bytes_per_s; }

}  // namespace

// One errand of a round that is under way.
struct Player::Task {
  Running* job;
  const Play::Errand* errand;
  size_t step = 0;
  bool answers = false;
};

struct Player::Running {
  Job plays;
  size_t at = 0;
  int client;
  size_t slot = 0;  // in running_
  uint64_t started = 0;
  bool acknowledged = false;
  std::deque<Task> tasks;  // of the current round
  size_t left = 0;
};

struct Player::Disk {
  std::deque<Task*> updates, folds;
  std::vector<std::vector<Task*>> batches;  // by lane; empty: the lane is free
  uint64_t turns = 0;
  uint64_t area = 0, at = 0;               // where the last request ended
  uint64_t read_free = 0, write_free = 0;  // when its bandwidth is
};

Player::Player(const Device& device, int nodes, int clients)
    : device_(device),
      nodes_(nodes),
      out_free_(static_cast<size_t>(nodes + clients)),
      in_free_(out_free_),
      clients_(static_cast<size_t>(clients)) {
  for (int i = 0; i < nodes; ++i) {
    disks_.push_back(std::make_unique<Disk>());
    disks_.back()->batches.resize(static_cast<size_t>(device.lanes));
  }
}

Player::~Player() = default;

uint64_t Player::play_updates(std::function<bool(Next&)> source) {
  source_ = std::move(source);
  for (size_t client = 0; client < clients_.size(); ++client)
    start_client(static_cast<int>(client));
  loop();
  return last_acknowledged_;
}

uint64_t Player::play_background(std::vector<Job> jobs) {
  const uint64_t begin = now_;
  for (Job& job : jobs) folds_.push_back(std::move(job));
  start_folds();
  loop();
  return now_ - begin;
}

void Player::loop() {
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.at;
    if (event.task != nullptr) {
      arrive(*event.task);
    } else {
      batch_done(*event.disk, event.batch);
    }
    finished_.clear();
  }
  STOKER_CHECK(running_.empty() && folds_.empty() && held_folds_.empty());
}

// ---- jobs and their rounds
// ----------------------------------------------------------------------------------------------

void Player::start(Job plays, int client) {
  auto job = std::make_unique<Running>();
  job->plays = std::move(plays);
  job->client = client;
  job->started = now_;
  job->slot = running_.size();
  Running& started = *job;
  running_.push_back(std::move(job));
  begin_round(started);
}

void Player::start_client(int client) {
  if (!held_folds_.empty()) {
    held_clients_.push_back(client);
    return;
  }
  Next next;
  if (!source_(next)) return;
  if (!next.folds.empty()) {
    if (folding_ == 0 && folds_.empty()) {
      for (Job& fold : next.folds) folds_.push_back(std::move(fold));
      start_folds();
    } else {
      held_folds_ = std::move(next.folds);
    }
  }
  start(std::move(next.update), client);
}

void Player::start_folds() {
  while (folding_ < nodes_ && !folds_.empty()) {
    Job fold = std::move(folds_.front());
    folds_.pop_front();
    ++folding_;
    start(std::move(fold), kFold);
  }
}

void Player::folded() {
  --folding_;
  if (folding_ == 0 && folds_.empty() && !held_folds_.empty()) {
    for (Job& fold : held_folds_) folds_.push_back(std::move(fold));
    held_folds_.clear();
    for (const int client : std::exchange(held_clients_, {})) start_client(client);
  }
  start_folds();
}

void Player::begin_round(Running& job) {
  if (job.at == job.plays.size()) {
    finish(job);
    return;
  }
  const Play& play = job.plays[job.at];
  job.tasks.clear();
  space_ -= static_cast<int64_t>(play.freed);
  job.left = play.errands.size();
  if (play.kind == Round::Kind::acknowledge && play.from != kClient) {
    static const Play::Errand answer;
    job.left = 1;
    send(job.tasks.emplace_back(Task{&job, &answer, 0, true}), play.from, kClient, 0);
    return;
  }
  if (play.errands.empty()) {
    end_round(job);
    return;
  }
  for (const Play::Errand& errand : play.errands) job.tasks.push_back({&job, &errand});
  for (Task& task : job.tasks) {
    if (task.errand->node == play.from) {
      events_.push({now_, ++orders_, &task, nullptr, 0});
    } else {
      send(task, play.from, task.errand->node, task.errand->sent);
    }
  }
}

void Player::end_round(Running& job) {
  const bool acknowledges =
      job.plays[job.at].kind == Round::Kind::acknowledge && job.client != kFold;
  ++job.at;
  if (acknowledges) acknowledged(job);
  begin_round(job);
}

void Player::acknowledged(Running& job) {
  if (job.acknowledged) return;  // an update of several pieces: its time is that of the last one
  for (size_t at = job.at; at < job.plays.size(); ++at) {
    if (job.plays[at].kind == Round::Kind::acknowledge) return;
  }
  job.acknowledged = true;
  latencies_.push_back(now_ - job.started);
  last_acknowledged_ = now_;
  Client& client = clients_[static_cast<size_t>(job.client)];
  if (++client.unfinished <= 1) {
    start_client(job.client);
  } else {
    client.waits = true;
  }
}

void Player::finish(Running& job) {
  const int who = job.client;
  running_.back()->slot = job.slot;
  std::swap(running_[job.slot], running_.back());
  finished_.push_back(std::move(running_.back()));
  running_.pop_back();
  if (who == kFold) {
    folded();
    return;
  }
  Client& client = clients_[static_cast<size_t>(who)];
  --client.unfinished;
  if (client.waits) {
    client.waits = false;
    start_client(who);
  }
}

// ---- messages
// -------------------------------------------------------------------------------------------------

// Of a fold's coordinator there is one on each node: its card is not what limits.
uint64_t* Player::free_at(std::vector<uint64_t>& table, NodeId place, const Running& job) {
  if (place != kClient) return &table[static_cast<size_t>(place)];
  return job.client == kFold
             ? nullptr
             : &table[static_cast<size_t>(nodes_) + static_cast<size_t>(job.client)];
}

void Player::send(Task& task, NodeId from, NodeId to, uint64_t bytes) {
  const uint64_t takes = ns(bytes + kMessageBytes, device_.link_bytes_per_s);
  uint64_t at = now_ + takes;
  if (uint64_t* out = free_at(out_free_, from, *task.job)) at = *out = std::max(now_, *out) + takes;
  at += device_.link_ns;
  if (uint64_t* in = free_at(in_free_, to, *task.job)) at = *in = std::max(at, *in + takes);
  events_.push({at, ++orders_, &task, nullptr, 0});
}

void Player::arrive(Task& task) {
  if (task.answers) {
    task_done(task);
  } else {
    go_on(task);
  }
}

void Player::task_done(Task& task) {
  Running& job = *task.job;
  if (--job.left == 0) end_round(job);
}

// ---- disks
// -------------------------------------------------------------------------------------------------

void Player::go_on(Task& task) {
  if (task.step < task.errand->steps.size()) {
    Disk& disk = *disks_[static_cast<size_t>(task.errand->node)];
    (task.job->client == kFold ? disk.folds : disk.updates).push_back(&task);
    serve(disk);
    return;
  }
  const Play& play = task.job->plays[task.job->at];
  if (task.errand->node == play.from || play.kind == Round::Kind::entry) {
    task_done(task);
  } else {
    task.answers = true;
    send(task, task.errand->node, play.from, task.errand->answered);
  }
}

// Lanes wait at once for their first byte, and take turns with the bandwidth.
uint64_t Player::end_of(Disk& disk, const Play::Step& step, uint64_t bytes) const {
  if (step.kind == Play::Kind::flush) return now_ + device_.flush_ns;
  const bool reads = step.kind == Play::Kind::read, appends = step.kind == Play::Kind::append;
  const uint64_t area = appends ? kLog : step.area;
  // One arm follows on only where it stands; a disk with many lanes has none, and takes appends as
  // they come.
  const bool follows =
      device_.lanes > 1 ? appends : disk.area == area && (appends || disk.at == step.at);
  const uint64_t seek = reads ? device_.random_read_ns : device_.random_write_ns;
  uint64_t takes = step.seeks > 1 ? (step.seeks - 1) * seek : 0;
  takes += follows || step.seeks == 0 ? device_.next_ns : seek;
  disk.area = area;
  disk.at = step.at + bytes;
  uint64_t& free = reads ? disk.read_free : disk.write_free;
  return free = std::max(now_ + takes, free) +
                ns(bytes, reads ? device_.read_bytes_per_s : device_.write_bytes_per_s);
}

void Player::serve(Disk& disk) {
  for (size_t lane = 0; lane < disk.batches.size(); ++lane) {
    if (!disk.batches[lane].empty()) continue;
    if (disk.updates.empty() && disk.folds.empty()) return;
    const bool fold = disk.updates.empty() || (!disk.folds.empty() && ++disk.turns % kTurns == 0);
    auto& queue = fold ? disk.folds : disk.updates;
    std::vector<Task*>& batch = disk.batches[lane];
    batch.push_back(queue.front());
    queue.pop_front();
    const Play::Step& first = batch[0]->errand->steps[batch[0]->step];
    uint64_t bytes = first.bytes;
    // those that wait go along
    if (first.kind == Play::Kind::append || first.kind == Play::Kind::flush) {
      std::deque<Task*> others;
      for (Task* task : queue) {
        const Play::Step& step = task->errand->steps[task->step];
        if (step.kind == first.kind) {
          bytes += step.bytes;
          batch.push_back(task);
        } else {
          others.push_back(task);
        }
      }
      queue.swap(others);
    }
    events_.push({end_of(disk, first, bytes), ++orders_, nullptr, &disk, lane});
  }
}

void Player::batch_done(Disk& disk, size_t lane) {
  const std::vector<Task*> batch = std::exchange(disk.batches[lane], {});
  for (Task* task : batch) {
    space_ += static_cast<int64_t>(task->errand->steps[task->step].space);
    space_peak_ = std::max(space_peak_, space_);
    ++task->step;
    go_on(*task);
  }
  serve(disk);
}

}  // namespace stoker::curm
