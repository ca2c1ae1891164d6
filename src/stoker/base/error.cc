#include "stoker/base/error.h"

#include <cctype>
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

namespace {

// What to do about an errno where the text names nothing better.
std::string_view cure(int sys_errno) {
  switch (sys_errno) {
    case EACCES:
    case EPERM:
      return "; run it as a user who may, or change the permissions";
    case EROFS:
      return "; mount its file system for writing, or name another place";
    case ENOSPC:
      return "; free some space there, or name another place";
    case EDQUOT:
      return "; free some space there, or raise the quota";
    case ENOMEM:
      return "; free some memory, or lower the memory limits you gave";
    case EMFILE:
    case ENFILE:
      return "; raise the limit of open files (`ulimit -n`)";
    case EIO:
      return "; check the disk (`dmesg` tells what it answered)";
    default:
      return "";
  }
}

bool in_a_word(std::string_view text, size_t at) {
  return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
}

// Where the text ends that tells what happened: at the first "; " that is not in a quoted name.
size_t end_of_what_happened(std::string_view text) {
  bool quoted = false;
  for (size_t at = 0; at < text.size(); ++at) {
    // an apostrophe has a letter before it and, in a name, behind it
    if (text[at] == '\'')
      quoted = quoted ? in_a_word(text, at + 1) : at == 0 || !in_a_word(text, at - 1);
    else if (!quoted && text.substr(at, 2) == "; ")
      return at;
  }
  return text.size();
}

}  // namespace

std::string Error::sentence() const {
  if (sys_errno == 0) return what;
  const size_t end = end_of_what_happened(what);
  return fmt::format("{} ({}){}", std::string_view(what).substr(0, end),
                     std::generic_category().message(sys_errno),
                     end < what.size() ? std::string_view(what).substr(end) : cure(sys_errno));
}

std::string Error::message() const { return fmt::format("{}: {}", name(code), sentence()); }

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
