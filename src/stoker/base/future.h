// Future<T>: the Result<T> of something that is still going on, above the Op callback level.
//
// A Promise is completed exactly once, from any thread; a Promise destroyed unfulfilled completes
// with Code::cancelled. then(f): f runs on the completing thread (or at once, on the caller's, if
// already complete): it must not block. wait(): blocks the calling thread. Futures are shared:
// copying one copies the handle.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/result.h"

namespace stoker {

namespace detail {

// A small move-only callable; std::function would demand copyable captures.
template <typename T>
struct Continuation {
  virtual ~Continuation() = default;
  virtual void run(const Result<T>&) = 0;
};

template <typename T, typename F>
struct ContinuationOf final : Continuation<T> {
  explicit ContinuationOf(F f) : f_(std::move(f)) {}
  void run(const Result<T>& result) override { f_(result); }
  F f_;
};

template <typename T>
struct FutureState {
  Mutex mutex;
  CondVar done;
  std::optional<Result<T>> result;  // written once, with the mutex; whoever saw it set reads it
  std::vector<std::unique_ptr<Continuation<T>>> continuations GUARDED_BY(mutex);

  void complete(Result<T> value) {
    std::vector<std::unique_ptr<Continuation<T>>> run;
    {
      MutexLock lock(mutex);
      STOKER_CHECK(!result.has_value());
      result.emplace(std::move(value));
      run.swap(continuations);
      done.notify_all();
    }
    for (auto& continuation : run) continuation->run(*result);
  }
};

}  // namespace detail

template <typename T>
class Promise;

template <typename T>
class [[nodiscard]] Future {
 public:
  using value_type = T;
  Future() = default;  // empty: only assignable
  Future(Result<T> ready) : state_(std::make_shared<detail::FutureState<T>>()) {
    state_->complete(std::move(ready));
  }
  Future(Error error) : Future(Result<T>(std::move(error))) {}

  bool valid() const { return state_ != nullptr; }

  bool ready() const {
    MutexLock lock(state_->mutex);
    return state_->result.has_value();
  }

  // The result stays owned by the shared state: valid as long as any handle lives.
  const Result<T>& wait() const {
    MutexLock lock(state_->mutex);
    state_->done.wait(lock, [this] { return state_->result.has_value(); });
    return *state_->result;
  }

  // Waits at most `timeout`; whether the result is there. For callers that have something else to
  // look at meanwhile (signals).
  bool wait_for(std::chrono::nanoseconds timeout) const {
    MutexLock lock(state_->mutex);
    return state_->done.wait_for(lock, timeout, [this] { return state_->result.has_value(); });
  }

  // Calls f(const Result<T>&) once the result is there.
  template <typename F>
  void on_done(F f) const {
    {
      MutexLock lock(state_->mutex);
      if (!state_->result.has_value()) {
        state_->continuations.push_back(
            std::make_unique<detail::ContinuationOf<T, F>>(std::move(f)));
        return;
      }
    }
    f(*state_->result);
  }

  // A future of f(const Result<T>&) -> Result<U>.
  template <typename F>
  auto then(F f) const -> Future<typename std::invoke_result_t<F, const Result<T>&>::value_type>;

 private:
  friend class Promise<T>;
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}
  std::shared_ptr<detail::FutureState<T>> state_;
};

template <typename T>
class Promise {
 public:
  Promise() : state_(std::make_shared<detail::FutureState<T>>()) {}
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;
  ~Promise() {
    if (state_)
      state_->complete(fail(Code::cancelled,
                            "this was given up before it was done, as what it needs was closed; "
                            "open that and ask again"));
  }

  Future<T> future() const { return Future<T>(state_); }
  // Consumes the promise.
  void complete(Result<T> result) { std::exchange(state_, nullptr)->complete(std::move(result)); }

 private:
  std::shared_ptr<detail::FutureState<T>> state_;
};

template <typename T>
template <typename F>
auto Future<T>::then(F f) const
    -> Future<typename std::invoke_result_t<F, const Result<T>&>::value_type> {
  using U = typename std::invoke_result_t<F, const Result<T>&>::value_type;
  Promise<U> promise;
  Future<U> future = promise.future();
  on_done([promise = std::move(promise), f = std::move(f)](const Result<T>& result) mutable {
    promise.complete(f(result));
  });
  return future;
}

// Done when all are; the first error in order of the list, if any.
Future<void> all(const std::vector<Future<void>>& futures);

}  // namespace stoker
