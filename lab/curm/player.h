// Player: plays rounds on a virtual clock, exactly in the order of their times. A disk serves
// requests first come, first served, those of updates before those of folds (which get every fourth
// turn); appends that wait together become one, so do flushes.
//
// Clients work in a closed loop: each sends its next update when the last is acknowledged, and
// leaves at most one unfinished behind (what is written in place after the acknowledgement). Folds
// run beside them, as many stripes at once as there are nodes. When the logs are full again before
// the folds of the last time are done, clients wait for them.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <queue>

#include "curm/model.h"

namespace stoker::curm {

class Player {
 public:
  using Job = std::vector<Play>;
  Player(const Device& device, int nodes, int clients);
  ~Player();

  struct Next {
    Job update;
    std::vector<Job> folds;  // that it made due
  };
  // Asks for the next update whenever a client is free, until there is none, and plays all that,
  // and the folds. The time of the last acknowledgement.
  uint64_t play_updates(std::function<bool(Next&)> source);
  // Plays jobs, as many at once as there are nodes. How long it took.
  uint64_t play_background(std::vector<Job> jobs);

  uint64_t now_ns() const { return now_; }
  const std::vector<uint64_t>& latencies_ns() const { return latencies_; }
  int64_t log_bytes_peak() const { return space_peak_; }

 private:
  struct Running;
  struct Task;
  struct Disk;
  struct Client {
    int unfinished = 0;  // updates that are acknowledged but not done
    bool waits = false;  // for that to become one at most
  };
  struct Event {
    uint64_t at, order;
    Task* task;  // its message arrives; or null: a batch of a disk is done
    Disk* disk;
    size_t batch;
    bool operator>(const Event& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };
  void loop();
  void start(Job plays, int client);
  void start_client(int client);
  void start_folds();
  void folded();
  void begin_round(Running& job);
  void end_round(Running& job);
  void acknowledged(Running& job);
  void finish(Running& job);
  void send(Task& task, NodeId from, NodeId to, uint64_t bytes);
  uint64_t* free_at(std::vector<uint64_t>& table, NodeId place, const Running& job);
  void arrive(Task& task);
  void go_on(Task& task);
  void task_done(Task& task);
  void serve(Disk& disk);
  uint64_t end_of(Disk& disk, const Play::Step& step, uint64_t bytes) const;
  void batch_done(Disk& disk, size_t batch);

  const Device device_;
  const int nodes_;
  uint64_t now_ = 0, orders_ = 0, last_acknowledged_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::unique_ptr<Disk>> disks_;
  // when a card is free again: of nodes, then of clients
  std::vector<uint64_t> out_free_, in_free_;
  std::vector<Client> clients_;
  std::function<bool(Next&)> source_;
  std::deque<Job> folds_;  // due, not started
  int folding_ = 0;
  std::vector<Job> held_folds_;  // due while others are not done: all clients wait
  std::vector<int> held_clients_;
  std::vector<std::unique_ptr<Running>> running_, finished_;
  std::vector<uint64_t> latencies_;
  int64_t space_ = 0, space_peak_ = 0;
};

}  // namespace stoker::curm
