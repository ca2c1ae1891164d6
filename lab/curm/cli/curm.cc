// stoker curm: update schemes compared on traces (curm_replay.cc); traces made; what the class tree
// learns from.
#include "curm/cli/curm.h"

#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "command.h"
#include "curm/generator.h"
#include "stoker/classes/classes.h"

namespace stoker::cli {
namespace {

struct GenerateArguments {
  std::string profile;
  uint64_t seed = 1, requests = 0;
};

Status generate(const GenerateArguments& arguments) {
  const curm::Profile* profile = curm::find_profile(arguments.profile);
  if (profile == nullptr && arguments.profile != "files") {
    std::string names;
    for (const curm::Profile& each : curm::profiles()) names += std::string(each.name) + ", ";
    return fail(Code::invalid_argument, "there is no profile `{}`; there are {}files",
                arguments.profile, names);
  }
  const std::string text =
      profile != nullptr ? msr_text(curm::generate(*profile, arguments.seed, arguments.requests))
                         : nfs_text(curm::generate_files(arguments.seed, arguments.requests));
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size())
    return fail(Code::io, "the trace could not be written to its end");
  return {};
}

struct SamplesArguments {
  std::vector<std::string> traces;
  bool lenient = false, made = false;
};

void print_header(std::span<const std::string_view> features) {
  std::string header = "trace";
  for (const std::string_view name : features) header += "," + std::string(name);
  std::printf("%s,class,said\n", header.c_str());
}

template <typename Features>
void print_sample(const curm::Trace& trace, const Features& features, Class was) {
  std::printf("%s", trace.name.c_str());
  for (const float feature : features) std::printf(",%.9g", static_cast<double>(feature));
  const Class said = ClassTree::shipped().classify(features);
  std::printf(",%s,%s\n", kClasses[static_cast<size_t>(was)].data(),
              kClasses[static_cast<size_t>(said)].data());
}

Status samples(const SamplesArguments& arguments) {
  print_header(arguments.made ? std::span<const std::string_view>(kCreationFeatureNames)
                              : kFeatureNames);
  for (const std::string& path : arguments.traces) {
    STOKER_ASSIGN(const curm::Trace trace, read_trace_and_tell(path, arguments.lenient));
    ClassTable table(ClassTree::shipped());
    if (arguments.made) {
      table.on_creation_sample(
          [&trace](const CreationFeatures& known, Class was) { print_sample(trace, known, was); });
    } else {
      table.on_sample([&trace](const ClassFeatures& features, Class was) {
        print_sample(trace, features, was);
      });
    }
    // a volume tells of no files: its stripes are the objects, as in a replay of 6+3
    constexpr uint64_t kObjectBytes = 6 << 20;
    curm::show(trace, kObjectBytes, table);
  }
  return {};
}

}  // namespace

Result<curm::Trace> read_trace_and_tell(const std::string& path, bool lenient) {
  auto trace = curm::read_trace(path, lenient);
  if (trace && trace->others > 0)
    std::fprintf(stderr, "stoker: %s: left out %llu operations that neither read nor write\n",
                 trace->name.c_str(), static_cast<unsigned long long>(trace->others));
  if (!trace || trace->malformed == 0) return trace;
  std::fprintf(stderr, "stoker: %s: skipped %llu malformed lines\n", trace->name.c_str(),
               static_cast<unsigned long long>(trace->malformed));
  for (const std::string& complaint : trace->complaints)
    std::fprintf(stderr, "stoker:   %s\n", complaint.c_str());
  return trace;
}

Result<TraceWrites> read_trace_writes(const std::string& path) {
  STOKER_ASSIGN(const curm::Trace trace, read_trace_and_tell(path, true));
  TraceWrites writes;
  writes.name = trace.name;
  for (const curm::Request& request : trace.requests) {
    if (request.write) writes.writes.push_back({request.object, request.offset, request.bytes});
  }
  return writes;
}

void add_curm(CLI::App& app, ExitStatus& status) {
  CLI::App* curm = app.add_subcommand(
      "curm",
      "Erasure-coded updates: compare schemes on traces, make traces, train the class tree");
  curm->require_subcommand(1);
  add_curm_replay(*curm, status);

  const auto generated = std::make_shared<GenerateArguments>();
  CLI::App* command = curm->add_subcommand(
      "generate", "Print a trace made by a seed, with the statistics of a public one");
  command
      ->add_option(
          "PROFILE", generated->profile,
          "rsrch, hm, wdev, mds or vm; postmark or oltp: small files all over a volume, pages at "
          "random places; files: NFS records of named files that are made and removed")
      ->required();
  command->add_option("--seed", generated->seed, "Another seed, another trace")
      ->capture_default_str();
  command
      ->add_option("--requests", generated->requests,
                   "How many (default: as many as the profile's)")
      ->check(CLI::Range(1, 100'000'000));
  command->callback([generated, &status] {
    if (const Status done = generate(*generated); !done) tell(status, done.error());
  });

  const auto sampled = std::make_shared<SamplesArguments>();
  command = curm->add_subcommand(
      "samples",
      "Print what the class tree learns from, as CSV: features, and the class that came true");
  command->add_option("TRACE", sampled->traces, "Trace files")->required();
  command->add_flag("--made", sampled->made,
                    "What was known of each file when it was made, and what it was used for; else "
                    "the same of each window of requests");
  command->add_flag("--lenient", sampled->lenient, "Skip malformed lines");
  command->callback([sampled, &status] {
    if (const Status done = samples(*sampled); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
