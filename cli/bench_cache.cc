// stoker bench cache: what a cache fetches beside the least that is possible. Its policy and its
// followers played without bytes, and cached(local:DIR, SLOW) read for real.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench.h"
#include "cache_traces.h"
#include "command.h"
#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::array<double, 3> kShares = {0.2, 0.5, 0.9};
constexpr double kEpochsGoal = 1.02, kBeladyGoal = 1.05;
constexpr uint64_t kObjects = 16;
constexpr uint64_t kItemsABlock = 4;
constexpr uint64_t kReadAhead = 64;  // how much out of order simulated readers are

struct CacheBenchArguments {
  std::string folder;
  std::string slow;
  uint64_t blocks = 4096;
  uint64_t epochs = 3;
  std::string size = "1GiB", block = "256KiB", dram = "256MiB";
  size_t readers = 16;
  bool json = false;
};

const char* name_of(CachePolicy policy) {
  switch (policy) {
    case CachePolicy::plan:
      return "plan";
    case CachePolicy::s3fifo:
      return "S3-FIFO";
    case CachePolicy::lru:
      return "LRU";
  }
  return "";
}

Json row_of(const char* source, const CacheTrace& trace, CachePolicy policy, double share,
            uint64_t places, const CacheRun& run) {
  return {{"source", source},
          {"policy", name_of(policy)},
          {"regime", trace.regime},
          {"cache_share", share},
          {"fetched_over_bound", over_bound(trace, run, places)},
          {"written_over_admitted", static_cast<double>(run.written) /
                                        static_cast<double>(std::max<uint64_t>(1, run.admitted))},
          {"goal", trace.epochs == 0 ? kBeladyGoal : kEpochsGoal},
          {"fetched_bytes", run.fetched},
          {"bound_bytes", bound_bytes(trace, places)}};
}

uint64_t places_of(const CacheTrace& trace, double share) {
  return static_cast<uint64_t>(share * static_cast<double>(trace.blocks));
}

void simulate_all(const TraceShape& shape, Json& rows) {
  const std::array<CacheTrace, 5> traces = {
      epochs_trace(shape, 1), epochs_trace(shape, kItemsABlock), windows_trace(shape),
      mixture_trace(shape), out_of_order(mixture_trace(shape), kReadAhead)};
  for (const CacheTrace& trace : traces) {
    for (const double share : kShares) {
      const uint64_t places = places_of(trace, share);
      for (const auto policy : {CachePolicy::plan, CachePolicy::s3fifo, CachePolicy::lru})
        rows.push_back(
            row_of("simulated", trace, policy, share, places, simulate(trace, policy, places)));
    }
  }
}

// Objects in the slow store, and a cache before them in the folder.
class RealRun {
 public:
  RealRun(const CacheBenchArguments& arguments, const TraceShape& shape, RuntimeOwner& owner)
      : arguments_(arguments),
        shape_(shape),
        owner_(owner),
        root_(arguments.folder + "/stoker-bench-cache"),
        slow_(arguments.slow.empty() ? "dir:" + root_ + "/slow" : arguments.slow) {}
  ~RealRun() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  RealRun(const RealRun&) = delete;
  RealRun& operator=(const RealRun&) = delete;

  Status run(Json& rows) {
    std::error_code error;
    fs::create_directories(root_, error);
    if (error) return fail(error.value(), "cannot make the folder '{}'", root_);
    STOKER_TRY(put());
    const std::array<CacheTrace, 3> traces = {epochs_trace(shape_, kItemsABlock),
                                              windows_trace(shape_), mixture_trace(shape_)};
    Status status;
    for (const CacheTrace& trace : traces) {
      for (const double share : kShares) {
        std::fprintf(stderr, "%s, %.1f of the set\n", trace.regime.c_str(), share);
        const uint64_t places = places_of(trace, share);
        const auto played = play(trace, places);
        if (!played) {
          status = played.error();
          break;
        }
        rows.push_back(row_of("real", trace, CachePolicy::plan, share, places, *played));
      }
      if (!status) break;
    }
    Status removed = remove();
    return status ? removed : status;
  }

 private:
  uint64_t object_bytes() const { return shape_.blocks / shape_.objects * shape_.block_bytes; }
  static std::string key(uint64_t object) { return "set/" + std::to_string(object); }

  // Each word tells where it lies.
  static uint64_t word_at(uint64_t set_offset) { return set_offset * 0x9E3779B97F4A7C15U + 1; }

  Status put() {
    STOKER_ASSIGN(const auto store, open_store(slow_, owner_.runtime(), {.create = true}));
    AlignedBytes memory(object_bytes());
    for (uint64_t object = 0; object < shape_.objects; ++object) {
      for (uint64_t at = 0; at < object_bytes(); at += sizeof(uint64_t)) {
        const uint64_t word = word_at(object * object_bytes() + at);
        std::memcpy(memory.slice().data + at, &word, sizeof word);
      }
      STOKER_ASSIGN(const auto change, store->begin());
      STOKER_TRY(change->resize(key(object), object_bytes()));
      STOKER_TRY(change->write(key(object), 0, memory.slice().sub(0, object_bytes())).wait());
      if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    }
    return {};
  }

  Status remove() {
    STOKER_ASSIGN(const auto store, open_store(slow_, owner_.runtime(), {}));
    for (uint64_t object = 0; object < shape_.objects; ++object) {
      STOKER_ASSIGN(const auto change, store->begin());
      STOKER_TRY(change->remove(key(object)));
      if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    }
    return {};
  }

  Result<CacheRun> play(const CacheTrace& trace, uint64_t places) {
    const std::string fast = root_ + "/fast";
    std::error_code error;
    fs::remove_all(fast, error);
    const std::string composition = "cached(local:" + fast + ", " + slow_ +
                                    ", disk=" + std::to_string(places * trace.block_bytes) +
                                    ", dram=" + arguments_.dram +
                                    ", block=" + std::to_string(trace.block_bytes) + ")";
    STOKER_ASSIGN(auto store, open_store(composition, owner_.runtime(), {}));
    STOKER_TRY(store->follow(trace.plan));
    const uint64_t written = owner_.loop().counters().written_bytes.get();
    CacheRun run;
    const uint64_t epochs = std::max<uint64_t>(1, trace.epochs);
    for (uint64_t epoch = 0; epoch < epochs; ++epoch) {
      const uint64_t each = trace.reads.size() / epochs;
      const uint64_t before = store->info().cache->fetched_bytes;
      STOKER_TRY(read(*store, trace, epoch * each, (epoch + 1) * each));
      run.fetched.push_back(store->info().cache->fetched_bytes - before);
    }
    const CacheInfo info = *store->info().cache;
    if (!info.off.empty()) return fail(Code::io, "{}", info.off);
    run.admitted = info.admitted_bytes;
    store.reset();  // writes what is gathered
    run.written = owner_.loop().counters().written_bytes.get() - written;
    return run;
  }

  // Several readers, each the next item that none has taken.
  Status read(Store& store, const CacheTrace& trace, uint64_t begin, uint64_t end) {
    std::atomic<uint64_t> next{begin};
    Mutex mutex;
    Status first;
    const auto reader = [&] {
      AlignedBytes memory(trace.item_bytes());
      for (uint64_t at = next++; at < end; at = next++) {
        const Status done = read_item(store, trace, trace.reads[at], memory.slice());
        if (done) continue;
        const MutexLock lock(mutex);
        if (first) first = done;
        next = end;
      }
    };
    std::vector<std::thread> readers;
    for (size_t i = 0; i < arguments_.readers; ++i) readers.emplace_back(reader);
    for (std::thread& each : readers) each.join();
    return first;
  }

  Status read_item(Store& store, const CacheTrace& trace, uint64_t item, Slice memory) const {
    const uint64_t bytes = trace.item_bytes(), at = item * bytes;
    const Slice into = memory.sub(0, bytes);
    STOKER_TRY(store.read(key(at / object_bytes()), at % object_bytes(), into).wait());
    for (uint64_t inside = 0; inside < bytes; inside += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, into.data + inside, sizeof word);
      if (word != word_at(at + inside))
        return fail(Code::corruption, "the cache gave a wrong byte at {} of the set; report this",
                    at + inside);
    }
    return {};
  }

  const CacheBenchArguments& arguments_;
  const TraceShape shape_;
  RuntimeOwner& owner_;
  const std::string root_, slow_;
};

void print_table(const Json& json) {
  std::printf("%-10s %-26s %6s %-8s %19s %22s\n", "", "regime", "share", "policy",
              "fetched over bound", "written over admitted");
  for (const Json& row : json["results"])
    std::printf("%-10s %-26s %6.1f %-8s %19.3f %22.3f\n", row["source"].get<std::string>().c_str(),
                row["regime"].get<std::string>().c_str(), row["cache_share"].get<double>(),
                row["policy"].get<std::string>().c_str(), row["fetched_over_bound"].get<double>(),
                row["written_over_admitted"].get<double>());
}

Status run(const CacheBenchArguments& arguments) {
  STOKER_ASSIGN(const uint64_t bytes, parse_bytes(arguments.size));
  STOKER_ASSIGN(const uint64_t block, parse_bytes(arguments.block));
  if (block < 64 * kKiB || block > 8 * kMiB || bytes % (kObjects * block) != 0 ||
      bytes / block < 64)
    return fail(
        Code::invalid_argument,
        "--size is a multiple of 16 blocks, and 64 of them at least; a block has 64 KiB to 8 MiB");
  const TraceShape simulated{.blocks = arguments.blocks / kObjects * kObjects,
                             .block_bytes = static_cast<uint32_t>(kMiB),
                             .objects = kObjects,
                             .epochs = arguments.epochs};
  Json json = {{"machine", bench_machine()},
               {"simulated", {{"blocks", simulated.blocks}, {"block_bytes", kMiB}}},
               {"epochs", arguments.epochs},
               {"load_average", load_average()},
               {"results", Json::array()}};
  simulate_all(simulated, json["results"]);
  if (!arguments.folder.empty()) {
    const TraceShape shape{.blocks = bytes / block,
                           .block_bytes = static_cast<uint32_t>(block),
                           .objects = kObjects,
                           .epochs = arguments.epochs};
    json["real"] = {
        {"blocks", shape.blocks},
        {"block_bytes", block},
        {"dram", arguments.dram},
        {"readers", arguments.readers},
        {"slow",
         arguments.slow.empty() ? "dir" : arguments.slow.substr(0, arguments.slow.find(':'))}};
    STOKER_ASSIGN(const auto owner, RuntimeOwner::make());
    STOKER_TRY(RealRun(arguments, shape, *owner).run(json["results"]));
  }
  if (arguments.json) {
    std::printf("%s\n", json.dump(1).c_str());
  } else {
    print_table(json);
  }
  return {};
}

}  // namespace

void add_bench_cache(CLI::App& bench, ExitStatus& status) {
  const auto arguments = std::make_shared<CacheBenchArguments>();
  CLI::App* command = bench.add_subcommand(
      "cache",
      "What a cache fetches beside the least that is possible: simulated, and read for real");
  command->add_option("DIR", arguments->folder,
                      "A folder for a cache that is read for real, removed again; without it all "
                      "is simulated");
  command->add_option("--slow", arguments->slow,
                      "The slow store behind it, where objects set/0 to set/15 are made and "
                      "removed; default: a folder in DIR");
  command->add_option("--blocks", arguments->blocks, "Of the set that is simulated")
      ->capture_default_str()
      ->check(whole(64, 1 << 20));
  command->add_option("--epochs", arguments->epochs, "Of each regime")
      ->capture_default_str()
      ->check(whole(2, 100));
  command->add_option("--size", arguments->size, "Of the set that is read for real")
      ->capture_default_str();
  command->add_option("--block", arguments->block, "Of the cache that is read for real")
      ->capture_default_str();
  command->add_option("--dram", arguments->dram, "Memory of that cache")->capture_default_str();
  command->add_option("--readers", arguments->readers, "Threads that read it")
      ->capture_default_str()
      ->check(whole(1, 256));
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
