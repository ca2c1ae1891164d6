#include "stoker/store/local/fsck.h"

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <set>

#include "stoker/store/local/allocator.h"
#include "stoker/store/local/journal.h"
#include "stoker/store/local/local_store.h"
#include "stoker/store/local/volume.h"

namespace stoker {
namespace {

using local::Journal;
using local::Map;
using local::Object;
using local::VolumeSet;

// where an offloaded training run keeps its scalars, as JSON
constexpr const char* kStateKey = "meta/state";
constexpr size_t kReadsAhead = 8;

StoreOptions reading() {
  StoreOptions options;
  options.read_only = true;
  options.holder = "stoker fsck";
  return options;
}

// What the copies of the current generation say, each on its own. A copy may lack the last record:
// a crash cut it short.
Status check_copies(Journal& journal, FsckReport& report) {
  STOKER_ASSIGN(const auto first, journal.check(0));
  STOKER_ASSIGN(const auto second, journal.check(1));
  const local::CopyReport* copies[] = {&first, &second};
  const bool sealed = first.seal || second.seal;
  const uint64_t records = std::max(first.records, second.records);
  for (size_t i = 0; i < 2; ++i) {
    const auto& copy = *copies[i];
    const std::string name = "journal copy " + std::to_string(i);
    // Before the seal the frames of an image are under way together: a crash may lose any of them
    // in one copy.
    auto& found = sealed ? report.problems : report.notes;
    found.insert(found.end(), copy.damage.begin(), copy.damage.end());
    if (!copy.unread_behind.empty()) report.notes.push_back(copy.unread_behind);
    if (!copy.damage.empty()) continue;
    if (!copy.image || (sealed && !copy.seal && copies[1 - i]->records > 0)) {
      (sealed ? report.problems : report.notes)
          .push_back(name + (sealed ? " has lost its image of the map"
                                    : " holds an unfinished image: a crash cut it short"));
    } else if (copy.records + 1 < records) {
      report.problems.push_back(name + " has lost its last " +
                                std::to_string(records - copy.records) + " records");
    } else if (copy.records < records) {
      report.notes.push_back(
          name +
          " lacks the last record: a crash cut it short, or it was damaged; the other copy has it");
    }
  }
  return {};
}

Result<std::unique_ptr<Map>> check_map(const std::vector<std::string>& paths,
                                       const Runtime& runtime, const LocalOptions& local,
                                       FsckReport& report) {
  STOKER_ASSIGN(VolumeSet volumes, VolumeSet::open(paths, runtime.loop, reading(), local));
  for (const auto& volume : volumes.all())
    report.problems.insert(report.problems.end(), volume.damage.begin(), volume.damage.end());
  Journal journal(runtime.loop, volumes);
  auto recovered = journal.recover(volumes.limits());
  if (!recovered) return local::opening_error(recovered.error(), paths[0]);
  if (const Status same = volumes.check_same_time(journal.number()); !same)
    report.problems.push_back(same.error().what);
  std::unique_ptr<Map> map = std::move(*recovered);
  report.generation = journal.generation() >> 32;
  report.records = journal.records();
  STOKER_TRY(check_copies(journal, report));
  if (!report.problems.empty())
    report.advice.push_back(
        "`stoker fsck --repair-map` writes the damaged headers and journal copies again: their "
        "other copies have all that belongs there");
  local::Allocator allocator(map->limits());
  if (const Status status = allocator.take_all(*map); !status)
    report.problems.push_back(status.error().what);
  report.committed = map->version();
  report.objects = map->current().size();
  for (const auto& snapshot : map->snapshots())
    report.snapshots.push_back({snapshot.name, snapshot.version});
  map->each_extent([&report](const local::Extent& extent) {
    ++report.chunks;
    report.data_bytes += extent.blocks * local::kBlock;
  });
  return map;
}

// Reads every chunk that is named, those of the current version and those that only a snapshot
// still sees.
class DataCheck {
 public:
  DataCheck(Store& store, const FsckOptions& options, FsckReport& report)
      : store_(store), options_(options), report_(report) {}

  void run(const Map& map) {
    table(map.current(), nullptr, {});
    const local::Table* later = &map.current();
    for (auto snapshot = map.snapshots().rbegin(); snapshot != map.snapshots().rend(); ++snapshot) {
      table(snapshot->table, later, snapshot->name);
      later = &snapshot->table;
    }
    while (!reads_.empty()) finish_one();
    if (!damaged_.empty()) advise(map);
  }

 private:
  struct Read {
    std::unique_ptr<AlignedBytes> bytes;
    std::string snapshot;
    uint64_t place = 0;
    Future<void> future;
    uint64_t disk_bytes = 0;
  };

  void table(const local::Table& table, const local::Table* later, const std::string& snapshot) {
    for (const auto& [key, object] : table) {
      const Object* newer = nullptr;
      if (later != nullptr) {
        if (const auto found = later->find(key); found != later->end()) newer = found->second.get();
      }
      if (newer == object.get()) continue;
      for (size_t i = 0; i < object->chunks.size(); ++i) {
        const auto& chunk = object->chunks[i];
        const bool seen =
            newer != nullptr && i < newer->chunks.size() && newer->chunks[i].place == chunk.place;
        if (!chunk.sparse() && !seen) read(key, *object, i, snapshot);
      }
    }
  }

  void read(const std::string& key, const Object& object, size_t index,
            const std::string& snapshot) {
    while (reads_.size() >= kReadsAhead) finish_one();
    const uint64_t from = object.chunk_at(index);
    const size_t bytes = std::min<uint64_t>(object.chunk_bytes, object.bytes - from);
    Read& read = reads_.emplace_back();
    read.bytes = std::make_unique<AlignedBytes>(bytes);
    read.snapshot = snapshot;
    read.place = object.chunks[index].place;
    read.disk_bytes = object.chunks[index].extent().blocks * local::kBlock;
    read.future = store_.read(key, from, read.bytes->slice().sub(0, bytes),
                              {.snapshot = read.snapshot, .priority = Priority::scrub});
  }

  void finish_one() {
    Read& read = reads_.front();
    if (const Status& status = read.future.wait(); !status) {
      report_.problems.push_back(read.snapshot.empty()
                                     ? status.error().what
                                     : "snapshot '" + read.snapshot + "': " + status.error().what);
      damaged_.insert(read.place);
    }
    done_bytes_ += read.disk_bytes;
    if (options_.progress) options_.progress(done_bytes_, report_.data_bytes);
    reads_.pop_front();
  }

  bool is_whole(const local::Table& table) const {
    return std::none_of(table.begin(), table.end(), [this](const auto& entry) {
      const auto& chunks = entry.second->chunks;
      return std::any_of(chunks.begin(), chunks.end(), [this](const local::Chunk& chunk) {
        return !chunk.sparse() && damaged_.count(chunk.place) > 0;
      });
    });
  }

  // Which version of the whole still is.
  void advise(const Map& map) {
    std::string whole;
    for (const auto& snapshot : map.snapshots()) {
      if (is_whole(snapshot.table)) whole = snapshot.name;
    }
    if (is_whole(map.current())) {
      report_.advice.push_back(
          "the current version is whole: only snapshots are damaged, which may be dropped");
    } else if (!whole.empty()) {
      report_.advice.push_back(
          "the current version is damaged, snapshot '" + whole +
          "' is whole: `stoker ls` and `stoker export` read it with --snapshot " + whole);
    } else {
      report_.advice.push_back(
          "neither the current version nor a snapshot is whole: restore the store from a copy; "
          "`stoker export` still reads the objects that are not named above");
    }
  }

  Store& store_;
  const FsckOptions& options_;
  FsckReport& report_;
  std::set<uint64_t> damaged_;  // places of chunks
  std::deque<Read> reads_;
  uint64_t done_bytes_ = 0;
};

std::optional<uint64_t> committed_step(Store& store) {
  const auto info = store.stat(kStateKey);
  if (!info || info->bytes > 16 * kMiB) return std::nullopt;
  std::string text(info->bytes, '\0');
  if (!store.read(kStateKey, 0, {reinterpret_cast<std::byte*>(text.data()), text.size(), -1}, {})
           .wait())
    return std::nullopt;
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_unsigned())
    return std::nullopt;
  return json["step"].get<uint64_t>();
}

}  // namespace

Result<FsckReport> fsck_local_store(const std::vector<std::string>& volumes, const Runtime& runtime,
                                    const FsckOptions& options, const LocalOptions& local) {
  FsckReport report;
  STOKER_ASSIGN(const auto map, check_map(volumes, runtime, local, report));
  if (options.repair_map && !report.problems.empty()) {
    // Opening to write puts the recovered map, and good headers, into both copies.
    StoreOptions writing;
    writing.holder = "stoker fsck --repair-map";
    STOKER_TRY(open_local_store(volumes, runtime, writing, local));
    FsckReport after;
    STOKER_TRY(check_map(volumes, runtime, local, after));
    report.repaired = after.problems.empty();
    report.problems = after.problems;
    report.advice = after.advice;
  }
  auto store = open_local_store(volumes, runtime, reading(), local);
  if (!store) {
    report.problems.push_back(store.error().what);
    return report;
  }
  report.committed_step = committed_step(**store);
  if (!options.quick) DataCheck(**store, options, report).run(*map);
  return report;
}

}  // namespace stoker
