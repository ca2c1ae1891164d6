// `stoker curm` in a build without the lab (STOKER_LAB): it says where the command is to be had.
#include "bench.h"
#include "command.h"

namespace stoker::cli {
namespace {

Error no_lab() {
  return fail(Code::unsupported,
              "this build of stoker has no lab; `make build-tests` in a clone of its sources "
              "builds one that has `stoker curm`");
}

}  // namespace

Result<TraceWrites> read_trace_writes(const std::string& path) {
  return no_lab().with("the trace '" + path + "' cannot be read");
}

void add_curm(CLI::App& app, ExitStatus& status) {
  CLI::App* curm =
      app.add_subcommand("curm", "Erasure-coded updates compared on traces (not in this build)");
  curm->allow_extras();
  curm->callback([&status] { tell(status, no_lab()); });
}

}  // namespace stoker::cli
