// Link: one connection of a client. What is asked goes out in order, as far as the limits of
// docs/formats/serve.md allow. One thread at a time receives answers: that of run(), or one that
// waits for the only answer that is to come. It saves the switch from the one to the other.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "stoker/base/fork.h"
#include "stoker/base/mutex.h"
#include "stoker/store/answers.h"
#include "stoker/store/remote/socket.h"

namespace stoker::remote {

// A request, and what is done with its answer.
struct Call {
  Request request;
  size_t memory = 0;  // in the client's memory, while it is under way
  // Before it is sent, on any thread: puts there what is written.
  std::function<void(std::byte* memory)> before = {};
  // Once, on the thread that received it, or that found the link lost. Must not block.
  std::function<void(const Result<Answer>& answer, const std::byte* memory)> after = {};
};

class Link final : public Answers {
 public:
  // Greets the server and waits for its welcome.
  static Result<std::shared_ptr<Link>> make(const std::string& path, bool read_only);
  Link(Fd socket, std::string path, Fd memory, Mapping mapping);

  void run();   // receives until the link is lost
  void lose();  // any thread: what is under way fails, and run() returns soon
  // What the server lent lives on, also when the link is lost: the server sees the connection end
  // when the last of it was given back. lend() is called by `after`.
  void lend();
  void give_back(const Span& span);
  bool lost() const;

  // Never waits for an answer. In a forked process it fails: the link is its parent's.
  void ask(Call call);
  void receive_until(const std::function<bool()>& done, Time deadline) override;
  void unpin(const std::vector<Span>& spans);

  const Welcome& welcome() const { return welcome_; }
  const std::byte* blocks() const { return blocks_.data(); }
  int blocks_fd() const { return blocks_fd_.get(); }
  int socket() const { return socket_.get(); }
  // Whether this span lies in the blocks.
  bool lent(const Span& span) const;
  uint64_t place_of(const std::byte* memory) const;  // of what `after` was given
  // Whether a thread that waits receives, and how often one did.
  bool waiter_receives() const;
  uint64_t received_by_waiters() const;

 private:
  enum class Received : uint8_t { one, none, end };
  struct UnderWay {
    Call call;
    size_t place = 0;
  };
  Status greet(bool read_only);
  bool take(Call& call);
  bool wait_for_one();
  Received receive_one();
  void attend() REQUIRES(mutex_);  // somebody receives what is under way
  Error gone(const char* what) const;
  void pump();
  void finish(UnderWay& one, const Result<Answer>& answer);
  bool take_memory(size_t bytes, size_t& place) REQUIRES(mutex_);
  void give_memory(size_t place, size_t bytes) REQUIRES(mutex_);
  void ping();
  void send_out(const Outgoing& message);

  const uint64_t made_ = forks();
  const Fd socket_;
  const Fd wake_;  // readable once the link is lost
  const Fd turn_;  // readable when run() shall receive again
  const std::string path_;
  const Fd memory_fd_;
  const Mapping memory_;
  Welcome welcome_;  // of greet(), before anybody else sees the link
  Fd blocks_fd_;
  Mapping blocks_;

  std::atomic<Time> heard_{};
  Time pinged_;  // of run()

  Mutex sending_;                     // before mutex_; the order of what is sent
  mutable Mutex mutex_;               // guards what follows
  bool lost_ = false, over_ = false;  // over: run() returned
  bool receiving_ = false;            // some thread is
  bool waiter_ = false;               // and it is one that waits
  bool aside_ = false;                // run() leaves it to those who wait
  uint64_t received_ = 0;             // how often somebody did
  CondVar left_;                      // receiving_ is false, and the link is lost
  size_t lent_ = 0;                   // views that live
  uint64_t next_id_ = 1;              // 0 is that of pings
  std::deque<Call> queue_;
  std::unordered_map<uint64_t, UnderWay> under_way_;
  std::vector<bool> taken_;  // of the memory, by granule
  std::vector<uint32_t> unpinned_;
  bool short_of_pins_ = false;  // something was copied while pins were kept here
};

}  // namespace stoker::remote
