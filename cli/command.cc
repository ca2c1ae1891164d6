#include "command.h"

#include <cstdio>

namespace stoker::cli {

void fail(ExitStatus& status, const Error& error) {
  std::fprintf(stderr, "stoker: %s\n", error.message().c_str());
  status.code = 1;
}

}  // namespace stoker::cli
