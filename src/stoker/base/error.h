// What went wrong, built once at the system call (or check) that saw it and annotated at most once
// per module boundary.
#pragma once

#include <spdlog/fmt/fmt.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace stoker {

enum class Code : uint8_t {
  invalid_argument,  // the caller asked for something that cannot be
  not_found,
  already_exists,
  out_of_space,   // a disk or a store is full
  over_budget,    // the memory cap would be exceeded
  corruption,     // bytes differ from their checksum, or a format rule is broken
  busy,           // somebody else holds it: try later or elsewhere
  read_only,      // the store refuses writes (see `what`)
  no_permission,  // of the user, for a file or folder
  io,             // the device or the kernel failed the request
  unsupported,    // this machine, engine or store cannot do it
  cancelled,      // given up before it was done
  mismatch,       // a store, file or record of another identity or version
  conflict,       // a condition of a commit did not hold: somebody else was first
  in_doubt,       // the answer to a commit was lost: it may have happened or not
  unavailable,    // who serves the store cannot be reached now: try again later
};

// One word for a code, as it stands in messages and in the Python exception table.
std::string_view name(Code code);

struct Error {
  Code code = Code::io;
  int sys_errno = 0;  // errno of the failing call, 0 where there was none
  std::string what;   // "what happened, to which key; what to do"

  // `what` with the system's reason before what to do: "cannot open 'x' (Permission denied); ...".
  // Where `what` does not say what to do, the usual cure of its errno follows.
  std::string sentence() const;
  // The sentence behind the name of its code: "no permission: cannot open 'x' ...".
  std::string message() const;
  // The same error with "context: " in front of what: the one annotation a module adds on its
  // boundary.
  Error with(std::string_view context) const;
};

// fail(code, "there is no '{}'", key): the error whose `what` is the text with its arguments put
// in, as fmt does it; the compiler checks that they fit.
Error make_error(Code code, fmt::string_view text, fmt::format_args args);
template <class... Args>
Error fail(Code code, fmt::format_string<Args...> text, Args&&... args) {
  return make_error(code, text, fmt::make_format_args(args...));
}

// The same for a system call: fail(errno, "opening '{}'", path). A path that cannot be (ENOTDIR,
// ELOOP, EISDIR, ENAMETOOLONG) is an invalid_argument; what has no code of its own is io.
Error make_error(int sys_errno, fmt::string_view text, fmt::format_args args);
template <class... Args>
Error fail(int sys_errno, fmt::format_string<Args...> text, Args&&... args) {
  return make_error(sys_errno, text, fmt::make_format_args(args...));
}

}  // namespace stoker
