// stoker bench repair: what those who use a coded store notice of a repair, by the rate that it is
// held to.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kUpdateBytes = 4096;
constexpr const char* kKey = "data";

struct RepairBenchArguments {
  std::string folder;
  std::string size = "96MiB";
  std::vector<std::string> rates = {"0", "64MiB", "16MiB"};
  double seconds = 3;
  bool json = false;
};

struct Row {
  uint64_t rate = 0;  // 0: no limit
  bool repairs = false;
  size_t updates = 0;
  double p50_us = 0, p99_us = 0, p999_us = 0, max_us = 0, rebuilt_bytes_per_second = 0;
};

double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

class RepairBench {
 public:
  RepairBench(const RepairBenchArguments& arguments, uint64_t bytes, const Runtime& runtime)
      : arguments_(arguments),
        bytes_(bytes),
        runtime_(runtime),
        root_(arguments.folder + "/stoker-bench-repair") {
    for (int i = 0; i < 9; ++i) plan_.paths.push_back(root_ + "/d" + std::to_string(i));
    plan_.k = 6;
    plan_.m = 3;
  }
  ~RepairBench() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  RepairBench(const RepairBench&) = delete;
  RepairBench& operator=(const RepairBench&) = delete;

  Status make() {
    StoreOptions options;
    options.create = options.same_disk = true;
    options.capacity_bytes = 2 * bytes_;
    STOKER_ASSIGN(const auto store, coded::CodedStore::open(plan_, runtime_, options, {}));
    std::vector<std::byte> piece(8 * kMiB);
    std::mt19937_64 random(1);
    for (uint64_t at = 0; at < bytes_; at += piece.size()) {
      const size_t size = std::min<uint64_t>(piece.size(), bytes_ - at);
      for (size_t i = 0; i < size; i += 8) {
        const uint64_t word = random();
        std::memcpy(piece.data() + i, &word, 8);
      }
      STOKER_ASSIGN(const auto change, store->begin());
      STOKER_TRY(change->resize(kKey, at + size));
      STOKER_TRY(change->write(kKey, at, {piece.data(), size, -1}).wait());
      if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    }
    return {};
  }

  // Updates of 4 KiB, one after the other, for as long as was asked for; with `repairs` beside the
  // rebuilding of a disk that was lost.
  Result<Row> measure(uint64_t rate, bool repairs) {
    StoreOptions options;
    options.same_disk = true;
    if (repairs) {
      fs::remove_all(plan_.paths[lost_]);
      options.replace = {plan_.paths[lost_]};
      lost_ = (lost_ + 1) % plan_.paths.size();
    }
    CodedOptions coded;
    coded.background = false;
    coded.busy_repair_rate = rate;
    STOKER_ASSIGN(const auto store, coded::CodedStore::open(plan_, runtime_, options, coded));
    Future<void> repaired;
    if (repairs) repaired = store->repair();
    std::mt19937_64 random(7);
    std::vector<std::byte> block(kUpdateBytes);
    std::vector<double> waited;
    const auto begun = std::chrono::steady_clock::now();
    const auto end = begun + std::chrono::duration<double>(arguments_.seconds);
    while (std::chrono::steady_clock::now() < end && !(repairs && repaired.ready())) {
      const auto before = std::chrono::steady_clock::now();
      std::memcpy(block.data(), &before, sizeof before);
      STOKER_ASSIGN(const auto change, store->begin());
      STOKER_TRY(change
                     ->write(kKey, random() % (bytes_ / kUpdateBytes) * kUpdateBytes,
                             {block.data(), block.size(), -1})
                     .wait());
      if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
      waited.push_back(microseconds(std::chrono::steady_clock::now() - before));
    }
    const double rebuilding =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    Row row;
    row.rate = rate;
    row.repairs = repairs;
    row.updates = waited.size();
    row.rebuilt_bytes_per_second = static_cast<double>(store->health().rebuilt_bytes) / rebuilding;
    if (repairs) {
      if (const auto& done = repaired.wait(); !done) return done.error();
    }
    std::sort(waited.begin(), waited.end());
    if (waited.empty())
      return fail(Code::invalid_argument,
                  "the repair was over before the first update: give more bytes");
    row.p50_us = waited[waited.size() / 2];
    row.p99_us = waited[waited.size() * 99 / 100];
    row.p999_us = waited[waited.size() * 999 / 1000];
    row.max_us = waited.back();
    return row;
  }

 private:
  const RepairBenchArguments& arguments_;
  const uint64_t bytes_;
  const Runtime runtime_;
  const std::string root_;
  CodedPlan plan_;
  size_t lost_ = 0;
};

Status run(const RepairBenchArguments& arguments) {
  STOKER_ASSIGN(const uint64_t bytes, parse_bytes(arguments.size));
  if (bytes < 8 * kMiB) return fail(Code::invalid_argument, "the store needs 8 MiB at least");
  std::vector<uint64_t> rates;
  for (const std::string& text : arguments.rates) {
    STOKER_ASSIGN(const uint64_t rate, parse_bytes(text));
    rates.push_back(rate);
  }
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  RepairBench bench(arguments, bytes, runtime->runtime());
  STOKER_TRY(bench.make());
  std::vector<Row> rows;
  STOKER_ASSIGN(const Row alone, bench.measure(0, false));
  rows.push_back(alone);
  for (const uint64_t rate : rates) {
    STOKER_ASSIGN(const Row row, bench.measure(rate, true));
    rows.push_back(row);
  }
  if (arguments.json) {
    Json json = {{"machine", bench_machine()},
                 {"code", "6+3"},
                 {"bytes", bytes},
                 {"update_bytes", kUpdateBytes},
                 {"seconds_per_rate", arguments.seconds},
                 {"results", Json::array()}};
    for (const Row& row : rows) {
      json["results"].push_back({{"repair", row.repairs},
                                 {"rate_bytes_per_second", row.rate},
                                 {"updates", row.updates},
                                 {"p50_us", row.p50_us},
                                 {"p99_us", row.p99_us},
                                 {"p999_us", row.p999_us},
                                 {"max_us", row.max_us},
                                 {"rebuilt_bytes_per_second", row.rebuilt_bytes_per_second}});
    }
    std::printf("%s\n", json.dump(2).c_str());
    return {};
  }
  std::printf(
      "coded 6+3 over nine folders of one disk, %s; updates of 4 KiB, one at a time\n%-28s %9s "
      "%10s %10s %10s %10s %14s\n",
      human_bytes(bytes).c_str(), "beside them", "updates", "p50 us", "p99 us", "p99.9 us",
      "max us", "rebuilt MB/s");
  for (const Row& row : rows) {
    const std::string beside = !row.repairs    ? "nothing"
                               : row.rate == 0 ? "repair, no limit"
                                               : "repair, " + human_bytes(row.rate) + " a second";
    std::printf("%-28s %9zu %10.0f %10.0f %10.0f %10.0f %14.1f\n", beside.c_str(), row.updates,
                row.p50_us, row.p99_us, row.p999_us, row.max_us,
                row.rebuilt_bytes_per_second / 1e6);
  }
  return {};
}

}  // namespace

void add_bench_repair(CLI::App& bench, ExitStatus& status) {
  const auto arguments = std::make_shared<RepairBenchArguments>();
  CLI::App* command = bench.add_subcommand("repair",
                                           "What users of a coded store notice while a lost disk "
                                           "is rebuilt, by the rate that repair is held to");
  command
      ->add_option("DIR", arguments->folder,
                   "A folder on the disk to measure; the store made there is removed again")
      ->required();
  command->add_option("--size", arguments->size, "Bytes in the store")->capture_default_str();
  command
      ->add_option("--rate", arguments->rates,
                   "Rates of the repair, reading and writing, in bytes a second; 0: no limit")
      ->capture_default_str();
  command->add_option("--seconds", arguments->seconds, "For each rate")
      ->capture_default_str()
      ->check(number(0.1, 600.0));
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
