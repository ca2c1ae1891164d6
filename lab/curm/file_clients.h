// Clients: threads that run one scheme over a substrate, different stripes at once.
//
// A scheme is one thread's. So it has one mutex, which is held by whoever is in it, and let go of
// while a round is under way; a stripe is held for as long as it is updated or folded. As updates
// are acknowledged out of order then, what a release calls settled is held back to before the
// oldest one under way.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "curm/scheme.h"
#include "stoker/base/clock.h"

namespace stoker::curm {

class Clients final : public Substrate {
 public:
  explicit Clients(Substrate& under) : under_(under) {}

  // Of the scheme, whose mutex the calling thread holds.
  Status run(Round& round) override;
  Result<NodeState> scan(NodeId node) override { return under_.scan(node); }

  struct Work {
    Scheme* scheme = nullptr;  // over this substrate
    // The next write, as pieces by stripe; false: there are no more. And what is to be done to
    // pieces whose stripe is held.
    std::function<bool(std::vector<std::vector<Update>>&)> next;
    std::function<void(std::vector<Update>&)> fill;
    // of a stripe that is held, before it is written; may run rounds
    std::function<Status(uint64_t stripe)> before = nullptr;
    uint64_t log_bytes = 0;  // stripes are folded when so much is logged
    bool folds = true;
  };
  // Until there is no more, or an error. Latencies of writes until they are acknowledged; how long
  // it took until the last was.
  Status play(const Work& work, int clients, int folders);
  // What is pending is folded.
  Status drain(Scheme& scheme, int folders);

  const std::vector<uint64_t>& latencies_ns() const { return latencies_; }
  uint64_t acknowledged_ns() const { return last_ns_ - begun_ns_; }
  uint64_t updates() const { return updates_; }
  uint64_t update_bytes() const { return update_bytes_; }

 private:
  // A stripe, from when it is free; who asks first has it first.
  class Held {
   public:
    Held(Clients& clients, uint64_t stripe, uint64_t last_seq, std::unique_lock<std::mutex>& lock);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    Clients& clients_;
    const uint64_t stripe_;
    std::multiset<uint64_t>::iterator since_;
  };
  void client(const Work& work, bool folds_itself);
  void folder(Scheme& scheme);
  Status write(const Work& work, std::vector<std::vector<Update>>& groups,
               std::unique_lock<std::mutex>& lock);
  void make_room(const Work& work, bool folds_itself, uint64_t bytes,
                 std::unique_lock<std::mutex>& lock);
  Status fold(Scheme& scheme, uint64_t stripe, std::unique_lock<std::mutex>& lock);
  void fail(const Status& status);
  static uint64_t now() { return Clock::real().now_ns(); }

  Substrate& under_;
  std::mutex mutex_;  // guards the scheme and everything here
  std::condition_variable changed_;
  std::map<uint64_t, std::deque<uint64_t>> held_;  // tickets by stripe, the holder's in front
  uint64_t tickets_ = 0;
  std::multiset<uint64_t> begun_;  // the last seq before each update or fold that is under way
  std::deque<uint64_t> to_fold_;
  size_t folding_ = 0;
  // logged since folds were asked for, and how much may be until they are done
  uint64_t grown_ = 0, room_ = 0;
  bool done_ = false;
  Status status_;
  std::vector<uint64_t> latencies_;
  uint64_t begun_ns_ = 0, last_ns_ = 0, updates_ = 0, update_bytes_ = 0;
};

}  // namespace stoker::curm
