// Result<T>: a value or an Error, spelled like std::expected (which C++20 lacks).
//   Result<int> f();   if (auto r = f(); !r) return r.error();   use(*r);
#pragma once

#include <optional>
#include <utility>
#include <variant>

#include "stoker/base/check.h"
#include "stoker/base/error.h"

namespace stoker {

template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }

  T& value() & { return get(); }
  const T& value() const& { return const_cast<Result*>(this)->get(); }
  T&& value() && { return std::move(get()); }
  T& operator*() & { return get(); }
  const T& operator*() const& { return const_cast<Result*>(this)->get(); }
  T&& operator*() && { return std::move(get()); }
  T* operator->() { return &get(); }
  const T* operator->() const { return &const_cast<Result*>(this)->get(); }

  const Error& error() const {
    STOKER_CHECK(!has_value());
    return *std::get_if<1>(&state_);
  }

 private:
  T& get() {
    STOKER_CHECK(has_value());
    return *std::get_if<0>(&state_);
  }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool has_value() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return has_value(); }
  void value() const { STOKER_CHECK(has_value()); }
  const Error& error() const {
    STOKER_CHECK(!has_value());
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace stoker

// Returns the error of `expr` to the caller, if it has one.
#define STOKER_TRY(expr)                                                     \
  do {                                                                       \
    if (auto stoker_try_ = (expr); !stoker_try_) return stoker_try_.error(); \
  } while (false)

#define STOKER_CONCAT_(a, b) a##b
#define STOKER_CONCAT(a, b) STOKER_CONCAT_(a, b)
// STOKER_ASSIGN(auto x, f()): x is f()'s value, or its error is returned.
#define STOKER_ASSIGN(target, expr) \
  STOKER_ASSIGN_(target, expr, STOKER_CONCAT(stoker_assign_, __LINE__))
#define STOKER_ASSIGN_(target, expr, temporary) \
  auto temporary = (expr);                      \
  if (!temporary) return temporary.error();     \
  target = std::move(*temporary)
