#include "stoker/data/batch_reader.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/pool.h"

namespace stoker::data {
namespace {

constexpr const char* kWhere = "data/batch_reader";
constexpr uint64_t kAlign = 64;  // of samples of unequal bytes
constexpr uint64_t kPage = 4096;

// Bytes of every sample in a batch's memory; 0: they differ.
uint64_t row_bytes_of(const BatchSource& source) {
  const uint64_t bytes = source.table->equal_bytes();
  return source.integers ? bytes / bytes_of(*source.integers) * sizeof(int64_t) : bytes;
}

}  // namespace

// Memory that waits for the next batch.
class Spares {
 public:
  explicit Spares(size_t most) : most_(most) {}

  // At least so many bytes.
  AlignedBytes take(uint64_t bytes) {
    {
      std::lock_guard lock(mutex_);
      const auto found = kept_.lower_bound(bytes);
      // Much larger ones stay for those that need them.
      if (found != kept_.end() && found->first <= std::max(2 * bytes, 16 * kPage)) {
        AlignedBytes spare = std::move(found->second);
        kept_.erase(found);
        return spare;
      }
    }
    return AlignedBytes(std::max(bytes, kPage));
  }
  void give_back(AlignedBytes memory) {
    // A disk that was given up may still write there: it is kept back for good.
    if (memory.data() == nullptr || memory.lost()) return;
    std::lock_guard lock(mutex_);
    const uint64_t bytes = memory.size();
    kept_.emplace(bytes, std::move(memory));
    if (kept_.size() > most_) kept_.erase(kept_.begin());
  }

 private:
  const size_t most_;
  std::mutex mutex_;
  std::multimap<uint64_t, AlignedBytes> kept_;  // by bytes; guarded by mutex_
};

Batch::~Batch() {
  if (spares) spares->give_back(std::move(memory));
}

class BatchReader::State {
 public:
  State(std::vector<BatchSource> sources, size_t spares)
      : sources_(std::move(sources)),
        spares_(std::make_shared<Spares>(spares)),
        raw_spares_(std::make_shared<Spares>(spares)) {
    const uint64_t first = row_bytes_of(sources_.front());
    packed_ = first != 0 &&
              std::all_of(sources_.begin(), sources_.end(),
                          [first](const auto& each) { return row_bytes_of(each) == first; });
    const bool works = std::any_of(sources_.begin(), sources_.end(), [](const auto& each) {
      return each.integers.has_value() || each.table->has_crcs();
    });
    if (works) pool_.emplace(1);
  }
  ~State() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return under_way_ == 0; });
  }

  Future<BatchPtr> read(std::vector<Pick> picks) {
    for (const Pick& pick : picks) {
      if (pick.source >= sources_.size() || pick.sample >= sources_[pick.source].table->samples()) {
        return make_error(Code::invalid_argument,
                          "there is no sample " + std::to_string(pick.sample) + " in source " +
                              std::to_string(pick.source),
                          kWhere);
      }
    }
    auto work = std::make_shared<Work>(sources_.size());
    if (const Status laid_out = lay_out(std::move(picks), *work); !laid_out)
      return laid_out.error();
    Future<BatchPtr> future = work->promise.future();
    {
      std::lock_guard lock(mutex_);
      ++under_way_;
    }
    start(work);
    return future;
  }

 private:
  // A batch on its way.
  struct Work {
    explicit Work(size_t sources) : pieces(sources) {}
    std::shared_ptr<Batch> batch;
    std::unique_ptr<Batch> raw;              // integers as they are stored
    std::vector<std::vector<Piece>> pieces;  // by source
    std::atomic<size_t> left{1};             // calls to stores, and the one that starts them
    std::mutex mutex;
    std::optional<Error> error;  // guarded by mutex
    Promise<BatchPtr> promise;
  };
  using WorkPtr = std::shared_ptr<Work>;

  Status lay_out(std::vector<Pick> picks, Work& work) {
    auto batch = std::make_shared<Batch>();
    auto raw = std::make_unique<Batch>();
    batch->starts.push_back(0);
    batch->asked.resize(sources_.size());
    uint64_t at = 0, raw_at = 0;
    for (const Pick& pick : picks) {
      const BatchSource& source = sources_[pick.source];
      std::vector<Piece>& pieces = work.pieces[pick.source];
      const size_t before = pieces.size();
      if (!packed_) at = align_up(at, kAlign);
      if (source.integers) {
        STOKER_ASSIGN(raw_at, source.table->append(pick.sample, raw_at, pieces));
        batch->parts.push_back({at, row_bytes_of(source)});
        at += row_bytes_of(source);
      } else {
        STOKER_ASSIGN(at, source.table->append(pick.sample, at, pieces));
        for (size_t i = before; i < pieces.size(); ++i)
          batch->parts.push_back({pieces[i].into, pieces[i].bytes});
      }
      batch->starts.push_back(batch->parts.size());
      for (size_t i = before; i < pieces.size(); ++i) batch->asked[pick.source] += pieces[i].bytes;
    }
    take_memory(spares_, at, *batch);
    take_memory(raw_spares_, raw_at, *raw);
    batch->picks = std::move(picks);
    work.batch = std::move(batch);
    work.raw = std::move(raw);
    return {};
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
      source.store
          ->read_many(source.table->keys(), work->pieces[i], into.memory.slice().sub(0, into.bytes))
          .on_done([this, work](const Status& status) { part_done(work, status); });
    }
    part_done(work, {});
  }

  void part_done(const WorkPtr& work, const Status& status) {
    if (!status) {
      std::lock_guard lock(work->mutex);
      if (!work->error) work->error = status.error();
    }
    if (--work->left != 0) return;
    if (!pool_ || work->error) return finish(work);
    pool_->run([this, work] {
      if (const Status sound = verify_all(*work->batch); !sound) work->error = sound.error();
      widen_all(*work);
      finish(work);
    });
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

  void widen_all(Work& work) {
    const std::byte* from = work.raw->memory.data();
    for (size_t i = 0; i < work.batch->picks.size(); ++i) {
      const BatchSource& source = sources_[work.batch->picks[i].source];
      if (!source.integers) continue;
      const Place& place = work.batch->parts[work.batch->starts[i]];
      std::byte* const to = work.batch->memory.data() + place.offset;
      const size_t count = place.bytes / sizeof(int64_t);
      widen(*source.integers, from, count, reinterpret_cast<int64_t*>(to));
      from += count * bytes_of(*source.integers);
    }
  }

  // The promise's own waiters may end this reader as soon as the last one is not under way any
  // more: nothing of it is touched after that.
  void finish(const WorkPtr& work) {
    work->raw.reset();
    if (work->error) {
      work->promise.complete(*work->error);
    } else {
      work->promise.complete(BatchPtr(std::move(work->batch)));
    }
    std::lock_guard lock(mutex_);
    if (--under_way_ == 0) idle_.notify_all();
  }

  const std::vector<BatchSource> sources_;
  const std::shared_ptr<Spares> spares_, raw_spares_;
  bool packed_ = false;
  std::mutex mutex_;
  std::condition_variable idle_;
  size_t under_way_ = 0;      // guarded by mutex_
  std::optional<Pool> pool_;  // the last member: it ends before what its jobs use
};

Result<std::unique_ptr<BatchReader>> BatchReader::make(std::vector<BatchSource> sources,
                                                       size_t spares) {
  if (sources.empty())
    return make_error(Code::invalid_argument, "a reader needs at least one source", kWhere);
  for (const BatchSource& source : sources) {
    const uint64_t bytes = source.table->equal_bytes();
    if (source.integers && (bytes == 0 || bytes % bytes_of(*source.integers) != 0))
      return make_error(Code::invalid_argument,
                        "samples of integers have equal sizes, a whole number of them", kWhere);
  }
  return std::unique_ptr<BatchReader>(
      new BatchReader(std::make_unique<State>(std::move(sources), spares)));
}

BatchReader::BatchReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
BatchReader::~BatchReader() = default;

Future<BatchPtr> BatchReader::read(std::vector<Pick> picks) {
  return state_->read(std::move(picks));
}

}  // namespace stoker::data
