#include "stoker/io/loop.h"
#include "stoker/io/posix/engine.h"

namespace stoker {

Result<std::unique_ptr<Engine>> make_engine(const std::string& name, uint32_t depth) {
  if (name != "auto" && name != "posix") return make_error(Code::invalid_argument, "unknown I/O engine '" + name + "': choose auto or posix", "io");
  STOKER_ASSIGN(std::unique_ptr<Engine> engine, PosixEngine::make(depth));
  return engine;
}

}  // namespace stoker
