#include "stoker/data/batch_reader.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/clock.h"
#include "stoker/base/mutex.h"
#include "stoker/data/neighbour_reads.h"
#include "stoker/data/packed_objects.h"
#include "stoker/data/source_reads.h"

namespace stoker::data {
namespace {

constexpr uint64_t kAlign = 64;  // of samples of unequal bytes

// Bytes of every sample in a batch's memory; 0: they differ.
uint64_t row_bytes_of(const BatchSource& source) {
  const uint64_t bytes = source.table->equal_bytes();
  return source.integers ? bytes / bytes_of(*source.integers) * sizeof(int64_t) : bytes;
}

uint64_t now() { return Clock::real().now_ns(); }

}  // namespace

Batch::~Batch() {
  if (spares) spares->give_back(std::move(memory));
}

class BatchReader::State {
 public:
  State(std::vector<BatchSource> sources, size_t spares, const ReaderLimits& limits,
        std::shared_ptr<PipelineThreads> threads)
      : sources_(std::move(sources)),
        spares_(std::make_shared<Spares>(spares, limits.arena)),
        raw_spares_(std::make_shared<Spares>(spares)),
        neighbours_(kNeighbourSpares),
        tasks_(std::move(threads)) {
    std::vector<PackedSource> packed;
    for (const BatchSource& each : sources_) {
      objects_.push_back(
          std::make_unique<TaggedObjects>(*each.store, each.table->keys(), each.tags));
      packed.push_back({objects_.back().get(), each.table, each.budget});
      unpacks_ = unpacks_ || each.table->has_packed();
    }
    if (unpacks_) unpacked_.emplace(std::move(packed), limits.unpacked_bytes, tasks_);
    for (size_t i = 0; i < sources_.size(); ++i) {
      const BatchSource& each = sources_[i];
      reads_.push_back(std::make_unique<SourceReads>(
          *objects_[i], each.table, each.table->has_packed() ? &*unpacked_ : nullptr,
          static_cast<uint32_t>(i)));
    }
    const uint64_t first = row_bytes_of(sources_.front());
    packed_ = first != 0 &&
              std::all_of(sources_.begin(), sources_.end(),
                          [first](const auto& each) { return row_bytes_of(each) == first; });
    checks_ = std::any_of(sources_.begin(), sources_.end(), [](const auto& each) {
      return each.integers.has_value() || each.table->has_crcs() || each.table->has_records();
    });
  }
  ~State() {
    MutexLock lock(mutex_);
    idle_.wait(lock, [this]() REQUIRES(mutex_) { return under_way_ == 0; });
  }

  BatchRead read(Reads reads) {
    for (const Pick& pick : reads.picks) {
      if (pick.source >= sources_.size() || pick.sample >= sources_[pick.source].table->samples()) {
        return {fail(Code::invalid_argument, "there is no sample {} in source {}", pick.sample,
                     pick.source),
                {}};
      }
    }
    const uint64_t begun = now();
    auto work = std::make_shared<Work>(sources_.size());
    BatchRead read{work->promise.future(), {}};
    if (const Status laid_out = lay_out(reads, *work, read); !laid_out) {
      read.batch = laid_out.error();
      return read;
    }
    work->batch->times.begun = begun;
    for (const Neighbours& soon : reads.soon) {
      // What is wrong is told when it is needed.
      if (!sources_[soon.source].table->apart()) (void)get(soon, *work->batch, read);
    }
    {
      MutexLock lock(mutex_);
      ++under_way_;
    }
    start(work);
    return read;
  }

 private:
  static constexpr size_t kNeighbourSpares = 64;

  // A batch on its way.
  struct Work {
    explicit Work(size_t sources) : pieces(sources) {}
    std::shared_ptr<Batch> batch;
    std::unique_ptr<Batch> raw;              // integers as they are stored
    std::vector<std::vector<Piece>> pieces;  // by source
    // Of each pick, where it came with its neighbours; or nothing.
    std::vector<NeighbourReadPtr> neighbours;
    std::atomic<size_t> left{1};  // calls to stores, and the one that starts them
    Mutex mutex;
    std::optional<Error> error;  // written with the mutex, until `left` is 0
    uint64_t fetched = 0;        // likewise
    Promise<BatchPtr> promise;
  };
  using WorkPtr = std::shared_ptr<Work>;

  Status lay_out(Reads& reads, Work& work, BatchRead& read) {
    auto batch = std::make_shared<Batch>();
    auto raw = std::make_unique<Batch>();
    batch->starts.push_back(0);
    batch->asked.resize(sources_.size());
    batch->ranges.resize(sources_.size());
    STOKER_TRY(find_neighbours(reads, work, *batch, read));
    uint64_t at = 0, raw_at = 0;
    for (size_t i = 0; i < reads.picks.size(); ++i) {
      const Pick& pick = reads.picks[i];
      const BatchSource& source = sources_[pick.source];
      const NeighbourRead* const with =
          work.neighbours.empty() ? nullptr : work.neighbours[i].get();
      if (!packed_) at = align_up(at, kAlign);
      if (source.integers) {
        if (with == nullptr)
          STOKER_TRY(ask(source, pick, raw_at, work.pieces[pick.source], nullptr));
        batch->parts.push_back({at, row_bytes_of(source)});
        at += row_bytes_of(source);
      } else if (with != nullptr) {
        for (const Piece& part : with->parts(pick.sample)) {
          batch->parts.push_back({at, part.bytes});
          at += part.bytes;
        }
      } else {
        STOKER_TRY(ask(source, pick, at, work.pieces[pick.source], &batch->parts));
      }
      batch->starts.push_back(batch->parts.size());
    }
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i].table->has_packed()) continue;  // it counts when it was fetched
      for (const Piece& piece : work.pieces[i]) batch->asked[i] += piece.bytes;
      batch->ranges[i] += work.pieces[i].size();
    }
    take_memory(spares_, at, *batch);
    take_memory(raw_spares_, raw_at, *raw);
    batch->picks = std::move(reads.picks);
    batch->objects = by_object(*batch, work);
    work.batch = std::move(batch);
    work.raw = std::move(raw);
    return {};
  }

  // The sample by itself, from `into` on, which moves behind it.
  static Status ask(const BatchSource& source, const Pick& pick, uint64_t& into,
                    std::vector<Piece>& pieces, std::vector<Place>* places) {
    const size_t before = pieces.size();
    STOKER_ASSIGN(into, source.table->append(pick.sample, into, pieces));
    for (size_t i = before; places != nullptr && i < pieces.size(); ++i)
      places->push_back({pieces[i].into, pieces[i].bytes});
    return {};
  }

  Status find_neighbours(const Reads& reads, Work& work, Batch& batch, BatchRead& read) {
    std::map<std::pair<uint32_t, uint64_t>, uint64_t> turns;  // the first of each source's lane
    for (const Neighbours& of : reads.of_picks) {
      work.neighbours.emplace_back();
      if (sources_[of.source].table->apart()) continue;
      STOKER_ASSIGN(work.neighbours.back(), get(of, batch, read));
      const auto [known, added] = turns.try_emplace({of.source, of.lane}, of.turn);
      known->second = std::min(known->second, of.turn);
    }
    for (const auto& [lane, turn] : turns) neighbours_.keep(lane.first, lane.second, turn);
    return {};
  }

  Result<NeighbourReadPtr> get(const Neighbours& of, Batch& batch, BatchRead& read) {
    STOKER_ASSIGN(auto got, neighbours_.get(*reads_[of.source], of));
    if (got.begun) {
      batch.asked[of.source] += got.read->asked();
      batch.ranges[of.source] += got.read->requests();
      {
        MutexLock lock(mutex_);
        ++under_way_;
      }
      got.read->done().on_done([this](const Result<uint64_t>&) { left(); });
      read.begun.emplace_back(of.source, got.read->done());
    }
    return std::move(got.read);
  }

  std::vector<Asked> by_object(const Batch& batch, const Work& work) const {
    std::map<std::pair<uint64_t, uint64_t>, uint64_t> bytes;  // of source and object
    for (size_t source = 0; source < work.pieces.size(); ++source) {
      for (const Piece& piece : work.pieces[source]) bytes[{source, piece.object}] += piece.bytes;
    }
    for (size_t i = 0; i < work.neighbours.size(); ++i) {
      if (work.neighbours[i] == nullptr) continue;
      const auto& [source, sample] = batch.picks[i];
      for (const Piece& piece : work.neighbours[i]->parts(sample))
        bytes[{source, piece.object}] += piece.bytes;
    }
    std::vector<Asked> all;
    all.reserve(bytes.size());
    for (const auto& [object, count] : bytes)
      all.push_back({object.first, object.second, stored(object.first, object.second, count)});
    return all;
  }

  // The share of these bytes in what lies in the store.
  uint64_t stored(uint64_t source, uint64_t object, uint64_t bytes) const {
    const SampleTable& table = *sources_[source].table;
    if (!table.has_packed() || table.object_bytes(object) == 0) return bytes;
    const double ratio = static_cast<double>(table.packed(object).bytes) /
                         static_cast<double>(table.object_bytes(object));
    return static_cast<uint64_t>(std::ceil(static_cast<double>(bytes) * ratio));
  }

  static void take_memory(const std::shared_ptr<Spares>& spares, uint64_t bytes, Batch& batch) {
    batch.memory = spares->take(bytes);
    batch.spares = spares;
    batch.bytes = bytes;
  }

  void start(const WorkPtr& work) {
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (work->pieces[i].empty()) continue;
      const BatchSource& source = sources_[i];
      const Batch& into = source.integers ? *work->raw : *work->batch;
      ++work->left;
      reads_[i]
          ->read(work->pieces[i], into.memory.slice().sub(0, into.bytes))
          .on_done([this, work](const Result<uint64_t>& read) { part_done(work, read); });
    }
    const NeighbourRead* last = nullptr;
    for (const NeighbourReadPtr& with : work->neighbours) {
      if (with == nullptr || with.get() == last) continue;
      last = with.get();
      ++work->left;
      with->done().on_done([this, work](const Result<uint64_t>& read) { part_done(work, read); });
    }
    part_done(work, work->batch->times.begun);
  }

  // fetched: when the store had answered.
  void part_done(const WorkPtr& work, const Result<uint64_t>& fetched) {
    {
      MutexLock lock(work->mutex);
      if (fetched) {
        work->fetched = std::max(work->fetched, *fetched);
      } else if (!work->error) {
        work->error = fetched.error();
      }
    }
    if (--work->left != 0) return;
    StageTimes& times = work->batch->times;
    times.read = work->fetched;
    times.unpacked = times.taken = times.verified = times.assembled = now();
    if (!unpacks_) times.read = times.unpacked;
    for (size_t i = 0; unpacks_ && i < reads_.size(); ++i) {
      const auto [bytes, ranges] = reads_[i]->take_asked();
      work->batch->asked[i] += bytes;
      work->batch->ranges[i] += ranges;
    }
    if (work->error || (!checks_ && work->neighbours.empty())) return finish(work);
    tasks_.run([this, work, &times] {
      times.taken = now();
      copy_all(*work);
      const uint64_t copied = now();
      if (const Status sound = verify_all(*work->batch); !sound) work->error = sound.error();
      times.verified = times.taken + (now() - copied);  // the copy is part of the assembly
      widen_all(*work);
      if (!work->error) {
        if (const Status whole = split_all(*work->batch); !whole) work->error = whole.error();
      }
      times.assembled = now();
      finish(work);
    });
  }

  // What came with its neighbours.
  void copy_all(Work& work) const {
    const Batch& batch = *work.batch;
    for (size_t i = 0; i < work.neighbours.size(); ++i) {
      const auto& [source, sample] = batch.picks[i];
      if (work.neighbours[i] == nullptr || sources_[source].integers) continue;
      const Place* to = batch.parts.data() + batch.starts[i];
      for (const Piece& part : work.neighbours[i]->parts(sample))
        std::memcpy(batch.memory.data() + (to++)->offset, work.neighbours[i]->at(part), part.bytes);
    }
  }

  Status verify_all(const Batch& batch) const {
    for (size_t i = 0; i < batch.picks.size(); ++i) {
      const auto& [source, sample] = batch.picks[i];
      const SampleTable& table = *sources_[source].table;
      if (!table.has_crcs()) continue;
      for (uint64_t part = batch.starts[i]; part < batch.starts[i + 1]; ++part) {
        const Place& place = batch.parts[part];
        STOKER_TRY(table.verify(sample, part - batch.starts[i],
                                {batch.memory.data() + place.offset, place.bytes}));
      }
    }
    return {};
  }

  // Records become their columns, where they lie.
  Status split_all(Batch& batch) const {
    const bool records = std::any_of(sources_.begin(), sources_.end(), [](const BatchSource& each) {
      return each.table->has_records();
    });
    if (!records) return {};
    std::vector<Place> parts;
    std::vector<uint64_t> starts{0};
    starts.reserve(batch.starts.size());
    for (size_t i = 0; i < batch.picks.size(); ++i) {
      const auto& [source, sample] = batch.picks[i];
      const SampleTable& table = *sources_[source].table;
      const Place* of = batch.parts.data() + batch.starts[i];
      if (table.has_records()) {
        const size_t before = parts.size();
        STOKER_TRY(table.split(sample, {batch.memory.data() + of->offset, of->bytes}, parts));
        for (size_t at = before; at < parts.size(); ++at) parts[at].offset += of->offset;
      } else {
        const size_t count = batch.starts[i + 1] - batch.starts[i];
        parts.insert(parts.end(), of, of + count);
      }
      starts.push_back(parts.size());
    }
    batch.parts = std::move(parts);
    batch.starts = std::move(starts);
    return {};
  }

  void widen_all(Work& work) {
    const std::byte* from = work.raw->memory.data();
    for (size_t i = 0; i < work.batch->picks.size(); ++i) {
      const BatchSource& source = sources_[work.batch->picks[i].source];
      if (!source.integers) continue;
      const Place& place = work.batch->parts[work.batch->starts[i]];
      std::byte* const to = work.batch->memory.data() + place.offset;
      const size_t count = place.bytes / sizeof(int64_t);
      if (work.neighbours.empty()) {
        widen(*source.integers, from, count, reinterpret_cast<int64_t*>(to));
        from += count * bytes_of(*source.integers);
      } else {
        const NeighbourRead& with = *work.neighbours[i];
        const Piece& part = with.parts(work.batch->picks[i].sample).front();
        widen(*source.integers, with.at(part), count, reinterpret_cast<int64_t*>(to));
      }
    }
  }

  // The promise's own waiters may end this reader as soon as the last one is not under way any
  // more: nothing of it is touched after that.
  void finish(const WorkPtr& work) {
    work->raw.reset();
    work->neighbours.clear();
    if (work->error) {
      work->promise.complete(*work->error);
    } else {
      work->promise.complete(BatchPtr(std::move(work->batch)));
    }
    left();
  }

  void left() {
    MutexLock lock(mutex_);
    if (--under_way_ == 0) idle_.notify_all();
  }

  const std::vector<BatchSource> sources_;
  const std::shared_ptr<Spares> spares_, raw_spares_;
  std::vector<std::unique_ptr<TaggedObjects>> objects_;  // of each source
  std::optional<PackedObjects> unpacked_;
  std::vector<std::unique_ptr<SourceReads>> reads_;  // of each source
  NeighbourReads neighbours_;
  bool packed_ = false, checks_ = false, unpacks_ = false;
  Mutex mutex_;
  CondVar idle_;
  size_t under_way_ GUARDED_BY(mutex_) = 0;
  PipelineTasks tasks_;  // the last member: it ends before what they use
};

Result<std::unique_ptr<BatchReader>> BatchReader::make(std::vector<BatchSource> sources,
                                                       size_t spares, const ReaderLimits& limits,
                                                       std::shared_ptr<PipelineThreads> threads) {
  if (sources.empty()) return fail(Code::invalid_argument, "a reader needs at least one source");
  for (const BatchSource& source : sources) {
    const uint64_t bytes = source.table->equal_bytes();
    if (!source.tags.empty() && source.tags.size() != source.table->keys().size())
      return fail(Code::invalid_argument, "each object of a source has one tag");
    if (source.integers && (bytes == 0 || bytes % bytes_of(*source.integers) != 0))
      return fail(Code::invalid_argument,
                  "samples of integers have equal sizes, a whole number of them");
  }
  if (threads == nullptr) threads = std::make_shared<PipelineThreads>(1, 1);
  return std::unique_ptr<BatchReader>(new BatchReader(
      std::make_unique<State>(std::move(sources), spares, limits, std::move(threads))));
}

BatchReader::BatchReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
BatchReader::~BatchReader() = default;

BatchRead BatchReader::read(Reads reads) { return state_->read(std::move(reads)); }

}  // namespace stoker::data
