// Answers: of stores whose answers come through a socket. Who waits for one may receive it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace stoker {

// Any thread.
class Answers {
 public:
  using Time = std::chrono::steady_clock::time_point;
  virtual ~Answers() = default;
  // Receives answers on the calling thread until `done()` or the deadline. Returns at once where
  // another thread receives them: the caller then waits for its future as ever.
  virtual void receive_until(const std::function<bool()>& done, Time deadline) = 0;

 protected:
  Answers() = default;
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;
};

// Lives while its thread begins calls whose futures it will wait for by receive_until(), very
// likely. If it does not, their answers come a few milliseconds late.
class WillReceive {
 public:
  WillReceive() { ++depth(); }
  ~WillReceive() { --depth(); }
  WillReceive(const WillReceive&) = delete;
  WillReceive& operator=(const WillReceive&) = delete;
  static bool here() { return depth() > 0; }

 private:
  static int& depth() {
    thread_local int depth = 0;
    return depth;
  }
};

class HasAnswers {
 public:
  virtual std::weak_ptr<Answers> answers() const = 0;

 protected:
  HasAnswers() = default;
  HasAnswers(const HasAnswers&) = default;
  HasAnswers& operator=(const HasAnswers&) = default;
  ~HasAnswers() = default;
};

}  // namespace stoker
