// What the tests of NVMe drives work on: the variable STOKER_TARGET names it, a namespace of the
// kernel's such as nvme:/dev/ng0n1, or a drive by its PCI address.
#pragma once

#include <cstdlib>
#include <string>

#include "stoker/io/loop.h"
#include "stoker/io/nvme/command.h"

namespace stoker {

inline std::string target() {
  const char* named = std::getenv("STOKER_TARGET");
  return named == nullptr ? "nvme:/dev/ng0n1" : named;
}

inline Result<std::unique_ptr<Engine>> make_engine_of_target(uint32_t depth) {
  return make_engine(nvme::is_pci_target(target()) ? "vfio" : "uring", depth);
}

// Runs one op on an engine that nobody else uses.
inline Result<size_t> run_op(Engine& engine, Op::Kind kind, FileId file, uint64_t offset,
                             Slice bytes) {
  Op op;
  op.kind = kind;
  op.file = file;
  op.offset = offset;
  op.bytes = bytes;
  op.done = [](Op&) noexcept {};
  Op* ops[] = {&op};
  STOKER_CHECK(engine.submit(ops) == 1);
  while (engine.poll(1'000'000'000) == 0) {
  }
  return op.result;
}

}  // namespace stoker
