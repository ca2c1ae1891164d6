#include "stoker/base/error.h"

#include <cerrno>
#include <system_error>

namespace stoker {

std::string_view name(Code code) {
  switch (code) {
    case Code::invalid_argument:
      return "invalid argument";
    case Code::not_found:
      return "not found";
    case Code::already_exists:
      return "already exists";
    case Code::out_of_space:
      return "out of space";
    case Code::over_budget:
      return "over budget";
    case Code::corruption:
      return "corruption";
    case Code::busy:
      return "busy";
    case Code::read_only:
      return "read only";
    case Code::no_permission:
      return "no permission";
    case Code::io:
      return "i/o error";
    case Code::unsupported:
      return "unsupported";
    case Code::cancelled:
      return "cancelled";
    case Code::mismatch:
      return "mismatch";
    case Code::conflict:
      return "conflict";
    case Code::in_doubt:
      return "in doubt";
    case Code::unavailable:
      return "unavailable";
  }
  return "unknown";
}

std::string Error::message() const {
  std::string text(name(code));
  text += ": ";
  text += what;
  if (sys_errno != 0) {
    text += " (";
    text += std::generic_category().message(sys_errno);
    text += ")";
  }
  return text;
}

Error Error::with(std::string_view context) const {
  Error copy = *this;
  copy.what = std::string(context) + ": " + what;
  return copy;
}

Error make_error(Code code, fmt::string_view text, fmt::format_args args) {
  return Error{code, 0, fmt::vformat(text, args)};
}

Error make_error(int sys_errno, fmt::string_view text, fmt::format_args args) {
  Code code = Code::io;
  switch (sys_errno) {
    case ENOSPC:
    case EDQUOT:
      code = Code::out_of_space;
      break;
    case ENOENT:
      code = Code::not_found;
      break;
    case EEXIST:
      code = Code::already_exists;
      break;
    case EACCES:
    case EPERM:
      code = Code::no_permission;
      break;
    case EROFS:
      code = Code::read_only;
      break;
    case EBUSY:
    case EWOULDBLOCK:
      code = Code::busy;
      break;
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case EINVAL:
      code = Code::invalid_argument;
      break;
    case ENOMEM:
      code = Code::over_budget;
      break;
    case ENOSYS:
    case EOPNOTSUPP:
      code = Code::unsupported;
      break;
    default:
      break;
  }
  return Error{code, sys_errno, fmt::vformat(text, args)};
}

}  // namespace stoker
