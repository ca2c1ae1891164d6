// stoker curm replay: the writes of traces, by each update scheme, on a modelled cluster or on real
// files.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "curm/choosing.h"
#include "curm/cli/curm.h"
#include "curm/file_replay.h"
#include "curm/replay.h"
#include "curm/scheme_switch.h"

namespace stoker::cli {
namespace {

using curm::ReplayOptions;
using curm::ReplayResult;

struct ReplayArguments {
  std::vector<std::string> traces;
  std::vector<std::string> codes = {"6+3"};
  std::string scheme = "all", form = "both", mode = "modelled", device = "ssd", tree, plot;
  ReplayOptions options;
  std::string log = "64MiB", chunk = "1MiB", reserve = "256KiB", folder;
  bool json = false, lenient = false, keep = false;
  bool on_files() const { return mode == "files"; }
};

double per(uint64_t count, uint64_t of) {
  return of == 0 ? 0 : static_cast<double>(count) / static_cast<double>(of);
}

// The fields of the comparison, and nothing else.
Json row(const std::string& trace, std::string_view scheme, curm::Form form,
         const std::string& code, const std::string& mode, const ReplayResult& result) {
  const curm::Counts& counts = result.counts;
  const uint64_t updates = result.updates;
  return {{"trace", trace},
          {"scheme", scheme},
          {"form", form == curm::Form::safe ? "safe" : "published"},
          {"code", code},
          {"mode", mode},
          {"updates", updates},
          {"foreground_reads_per_update", per(counts.reads, updates)},
          {"foreground_random_writes_per_update", per(counts.random_writes, updates)},
          {"foreground_sequential_writes_per_update", per(counts.sequential_writes, updates)},
          {"foreground_bytes_per_byte", per(counts.payload_bytes, result.update_bytes)},
          {"background_bytes_per_byte", per(counts.background_payload_bytes, result.update_bytes)},
          {"messages_per_update", per(counts.messages, updates)},
          {"round_trips_per_update", per(counts.round_trips, updates)},
          {"flushes_per_update", per(counts.flushes, updates)},
          {"updates_per_second", result.updates_per_second},
          {"p50_us", result.p50_us},
          {"p99_us", result.p99_us},
          {"recovery_seconds", result.recovery_seconds},
          {"space_peak_bytes", result.space_peak_bytes}};
}

// What else was counted, in the order of the results.
Json more(const ReplayResult& result) {
  return {
      {"foreground_framing_bytes_per_byte", per(result.counts.framing_bytes, result.update_bytes)},
      {"background_framing_bytes_per_byte",
       per(result.counts.background_framing_bytes, result.update_bytes)},
      {"background_reads_per_update", per(result.counts.background_reads, result.updates)},
      {"background_writes_per_update", per(result.counts.background_writes, result.updates)},
      {"drained_updates_per_second", result.drained_updates_per_second},
      {"space_base_bytes", result.space_base_bytes},
      {"reserved_peak_bytes", result.reserved_peak_bytes},
      {"update_bytes", result.update_bytes}};
}

Json settings_json(const ReplayArguments& arguments) {
  const ReplayOptions& options = arguments.options;
  const curm::Device& device = options.device;
  Json json = {{"stoker", STOKER_VERSION},
               {"nodes", options.nodes},
               {"clients", options.clients},
               {"chunk_bytes", options.chunk_bytes},
               {"log_bytes", options.log_bytes},
               {"reserved_bytes", options.reserved_bytes},
               {"device",
                {{"name", device.name},
                 {"lanes", device.lanes},
                 {"random_read_us", static_cast<double>(device.random_read_ns) / 1e3},
                 {"random_write_us", static_cast<double>(device.random_write_ns) / 1e3},
                 {"following_us", static_cast<double>(device.next_ns) / 1e3},
                 {"flush_us", static_cast<double>(device.flush_ns) / 1e3},
                 {"read_bytes_per_s", device.read_bytes_per_s},
                 {"write_bytes_per_s", device.write_bytes_per_s},
                 {"link_bytes_per_s", device.link_bytes_per_s},
                 {"message_us", static_cast<double>(device.link_ns) / 1e3}}}};
  if (arguments.on_files()) {
    json["machine"] = bench_machine();
    json["device"] = {{"name", "files"}};
  }
  return json;
}

// How right the class tree is, and what it costs to be wrong: CURM with it, without it, and with
// the contrary of what it says.
Result<Json> class_row(const curm::Trace& trace, const ReplayOptions& options,
                       const ClassTree& tree) {
  ClassTable table(tree);
  const uint64_t object_bytes = static_cast<uint64_t>(options.k) * options.chunk_bytes;
  curm::show(trace, object_bytes, table);
  const ClassTable::Score& score = table.score();
  const ClassTable::Score& made = table.creation_score();
  Json json = {{"trace", trace.name},
               {"judged", score.judged},
               {"accuracy", per(score.right, score.judged)},
               {"majority_accuracy", per(score.majority_right, score.judged)},
               {"windows_not_trusted", score.distrusted},
               {"made",
                {{"judged", made.judged},
                 {"accuracy", per(made.right, made.judged)},
                 {"majority_accuracy", per(made.majority_right, made.judged)},
                 {"not_trusted", made.distrusted}}}};
  for (size_t each = 0; each < kClasses.size(); ++each)
    json["truth"][std::string(kClasses[each])] = score.truth[each];
  const ClassTree contrary = tree.contrary();
  for (const auto& [name, classes] : {std::pair<const char*, const ClassTree*>{"tree", &tree},
                                      {"no_classes", nullptr},
                                      {"contrary", &contrary}}) {
    STOKER_ASSIGN(const ReplayResult result,
                  curm::replay(trace, "curm", curm::Form::safe, options, classes));
    json[name] = {{"background_bytes_per_byte",
                   per(result.counts.background_payload_bytes, result.update_bytes)},
                  {"updates_per_second", result.updates_per_second}};
  }
  return json;
}

Result<ClassTree> tree_of(const std::string& path) {
  if (path.empty()) return ClassTree::shipped();
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return fail(Code::not_found, "the class tree {} cannot be read; check the path", path);
  return ClassTree::parse(text);
}

// One scheme on one trace; a row of the results, and what else was counted. Schemes that were
// changed in use are not compared: theirs is a row of its own.
Status replay_one(const ReplayArguments& arguments, const curm::Trace& trace,
                  std::string_view scheme, curm::Form form, const std::string& code,
                  const ClassTree& tree, bool last, Json& json) {
  if (!arguments.on_files()) {
    STOKER_ASSIGN(const ReplayResult result,
                  curm::replay(trace, scheme, form, arguments.options, &tree));
    json["results"].push_back(row(trace.name, scheme, form, code, arguments.mode, result));
    json["more"].push_back(more(result));
    return {};
  }
  curm::FileReplayOptions files;
  files.folder = arguments.folder;
  files.keep = arguments.keep && last;
  files.tell = [&trace](const std::string& what) {
    std::fprintf(stderr, "stoker: %s, %s\n", trace.name.c_str(), what.c_str());
  };
  STOKER_ASSIGN(const curm::FileReplayResult done,
                curm::replay_on_files(trace, scheme, arguments.options, files, &tree));
  Json result = row(trace.name, scheme, form, code, arguments.mode, done.result);
  Json rest = more(done.result);
  rest["disk_bytes_read_per_byte"] = per(done.disk_bytes_read, done.result.update_bytes);
  rest["disk_bytes_written_per_byte"] = per(done.disk_bytes_written, done.result.update_bytes);
  rest["disk_flushes_per_update"] = per(done.disk_flushes, done.result.updates);
  rest["verified_bytes"] = done.verified_bytes;
  json["settings"]["device"]["engine"] = done.engine;
  json["settings"]["device"]["direct"] = done.direct;
  if (scheme == curm::kSwitch) {
    result.update(rest);
    result["changes"] = done.changes;
    result["writes_by_scheme"] = done.writes_by_scheme;
    json["switched"].push_back(std::move(result));
    return {};
  }
  json["results"].push_back(std::move(result));
  json["more"].push_back(std::move(rest));
  return {};
}

Status check_mode(const ReplayArguments& arguments) {
  if (!arguments.on_files()) {
    if (arguments.scheme == curm::kSwitch)
      return fail(
          Code::unsupported,
          "schemes are changed in use on real files alone: take --mode files, with a --dir");
    if (!arguments.folder.empty() || arguments.keep)
      return fail(Code::invalid_argument,
                  "--dir and --keep are for --mode files: a modelled cluster has no files");
    return {};
  }
  if (arguments.form == "published")
    return fail(Code::unsupported,
                "published forms are modelled only: what they leave after a crash nobody could "
                "recover; take --form safe, or --mode modelled");
  if (arguments.scheme == curm::kSwitch && !arguments.plot.empty())
    return fail(Code::unsupported,
                "a plot compares schemes, each by itself: leave out --plot, or take --scheme all");
  if (arguments.folder.empty())
    return fail(Code::invalid_argument,
                "--mode files needs --dir, a folder on the disk that is to be measured");
  return {};
}

Result<Json> run(ReplayArguments& arguments) {
  STOKER_TRY(check_mode(arguments));
  ReplayOptions& options = arguments.options;
  options.device = arguments.device == "hdd" ? curm::kHdd : curm::kSsd;
  STOKER_ASSIGN(options.log_bytes, parse_bytes(arguments.log));
  STOKER_ASSIGN(options.chunk_bytes, parse_bytes(arguments.chunk));
  STOKER_ASSIGN(options.reserved_bytes, parse_bytes(arguments.reserve));
  if (options.chunk_bytes < 64 * kKiB || options.chunk_bytes > 4 * kMiB)
    return fail(Code::invalid_argument, "a chunk of {} is not possible: give 64 KiB to 4 MiB",
                human_bytes(options.chunk_bytes));
  if (options.log_bytes < kMiB)
    return fail(Code::invalid_argument, "logs of {} are too small: give at least 1 MiB",
                human_bytes(options.log_bytes));
  if (options.reserved_bytes < 4 * kKiB || options.reserved_bytes > options.chunk_bytes)
    return fail(Code::invalid_argument,
                "a reserve of {} is not possible: give 4 KiB to the size of a chunk",
                human_bytes(options.reserved_bytes));
  STOKER_ASSIGN(const ClassTree tree, tree_of(arguments.tree));

  std::vector<curm::Trace> traces;
  for (const std::string& path : arguments.traces) {
    STOKER_ASSIGN(curm::Trace trace, read_trace_and_tell(path, arguments.lenient));
    traces.push_back(std::move(trace));
  }
  std::vector<std::string_view> schemes = {arguments.scheme};
  if (arguments.scheme == "all")
    schemes.assign(std::begin(curm::kSchemes), std::end(curm::kSchemes));
  Json json = {{"settings", settings_json(arguments)},
               {"results", Json::array()},
               {"more", Json::array()},
               {"classes", Json::array()},
               {"switched", Json::array()}};
  for (const std::string& code : arguments.codes) {
    STOKER_ASSIGN(const auto coder, parse_code(code));
    options.k = coder.k();
    options.m = coder.m();
    for (const curm::Trace& trace : traces) {
      for (const std::string_view scheme : schemes) {
        for (const curm::Form form : {curm::Form::published, curm::Form::safe}) {
          if (arguments.form != "both" && (arguments.form == "safe") != (form == curm::Form::safe))
            continue;
          if (arguments.on_files() && form == curm::Form::published) continue;
          const bool last = &code == &arguments.codes.back() && &trace == &traces.back() &&
                            scheme == schemes.back();
          STOKER_TRY(replay_one(arguments, trace, scheme, form, code, tree, last, json));
        }
      }
      if (!arguments.on_files() && (arguments.scheme == "all" || arguments.scheme == "curm")) {
        STOKER_ASSIGN(Json classes, class_row(trace, options, tree));
        classes["code"] = code;
        json["classes"].push_back(std::move(classes));
      }
    }
  }
  return json;
}

void print_table(const Json& json) {
  const Json& settings = json["settings"];
  const std::string device = settings["device"]["name"].get<std::string>();
  std::printf(
      "%s: %d nodes %s, %d clients, logs of %s; reads, writes, bytes, messages, round trips and "
      "flushes are those of one update\n",
      device == "files" ? "real files" : "modelled", settings["nodes"].get<int>(),
      device == "files" ? "that share this machine's disk"
                        : ("with one " + device + " each").c_str(),
      settings["clients"].get<int>(), human_bytes(settings["log_bytes"].get<uint64_t>()).c_str());
  std::printf("%-26s %-5s %-12s %-9s %6s %7s %7s %7s %7s %6s %5s %7s %10s %9s %9s %8s %9s\n",
              "trace", "code", "scheme", "form", "reads", "random", "sequent", "fg B/B", "bg B/B",
              "msgs", "trips", "flushes", "updates/s", "p50 us", "p99 us", "rebuild", "space");
  Json rows = json["results"];
  for (const Json& switched : json["switched"]) rows.push_back(switched);
  for (const Json& r : rows) {
    const auto text = [&](const char* key) { return r[key].get<std::string>(); };
    const auto real = [&](const char* key) { return r[key].get<double>(); };
    std::printf(
        "%-26s %-5s %-12s %-9s %6.2f %7.2f %7.2f %7.2f %7.2f %6.2f %5.2f %7.2f %10.0f %9.0f %9.0f "
        "%7.2fs %9s\n",
        text("trace").c_str(), text("code").c_str(), text("scheme").c_str(), text("form").c_str(),
        real("foreground_reads_per_update"), real("foreground_random_writes_per_update"),
        real("foreground_sequential_writes_per_update"), real("foreground_bytes_per_byte"),
        real("background_bytes_per_byte"), real("messages_per_update"),
        real("round_trips_per_update"), real("flushes_per_update"), real("updates_per_second"),
        real("p50_us"), real("p99_us"), real("recovery_seconds"),
        human_bytes(r["space_peak_bytes"].get<uint64_t>()).c_str());
  }
  for (const Json& s : json["switched"]) {
    std::printf("schemes of %s (%s) were changed %llu times in use; writes of stripes by each:",
                s["trace"].get<std::string>().c_str(), s["code"].get<std::string>().c_str(),
                s["changes"].get<unsigned long long>());
    for (const auto& [scheme, writes] : s["writes_by_scheme"].items())
      std::printf(" %s %llu", scheme.c_str(), writes.get<unsigned long long>());
    std::printf("\n");
  }
  for (const Json& c : json["classes"]) {
    std::printf(
        "classes of %s (%s): %llu judged, right %.1f %%, the majority class %.1f %%; background "
        "bytes per byte %.2f with the tree, %.2f without classes, %.2f with wrong ones\n",
        c["trace"].get<std::string>().c_str(), c["code"].get<std::string>().c_str(),
        c["judged"].get<unsigned long long>(), 100 * c["accuracy"].get<double>(),
        100 * c["majority_accuracy"].get<double>(),
        c["tree"]["background_bytes_per_byte"].get<double>(),
        c["no_classes"]["background_bytes_per_byte"].get<double>(),
        c["contrary"]["background_bytes_per_byte"].get<double>());
    if (const Json& made = c["made"]; made["judged"].get<uint64_t>() > 0) {
      std::printf(
          "  when its files were made: %llu judged, right %.1f %%, the majority class %.1f %%\n",
          static_cast<unsigned long long>(made["judged"].get<uint64_t>()),
          100 * made["accuracy"].get<double>(), 100 * made["majority_accuracy"].get<double>());
    }
  }
}

Status write_plot(const std::string& path, const Json& json) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << replay_svg(json);
  file.close();
  if (!file)
    return fail(Code::io, "the plot {} cannot be written; check the folder and its space", path);
  return {};
}

}  // namespace

void add_curm_replay(CLI::App& curm, ExitStatus& status) {
  const auto arguments = std::make_shared<ReplayArguments>();
  ReplayOptions& options = arguments->options;
  CLI::App* command = curm.add_subcommand("replay",
                                          "Compare update schemes on traces: counts, throughput, "
                                          "latency, recovery, space; modelled, or on real files");
  command
      ->add_option("TRACE", arguments->traces,
                   "Trace files: MSR Cambridge CSV, CloudPhysics CSV or nfsdump records")
      ->required();
  std::vector<std::string> schemes = {"all"};
  schemes.insert(schemes.end(), std::begin(curm::kSchemes), std::end(curm::kSchemes));
  schemes.emplace_back(curm::kChoose);
  schemes.emplace_back(curm::kSwitch);
  command
      ->add_option("--scheme", arguments->scheme,
                   "all, or one; choose (not among all): fo or curm for each stripe, by what is "
                   "measured of it; switch (of --mode files, not among all): before every eighth "
                   "write its stripe is given the next one, while others write")
      ->capture_default_str()
      ->check(CLI::IsMember(schemes));
  command
      ->add_option("--form", arguments->form,
                   "As published, safe through crashes, or both; on files safe alone")
      ->capture_default_str()
      ->check(CLI::IsMember({"published", "safe", "both"}));
  command->add_option("--code", arguments->codes, "Data and parity chunks; several may be given")
      ->capture_default_str()
      ->delimiter(',');
  command
      ->add_option("--mode", arguments->mode,
                   "On a modelled cluster, or (safe forms) on real files of this machine")
      ->capture_default_str()
      ->check(CLI::IsMember({"modelled", "files"}));
  command->add_option(
      "--dir", arguments->folder,
      "Of --mode files: where the nodes' folders are made; they are removed at the end");
  command->add_flag(
      "--keep", arguments->keep,
      "Of --mode files: leave the folders of the last scheme (of the last trace and code)");
  command->add_option("--nodes", options.nodes, "Nodes, each with a disk and a network card")
      ->capture_default_str()
      ->check(CLI::Range(2, 10'000));
  command->add_option("--clients", options.clients, "Writers, each with one write under way")
      ->capture_default_str()
      ->check(CLI::Range(1, 100'000));
  command
      ->add_option("--device", arguments->device,
                   "Of --mode modelled: preset of the disks; --json tells its parameters")
      ->capture_default_str()
      ->check(CLI::IsMember({"ssd", "hdd"}));
  command->add_option("--chunk", arguments->chunk, "Size of a chunk")->capture_default_str();
  command
      ->add_option("--log", arguments->log,
                   "Updates that the logs hold before stripes are folded, one copy, over all nodes")
      ->capture_default_str();
  command
      ->add_option("--reserve", arguments->reserve,
                   "Space behind each parity chunk for plr; of curm-reserve the most for a hot "
                   "stripe in a log")
      ->capture_default_str();
  command->add_option("--tree", arguments->tree,
                      "Class tree of classes/training/train.py (default: the one that ships)");
  command->add_flag("--lenient", arguments->lenient, "Skip malformed lines, and tell how many");
  command->add_flag("--json", arguments->json, "Print the results as JSON");
  command->add_option("--plot", arguments->plot, "Write the results as an SVG");
  command->callback([arguments, &status] {
    const auto json = run(*arguments);
    if (!json) return tell(status, json.error());
    if (!arguments->plot.empty()) {
      if (const Status written = write_plot(arguments->plot, *json); !written)
        return tell(status, written.error());
    }
    if (arguments->json) {
      std::printf("%s\n", json->dump(2).c_str());
    } else {
      print_table(*json);
    }
  });
}

}  // namespace stoker::cli
