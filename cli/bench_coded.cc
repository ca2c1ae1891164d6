// stoker bench coded: what a coded store moves a second, beside plain files on the same disk, in
// turn; and a trace of updates played against both.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "bench_updates.h"
#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/io/load.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

namespace fs = std::filesystem;
using Time = std::chrono::steady_clock;

constexpr size_t kShards = 9, kData = 6, kParities = 3;
constexpr uint64_t kCommitBytes = kGiB;     // of a put, as `stoker put` does it
constexpr uint64_t kPieceBytes = 8 * kMiB;  // of a read, as `stoker export` does it
constexpr size_t kReadsAhead = 8;
constexpr uint32_t kPlainDepth = 32;  // of direct I/O, in MiB
constexpr size_t kMediumReads = 256;
constexpr uint64_t kMemoryBytes = 64 * kMiB;
constexpr uint64_t kUpdateBytes = 4096;
constexpr uint64_t kUpdatedBytes = 16 * kMiB;  // an object of a writer
constexpr uint64_t kTraceBytes = 6 * kMiB;     // an object of a trace
constexpr const char* kKey = "data";

struct CodedBenchArguments {
  std::string folder;
  std::string size = "1GiB";
  int rounds = 3;
  double seconds = 3;
  std::vector<std::string> kinds;  // none: all
  std::vector<std::string> traces;
  uint64_t requests = 10000;
  size_t writers = 16;
  bool json = false;
};

// One measure in all rounds.
struct Samples {
  std::vector<double> coded, plain, coded_cpu;  // bytes a second; CPU seconds for each GB
  std::vector<double> plain_used;               // likewise, where what was read is looked at
};

struct Measure {
  const char* name;
  const char* what;
  double goal;     // of the share of plain files
  double counted;  // bytes that move on the disks, for each byte
};

constexpr const char* kUpdates = "updates";
constexpr const char* kTraces = "traces";

constexpr std::array<Measure, 6> kMeasures = {{
    {"put", "put, 1 GiB a transaction; direct write and flush", 0.8, 1.5},
    {"read", "read, 8 MiB pieces, 8 ahead; direct read", 0.8, 1},
    {"read_without_m", "the same without 3 disks; direct read", 0.5, 1},
    {"read_1mib", "random reads of 1 MiB, one at a time; the same, direct", 0.8, 1},
    {"scrub", "scrub; direct read", 0.5, 1},
    {"rebuild", "rebuild of a lost disk; 6 bytes read, 1 written", 0.5, 1},
}};

struct UpdateSamples {
  size_t writers = 1;
  bool aligned = true;
  std::vector<UpdateRun> coded, plain;
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double seconds_since(Time::time_point begun) {
  return std::chrono::duration<double>(Time::now() - begun).count();
}

// Direct I/O on one file of the disk.
class PlainFile {
 public:
  static Result<std::unique_ptr<PlainFile>> make(Loop& loop, const std::string& path,
                                                 uint64_t bytes, Slice memory) {
    STOKER_ASSIGN(const FileInfo file,
                  loop.open({.path = path, .create = true, .reserve_bytes = bytes}));
    return std::unique_ptr<PlainFile>(new PlainFile(loop, file, bytes, memory));
  }
  ~PlainFile() { (void)loop_.close(file_.id); }
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;

  // Bytes a second, as all of these.
  Result<double> write() {
    const auto begun = Time::now();
    STOKER_TRY(load(Load::Kind::write));
    IoBatch flush(loop_, Priority::demand);
    flush.sync(file_.id);
    STOKER_TRY(flush.run());
    return static_cast<double>(bytes_) / seconds_since(begun);
  }
  Result<double> read() {
    const auto begun = Time::now();
    STOKER_TRY(load(Load::Kind::read));
    return static_cast<double>(bytes_) / seconds_since(begun);
  }
  // `use`: and takes the checksum of each, as the store does. On some machines a transfer into
  // memory that a processor has looked at is slower than one into memory that none has.
  Result<double> read_medium(bool use) {
    std::mt19937_64 random(use ? 6 : 5);  // elsewhere
    const auto begun = Time::now();
    uint32_t crc = 0;
    for (size_t i = 0; i < kMediumReads; ++i) {
      IoBatch one(loop_, Priority::demand);
      one.read(file_.id, random() % (bytes_ / kMiB) * kMiB, memory_.sub(0, kMiB));
      STOKER_TRY(one.run());
      if (use) crc = crc32c(memory_.data, kMiB, crc);
    }
    used_ = crc;
    return static_cast<double>(kMediumReads * kMiB) / seconds_since(begun);
  }

 private:
  PlainFile(Loop& loop, FileInfo file, uint64_t bytes, Slice memory)
      : loop_(loop), file_(file), bytes_(bytes), memory_(memory) {}
  Status load(Load::Kind kind) {
    const auto done = run_load(loop_, file_.id, memory_, {kind, kMiB, kPlainDepth, bytes_});
    return done ? Status() : Status(done.error());
  }

  Loop& loop_;
  const FileInfo file_;
  const uint64_t bytes_;
  const Slice memory_;
  volatile uint32_t used_ = 0;  // so that no compiler leaves it out
};

// A store over nine folders of the disk.
class CodedFolder {
 public:
  CodedFolder(std::string root, const Runtime& runtime)
      : root_(std::move(root)), runtime_(runtime) {
    for (size_t i = 0; i < kShards; ++i) plan_.paths.push_back(root_ + "/d" + std::to_string(i));
    plan_.k = kData;
    plan_.m = kParities;
  }
  Result<std::unique_ptr<coded::CodedStore>> make(uint64_t capacity) const {
    StoreOptions options;
    options.create = options.same_disk = true;
    options.capacity_bytes = capacity;
    return coded::CodedStore::open(plan_, runtime_, options, {});
  }
  Result<std::unique_ptr<coded::CodedStore>> open(bool read_only) const {
    StoreOptions options;
    options.same_disk = true;
    options.read_only = read_only;
    return coded::CodedStore::open(plan_, runtime_, options, {});
  }
  // As after the loss of a disk that was replaced. Nothing goes on in it by itself.
  Result<std::unique_ptr<coded::CodedStore>> lose_one() const {
    std::error_code error;
    fs::remove_all(plan_.paths[0], error);
    if (error) return fail(error.value(), "cannot remove '{}'", plan_.paths[0]);
    StoreOptions options;
    options.same_disk = true;
    options.replace = {plan_.paths[0]};
    CodedOptions coded;
    coded.background = false;
    return coded::CodedStore::open(plan_, runtime_, options, coded);
  }
  // Takes m disks away, or brings them back.
  Status hide(bool hidden) const {
    for (size_t i = 0; i < kParities; ++i) {
      const std::string away = plan_.paths[i] + ".away";
      std::error_code error;
      fs::rename(hidden ? plan_.paths[i] : away, hidden ? away : plan_.paths[i], error);
      if (error) return fail(error.value(), "cannot rename '{}'", plan_.paths[i]);
    }
    return {};
  }

 private:
  const std::string root_;
  const Runtime runtime_;
  CodedPlan plan_;
};

// How many bytes it moved; so all of these.
Result<uint64_t> put(Store& store, const std::string& key, uint64_t bytes, Slice memory) {
  for (uint64_t at = 0; at < bytes;) {
    STOKER_ASSIGN(const auto change, store.begin());
    const uint64_t end = std::min(bytes, at + kCommitBytes);
    for (; at < end; at += kPieceBytes) {
      const size_t size = static_cast<size_t>(std::min(kPieceBytes, end - at));
      STOKER_TRY(change->resize(key, at + size));
      STOKER_TRY(change->write(key, at, memory.sub(at % kMemoryBytes, size)).wait());
    }
    at = end;
    if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
  }
  return bytes;
}

Result<uint64_t> read_all(Store& store, uint64_t bytes, Slice memory) {
  std::deque<Future<void>> ahead;
  Status status;
  for (uint64_t at = 0; at < bytes && status; at += kPieceBytes) {
    if (ahead.size() == kReadsAhead) {
      status = ahead.front().wait();
      ahead.pop_front();
    }
    const size_t size = static_cast<size_t>(std::min(kPieceBytes, bytes - at));
    ahead.push_back(store.read(kKey, at, memory.sub(at % kMemoryBytes, size)));
  }
  for (const Future<void>& each : ahead) {
    const Status done = each.wait();
    if (status) status = done;
  }
  if (!status) return status.error();
  return bytes;
}

Result<uint64_t> read_medium(Store& store, uint64_t bytes, Slice memory) {
  std::mt19937_64 random(5);
  for (size_t i = 0; i < kMediumReads; ++i)
    STOKER_TRY(store.read(kKey, random() % (bytes / kMiB) * kMiB, memory.sub(0, kMiB)).wait());
  return kMediumReads * kMiB;
}

Result<uint64_t> scrub(coded::CodedStore& store) {
  const auto report = std::make_shared<ScrubReport>();
  if (const auto& done = store.scrub(report).wait(); !done) return done.error();
  return report->bytes;
}

Result<uint64_t> rebuild(coded::CodedStore& store) {
  if (const auto& done = store.repair().wait(); !done) return done.error();
  return store.health().rebuilt_bytes;
}

// What rebuilding could be: for each byte written as many as there are data chunks are read.
Result<double> rebuild_plainly(PlainFile& plain) {
  STOKER_ASSIGN(const double reads, plain.read());
  STOKER_ASSIGN(const double writes, plain.write());
  return 1 / (static_cast<double>(kData) / reads + 1 / writes);
}

class Bench {
 public:
  Bench(const CodedBenchArguments& arguments, uint64_t bytes, RuntimeOwner& owner, Slice memory)
      : arguments_(arguments),
        bytes_(bytes),
        owner_(owner),
        memory_(memory),
        root_(arguments.folder + "/stoker-bench-coded") {
    for (const size_t writers : {size_t{1}, arguments.writers}) {
      for (const bool aligned : {true, false}) updates_.push_back({writers, aligned, {}, {}});
    }
  }
  ~Bench() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Status run() {
    const std::vector<std::string>& kinds = arguments_.kinds;
    const bool rounds =
        kinds.empty() ||
        std::any_of(kinds.begin(), kinds.end(), [](const auto& kind) { return kind != kTraces; });
    for (int i = 0; i < arguments_.rounds && rounds; ++i) {
      std::fprintf(stderr, "round %d of %d\n", i + 1, arguments_.rounds);
      plain_first_ = i % 2 == 0;
      STOKER_TRY(clean());
      STOKER_TRY(round());
    }
    for (const std::string& path :
         wanted(kTraces) ? arguments_.traces : std::vector<std::string>{}) {
      STOKER_TRY(clean());
      STOKER_ASSIGN(Json played, play(path));
      traces_.push_back(std::move(played));
    }
    return {};
  }

  Json json() const {
    Json json = {{"machine", bench_machine()},
                 {"code", "6+3"},
                 {"bytes", bytes_},
                 {"update_bytes", kUpdateBytes},
                 {"engine", owner_.loop().traits().name},
                 {"results", Json::array()},
                 {"updates", Json::array()},
                 {"traces", traces_}};
    for (const Measure& measure : kMeasures) {
      if (!wanted(measure.name)) continue;
      const Samples& samples = samples_.at(measure.name);
      std::vector<double> shares;  // of pairs that stood beside each other
      for (size_t i = 0; i < samples.coded.size(); ++i)
        shares.push_back(measure.counted * samples.coded[i] / samples.plain[i]);
      json["results"].push_back({{"measure", measure.name},
                                 {"what", measure.what},
                                 {"coded_bytes_per_second", median(samples.coded)},
                                 {"plain_bytes_per_second", median(samples.plain)},
                                 {"counted_bytes_a_byte", measure.counted},
                                 {"share", median(shares)},
                                 {"goal", measure.goal},
                                 {"coded_cpu_seconds_per_gb", median(samples.coded_cpu)},
                                 {"load_average", load_average_},
                                 {"coded_all", samples.coded},
                                 {"plain_all", samples.plain},
                                 {"plain_used_all", samples.plain_used}});
    }
    for (const UpdateSamples& samples : wanted(kUpdates) ? updates_ : std::vector<UpdateSamples>{})
      json["updates"].push_back({{"writers", samples.writers},
                                 {"aligned", samples.aligned},
                                 {"seconds", arguments_.seconds},
                                 {"load_average", load_average_},
                                 {"coded", rounds_json(samples.coded)},
                                 {"plain", rounds_json(samples.plain)}});
    return json;
  }

 private:
  static Json rounds_json(const std::vector<UpdateRun>& runs) {
    Json json = Json::array();
    for (const UpdateRun& run : runs) json.push_back(to_json(run));
    return json;
  }

  bool wanted(const char* kind) const {
    const std::vector<std::string>& kinds = arguments_.kinds;
    return kinds.empty() || std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
  }

  Status clean() const {
    std::error_code error;
    fs::remove_all(root_, error);
    fs::create_directories(root_ + "/plain", error);
    if (!error) return {};
    return fail(error.value(), "cannot make the folder '{}'", root_);
  }

  // Both, in the order of this round. `coded` tells how many bytes it moved.
  template <typename Coded, typename Plain>
  Status pair(const char* measure, const Coded& coded, const Plain& plain) {
    if (!wanted(measure)) return {};
    Samples& samples = samples_[measure];
    for (const bool ours : {!plain_first_, plain_first_}) {
      if (!ours) {
        STOKER_ASSIGN(const double rate, plain());
        samples.plain.push_back(rate);
        continue;
      }
      const double cpu = cpu_seconds();
      const auto begun = Time::now();
      STOKER_ASSIGN(const uint64_t bytes, coded());
      const double seconds = seconds_since(begun);
      samples.coded.push_back(static_cast<double>(bytes) / seconds);
      samples.coded_cpu.push_back((cpu_seconds() - cpu) / (static_cast<double>(bytes) / 1e9));
    }
    return {};
  }

  Status round() {
    const CodedFolder folder(root_, owner_.runtime());
    STOKER_ASSIGN(const auto plain,
                  PlainFile::make(owner_.loop(), root_ + "/plain/data", bytes_, memory_));
    STOKER_TRY(write(folder, *plain));
    STOKER_TRY(read(folder, *plain));
    STOKER_TRY(look(folder, *plain));
    if (!wanted(kUpdates)) return {};
    for (UpdateSamples& samples : updates_) STOKER_TRY(update(folder, samples));
    return {};
  }

  Status write(const CodedFolder& folder, PlainFile& plain) {
    STOKER_ASSIGN(const auto store,
                  folder.make(bytes_ + arguments_.writers * kUpdatedBytes + 256 * kMiB));
    const auto ours = [&] { return put(*store, kKey, bytes_, memory_); };
    if (wanted("put")) {
      STOKER_TRY(pair("put", ours, [&] { return plain.write(); }));
    } else {
      STOKER_TRY(plain.write());
      if (const auto done = ours(); !done) return done.error();
    }
    for (size_t i = 0; i < arguments_.writers; ++i)
      STOKER_TRY(put(*store, std::to_string(i), kUpdatedBytes, memory_));
    return {};
  }

  Status read_sequentially(const char* measure, const CodedFolder& folder, PlainFile& plain) {
    STOKER_ASSIGN(const auto store, folder.open(true));
    return pair(
        measure, [&] { return read_all(*store, bytes_, memory_); }, [&] { return plain.read(); });
  }

  Status read(const CodedFolder& folder, PlainFile& plain) {
    STOKER_TRY(read_sequentially("read", folder, plain));
    STOKER_TRY(folder.hide(true));
    Status degraded = read_sequentially("read_without_m", folder, plain);
    STOKER_TRY(folder.hide(false));
    if (!degraded) return degraded;
    STOKER_ASSIGN(const auto store, folder.open(true));
    STOKER_TRY(pair(
        "read_1mib", [&] { return read_medium(*store, bytes_, memory_); },
        [&] { return plain.read_medium(false); }));
    if (!wanted("read_1mib")) return {};
    STOKER_ASSIGN(const double used, plain.read_medium(true));
    samples_["read_1mib"].plain_used.push_back(used);
    return {};
  }

  Status look(const CodedFolder& folder, PlainFile& plain) {
    {
      STOKER_ASSIGN(const auto store, folder.open(false));
      STOKER_TRY(pair(
          "scrub", [&] { return scrub(*store); }, [&] { return plain.read(); }));
    }
    if (!wanted("rebuild")) return {};
    STOKER_ASSIGN(const auto store, folder.lose_one());
    return pair(
        "rebuild", [&] { return rebuild(*store); }, [&] { return rebuild_plainly(plain); });
  }

  // Each writer has an object, or a file, of its own.
  Status update(const CodedFolder& folder, UpdateSamples& samples) {
    const auto run = [&](UpdateTarget& target) -> Result<UpdateRun> {
      std::deque<std::mt19937_64> random;
      for (size_t i = 0; i < samples.writers; ++i) random.emplace_back(7 + i);
      const auto end = Time::now() + std::chrono::duration<double>(arguments_.seconds);
      return run_updates(
          target, samples.writers, samples.writers, [&](size_t writer) -> std::optional<Update> {
            if (Time::now() >= end) return std::nullopt;
            const uint64_t places = kUpdatedBytes / kUpdateBytes - 1;
            const uint64_t shift = samples.aligned ? 0 : 1 + random[writer]() % (kUpdateBytes - 1);
            const uint64_t at = random[writer]() % places * kUpdateBytes + shift;
            return Update{{writer, at, kUpdateBytes}};
          });
    };
    for (const bool ours : {!plain_first_, plain_first_}) {
      if (ours) {
        STOKER_ASSIGN(const auto store, folder.open(false));
        if (const auto& folded = store->fold_all().wait(); !folded) return folded.error();
        const auto target = store_target(*store);
        STOKER_ASSIGN(const UpdateRun made, run(*target));
        samples.coded.push_back(made);
      } else {
        STOKER_ASSIGN(const auto target,
                      plain_target(root_ + "/plain", samples.writers, kUpdatedBytes));
        STOKER_ASSIGN(const UpdateRun made, run(*target));
        samples.plain.push_back(made);
      }
    }
    return {};
  }

  // The trace's volumes in pieces, each an object, numbered as they are first touched.
  struct TracePlan {
    std::vector<Update> updates;
    size_t objects = 0;
  };
  TracePlan plan_trace(const TraceWrites& trace) const {
    TracePlan plan;
    std::map<std::pair<uint32_t, uint64_t>, size_t> numbers;
    for (const TraceWrites::Write& write : trace.writes) {
      if (plan.updates.size() == arguments_.requests) break;
      Update update;
      for (uint64_t at = write.offset; at < write.offset + write.bytes;) {
        const uint64_t inside = at % kTraceBytes;
        const uint64_t bytes = std::min(kTraceBytes - inside, write.offset + write.bytes - at);
        const auto [number, first] =
            numbers.try_emplace({write.object, at / kTraceBytes}, numbers.size());
        update.push_back({number->second, inside, bytes});
        at += bytes;
      }
      if (!update.empty()) plan.updates.push_back(std::move(update));
    }
    plan.objects = numbers.size();
    return plan;
  }

  Result<UpdateRun> play_on(UpdateTarget& target, const TracePlan& plan) const {
    std::atomic<size_t> next{0};
    return run_updates(target, arguments_.writers, plan.objects,
                       [&](size_t) -> std::optional<Update> {
                         const size_t index = next.fetch_add(1);
                         if (index >= plan.updates.size()) return std::nullopt;
                         return plan.updates[index];
                       });
  }

  Result<Json> play(const std::string& path) {
    STOKER_ASSIGN(const TraceWrites trace, read_trace_writes(path));
    const TracePlan plan = plan_trace(trace);
    std::fprintf(stderr, "trace %s: %zu updates of %zu objects of %s\n", trace.name.c_str(),
                 plan.updates.size(), plan.objects, human_bytes(kTraceBytes).c_str());
    const CodedFolder folder(root_, owner_.runtime());
    STOKER_ASSIGN(const auto store, folder.make(plan.objects * kTraceBytes + 256 * kMiB));
    for (size_t i = 0; i < plan.objects; ++i)
      STOKER_TRY(put(*store, std::to_string(i), kTraceBytes, memory_));
    const auto target = store_target(*store);
    const IoCounters& counters = owner_.loop().counters();
    const uint64_t bytes = counters.written_bytes.get(), flushes = counters.syncs.get();
    STOKER_ASSIGN(const UpdateRun coded, play_on(*target, plan));
    if (const auto& folded = store->fold_all().wait(); !folded) return folded.error();
    const auto updates = static_cast<double>(coded.updates);
    Json ours = to_json(coded);
    ours["disk_bytes_an_update"] =
        static_cast<double>(counters.written_bytes.get() - bytes) / updates;
    ours["flushes_an_update"] = static_cast<double>(counters.syncs.get() - flushes) / updates;
    STOKER_ASSIGN(const auto files, plain_target(root_ + "/plain", plan.objects, kTraceBytes));
    STOKER_ASSIGN(const UpdateRun plain, play_on(*files, plan));
    return Json{{"trace", trace.name},
                {"writers", arguments_.writers},
                {"objects", plan.objects},
                {"bytes_an_update", static_cast<double>(coded.bytes) / updates},
                {"load_average", load_average_},
                {"coded", ours},
                {"plain", to_json(plain)}};
  }

  const CodedBenchArguments& arguments_;
  const uint64_t bytes_;
  RuntimeOwner& owner_;
  const Slice memory_;
  const std::string root_;
  const std::string load_average_ = load_average();  // before it began
  bool plain_first_ = true;
  std::map<std::string, Samples> samples_;
  std::vector<UpdateSamples> updates_;
  Json traces_ = Json::array();
};

// Of all rounds: the middle of the rates and percentiles, the longest of all.
Json over_rounds(const Json& runs) {
  std::map<std::string, std::vector<double>> values;
  for (const Json& run : runs) {
    for (const char* name : {"per_second", "p50_us", "p99_us", "max_us"})
      values[name].push_back(run[name].get<double>());
  }
  return {{"per_second", median(values["per_second"])},
          {"p50_us", median(values["p50_us"])},
          {"p99_us", median(values["p99_us"])},
          {"max_us", *std::max_element(values["max_us"].begin(), values["max_us"].end())}};
}

void print_updates(const std::string& name, const Json& coded, const Json& plain) {
  for (const auto& [who, run] : {std::pair<const char*, const Json&>{"coded", coded},
                                 std::pair<const char*, const Json&>{"plain", plain}})
    std::printf("%-28s %-6s %9.0f %10.0f %10.0f %10.0f\n", name.c_str(), who,
                run["per_second"].get<double>(), run["p50_us"].get<double>(),
                run["p99_us"].get<double>(), run["max_us"].get<double>());
}

void print_table(const Json& json) {
  std::printf("coded 6+3 over nine folders of one disk beside plain files there, %s\n",
              human_bytes(json["bytes"].get<uint64_t>()).c_str());
  std::printf("%-15s %11s %11s %8s %6s %9s\n", "", "coded MB/s", "plain MB/s", "share", "goal",
              "CPU s/GB");
  for (const Json& row : json["results"])
    std::printf("%-15s %11.0f %11.0f %8.2f %6.1f %9.2f\n",
                row["measure"].get<std::string>().c_str(),
                row["coded_bytes_per_second"].get<double>() / 1e6,
                row["plain_bytes_per_second"].get<double>() / 1e6, row["share"].get<double>(),
                row["goal"].get<double>(), row["coded_cpu_seconds_per_gb"].get<double>());
  std::printf("%-28s %-6s %9s %10s %10s %10s\n", "updates of 4 KiB", "", "a second", "p50 us",
              "p99 us", "longest us");
  for (const Json& row : json["updates"]) {
    const std::string name = std::to_string(row["writers"].get<size_t>()) + " writers, " +
                             (row["aligned"].get<bool>() ? "whole blocks" : "at any byte");
    print_updates(name, over_rounds(row["coded"]), over_rounds(row["plain"]));
  }
  for (const Json& row : json["traces"]) {
    print_updates("trace " + row["trace"].get<std::string>(), row["coded"], row["plain"]);
    std::printf("  %.0f bytes an update; on the disks %.0f, folds included, and %.2f flushes\n",
                row["bytes_an_update"].get<double>(),
                row["coded"]["disk_bytes_an_update"].get<double>(),
                row["coded"]["flushes_an_update"].get<double>());
  }
}

Status run(const CodedBenchArguments& arguments) {
  STOKER_ASSIGN(const uint64_t bytes, parse_bytes(arguments.size));
  if (bytes < kMemoryBytes || bytes % kPieceBytes != 0)
    return fail(Code::invalid_argument, "--size is a multiple of 8 MiB, and 64 MiB at least");
  STOKER_ASSIGN(const auto owner, RuntimeOwner::make());
  STOKER_ASSIGN(const auto arena, Arena::make(kMemoryBytes, owner->budget()));
  STOKER_TRY(owner->loop().adopt(*arena));
  Json json;
  {
    STOKER_ASSIGN(const Buffer buffer, arena->take(kMemoryBytes));
    std::mt19937_64 random(1);
    for (size_t i = 0; i < buffer.size(); i += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(buffer.data() + i, &word, sizeof word);
    }
    Bench bench(arguments, bytes, *owner, buffer.slice());
    STOKER_TRY(bench.run());
    json = bench.json();
  }
  STOKER_TRY(owner->loop().unadopt(*arena));
  if (arguments.json) {
    std::printf("%s\n", json.dump(1).c_str());
  } else {
    print_table(json);
  }
  return {};
}

}  // namespace

void add_bench_coded(CLI::App& bench, ExitStatus& status) {
  const auto arguments = std::make_shared<CodedBenchArguments>();
  CLI::App* command = bench.add_subcommand(
      "coded",
      "Measure a coded store beside plain files on the same disk: put, read, without disks, scrub, "
      "rebuild, updates; and traces of updates (about 2 minutes)");
  command
      ->add_option("DIR", arguments->folder,
                   "A folder on the disk to measure; what is made there is removed again")
      ->required();
  command->add_option("--size", arguments->size, "Bytes that are put and read")
      ->capture_default_str();
  command->add_option("--rounds", arguments->rounds, "Of all measures")
      ->capture_default_str()
      ->check(whole(1, 100));
  command->add_option("--seconds", arguments->seconds, "Of each kind of updates, in a round")
      ->capture_default_str()
      ->check(number(0.1, 600.0));
  command->add_option("--writers", arguments->writers, "Of updates, beside the measure of one")
      ->capture_default_str()
      ->check(whole(1, 256));
  std::set<std::string> kinds = {kUpdates, kTraces};
  for (const Measure& measure : kMeasures) kinds.insert(measure.name);
  command->add_option("--kinds", arguments->kinds, "Measure these only")
      ->check(CLI::IsMember(kinds));
  command->add_option("--trace", arguments->traces,
                      "A trace that `stoker curm` reads: its writes are updates of a coded store, "
                      "and of plain files with fdatasync");
  command->add_option("--requests", arguments->requests, "Writes of a trace that are played")
      ->capture_default_str()
      ->check(whole(1, uint64_t{1} << 32));
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
