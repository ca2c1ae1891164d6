// Runtime, Store, Transaction and Future for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "convert.h"
#include "stoker/base/bytes.h"
#include "stoker/memory/lost.h"
#include "stoker/store/plan.h"

namespace stoker::python {

std::shared_ptr<TransactionBox> StoreHandle::add(std::unique_ptr<Transaction> transaction) {
  auto box = std::make_shared<TransactionBox>();
  box->step = std::make_shared<offload::StepTransaction>(std::move(transaction));
  MutexLock lock(mutex_);
  std::erase_if(transactions_, [](const auto& each) { return each.expired(); });
  transactions_.push_back(box);
  ++transactions_left_;
  return box;
}

void StoreHandle::transaction_ended() {
  MutexLock lock(mutex_);
  STOKER_CHECK(transactions_left_ > 0);
  if (--transactions_left_ == 0) idle_.notify_all();
}

void TransactionBox::end() {
  if (!step) return;
  if (store && !store->runtime->here()) {
    new std::shared_ptr<offload::StepTransaction>(std::move(step));  // it stays as it is, for good
    return;
  }
  step->abandon();
  step->jobs()->wait_none();
  step.reset();
  if (store) store->transaction_ended();
}

void StoreHandle::close() {
  if (!runtime->here()) return;
  MutexLock lock(mutex_);
  if (std::exchange(closes_, true)) {
    idle_.wait(lock, [this]() REQUIRES(mutex_) { return closed_; });
    return;
  }
  idle_.wait(lock, [this]() REQUIRES(mutex_) { return pending_ == 0; });
  const auto transactions = std::exchange(transactions_, {});
  lock.unlock();
  for (const auto& each : transactions) {
    if (const auto box = each.lock()) box->end();
  }
  lock.lock();
  // One that Python drops just now ends on another thread.
  idle_.wait(lock, [this]() REQUIRES(mutex_) { return transactions_left_ == 0; });
  lock.unlock();
  store.reset();
  lock.lock();
  closed_ = true;
  idle_.notify_all();
}

// Of the process that forked this one, and of no use here.
void check_process(const StoreHandle& handle) {
  if (!handle.store || !handle.store->works_after_fork()) check_process(*handle.runtime);
}

Store& open(const PyStore& store) {
  if (store.handle->refuses() || !store.handle->store)
    raise_invalid("this store was closed: open it again");
  check_process(*store.handle);
  return *store.handle->store;
}

offload::StepTransaction& open(const PyTransaction& transaction) {
  if (transaction.box->store->refuses() || !transaction.box->step)
    raise_invalid("this transaction was abandoned, or its store was closed: begin another");
  check_process(*transaction.box->store);
  return *transaction.box->step;
}

Priority priority_of(std::string_view name) {
  constexpr std::array<std::string_view, kPriorities> names = {"demand", "prefetch", "write_back",
                                                               "checkpoint", "scrub"};
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Priority>(i);
  }
  raise_invalid("priority '" + std::string(name) +
                "' is not one of demand, prefetch, write_back, checkpoint, scrub");
}

namespace {

// Aligned memory for bytes that come from, or go to, a Python object; drawn on the budget.
class Scratch {
 public:
  static std::shared_ptr<Scratch> make(RuntimeHandle& runtime, uint64_t bytes) {
    const uint64_t size = align_up(std::max<uint64_t>(bytes, 1), kIoAlign);
    return std::make_shared<Scratch>(
        unwrap(runtime.owner->budget().take(size, "copying bytes for Python")), size);
  }
  Scratch(Grant grant, uint64_t size)
      : grant_(std::move(grant)),
        size_(size),
        data_(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, size))) {
    STOKER_CHECK(data_ != nullptr);
  }
  ~Scratch() {
    if (!is_lost(data_, size_)) std::free(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const { return data_; }
  Slice slice(size_t bytes) const { return {data_, bytes, kLosableHeap}; }

 private:
  Grant grant_;
  const uint64_t size_;
  std::byte* const data_;
};

PyRuntime make_runtime(const std::string& engine, size_t threads, uint64_t budget_bytes,
                       uint32_t depth, uint64_t stall_seconds) {
  RuntimeOptions options;
  options.engine = engine;
  options.cpu_threads = threads;
  options.budget_bytes = budget_bytes;
  options.depth = depth;
  options.stall_seconds = stall_seconds;
  return {std::make_shared<RuntimeHandle>(unwrap(RuntimeOwner::make(options)))};
}

PyArena make_arena(const std::shared_ptr<RuntimeHandle>& runtime, uint64_t bytes) {
  check_process(*runtime);
  auto arena = [&] {
    const WithoutGil without;  // pre-faulting takes a while
    return Arena::make(bytes, runtime->owner->budget());
  }();
  auto made = unwrap(std::move(arena));
  unwrap(runtime->owner->loop().adopt(*made));
  return {std::make_shared<ArenaHandle>(runtime, std::move(made))};
}

PyStore open_python(const PyRuntime& runtime, const std::string& composition, bool create,
                    uint64_t capacity_bytes, bool read_only, const std::string& holder,
                    uint32_t chunk_bytes, uint64_t objects_max, bool same_disk,
                    const std::vector<std::string>& replace,
                    const std::vector<double>& volume_weights) {
  StoreOptions options;
  options.create = create;
  options.capacity_bytes = capacity_bytes;
  options.read_only = read_only;
  options.holder = holder;
  options.chunk_bytes = chunk_bytes;
  options.objects_max = objects_max;
  options.same_disk = same_disk;
  options.replace = replace;
  options.volume_weights = volume_weights;
  auto store = [&] {
    const WithoutGil without;  // may recover a journal
    return open_store(composition, runtime.handle->owner->runtime(), options);
  }();
  return {std::make_shared<StoreHandle>(runtime.handle, unwrap(std::move(store)))};
}

nb::dict io_counters(const PyRuntime& runtime) {
  const IoCounters& counters = runtime.handle->owner->loop().counters();
  nb::dict out;
  out["reads"] = counters.reads.get();
  out["writes"] = counters.writes.get();
  out["syncs"] = counters.syncs.get();
  out["read_bytes"] = counters.read_bytes.get();
  out["written_bytes"] = counters.written_bytes.get();
  out["submissions"] = counters.submissions.get();
  out["short_transfers"] = counters.short_transfers.get();
  out["retries"] = counters.retries.get();
  return out;
}

// ---- copies of chunks with their hash, on the pool

using Parts = std::vector<std::tuple<uint64_t, uintptr_t, uint64_t>>;  // at, address, bytes

template <typename Byte>
std::vector<codec::ChunkPart<Byte>> parts_of(const Parts& given, uint64_t size) {
  std::vector<codec::ChunkPart<Byte>> parts;
  parts.reserve(given.size());
  for (const auto& [at, address, bytes] : given) {
    if (at > size || bytes > size - at) raise_invalid("a part reaches beyond its chunk");
    if (!parts.empty() && at < parts.back().at) raise_invalid("parts of a chunk must be sorted");
    parts.push_back({at, reinterpret_cast<Byte*>(address), bytes});
  }
  return parts;
}

template <typename Job>
PyHashing hashing(const PyRuntime& runtime, Job job) {
  check_process(*runtime.handle);
  auto promise = std::make_shared<Promise<codec::Digest>>();
  PyHashing made{promise->future(), runtime.handle};
  runtime.handle->owner->pool().run([promise, job = std::move(job)] { promise->complete(job()); });
  return made;
}

PyHashing gather(const PyRuntime& runtime, uintptr_t address, uint64_t bytes, const Parts& given) {
  auto parts = parts_of<const std::byte>(given, bytes);
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i - 1].at + parts[i - 1].bytes > parts[i].at)
      raise_invalid("parts of a chunk must not overlap");
  }
  return hashing(runtime, [address, bytes, parts = std::move(parts)] {
    return codec::gather({reinterpret_cast<std::byte*>(address), bytes}, parts);
  });
}

PyHashing scatter(const PyRuntime& runtime, uintptr_t address, uint64_t bytes, const Parts& given) {
  auto parts = parts_of<std::byte>(given, bytes);
  return hashing(runtime, [address, bytes, parts = std::move(parts)] {
    return codec::scatter({reinterpret_cast<const std::byte*>(address), bytes}, parts);
  });
}

nb::bytes digest(const PyHashing& hashing) {
  if (!hashing.digest.ready()) check_process(*hashing.runtime);
  const codec::Digest found = wait_for(hashing.digest);
  return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size());
}

// ---- trace

nb::tuple stop_trace(const PyRuntime& runtime) {
  auto [spans, dropped] = runtime.handle->owner->trace().stop();
  nb::list out;
  for (const Span& span : spans)
    out.append(
        nb::make_tuple(span.track, span.name, span.begin_ns, span.end_ns, span.bytes, span.thread));
  return nb::make_tuple(out, dropped);
}

// ---- Store

// Names of files may be bytes that are no text: Name takes them back.
nb::object to_text(const std::string& name) {
  return nb::steal(
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "surrogateescape"));
}

nb::dict to_dict(const ObjectInfo& object) {
  nb::dict out;
  out["key"] = to_text(object.key);
  out["bytes"] = object.bytes;
  out["chunk_bytes"] = object.chunk_bytes;
  out["version"] = object.version;
  out["tag"] = object.tag;
  if (object.expected)
    out["class"] = nb::str(kClasses[static_cast<size_t>(*object.expected)].data());
  return out;
}

// A call that may wait for a disk or a server: other threads of Python go on meanwhile, and the
// store is not closed before it ends. A Name becomes a string before it, for that may raise.
template <typename Work>
auto without_gil(const PyStore& store, Work work) {
  Store& source = open(store);
  const StoreHandle::Call inside(*store.handle);
  const WithoutGil without;
  return work(source);
}

Result<ObjectInfo> stat(const PyStore& store, const Name& named_key, const Name& named_snapshot) {
  const std::string_view key = named_key, snapshot = named_snapshot;
  return without_gil(store, [&](Store& source) { return source.stat(key, snapshot); });
}

nb::dict features(const PyStore& store) {
  const Features features =
      without_gil(store, [](const Store& source) { return source.features(); });
  nb::dict out;
  out["atomic"] = features.atomic == AtomicUnit::transaction ? "transaction" : "object";
  out["update"] = features.update;
  out["snapshots"] = features.snapshots;
  out["conditional"] = features.conditional;
  out["verified"] = features.verified;
  out["versions"] = features.versions;
  return out;
}

// None: absent.
void require(const PyTransaction& transaction, const Name& named_key,
             const std::optional<std::string>& tag) {
  const std::string_view key = named_key;  // may raise, which needs the GIL
  if (tag && tag->empty())
    raise_invalid("a tag is never empty; None says that the object must not be there");
  Transaction& staged = open(transaction).raw();
  const StoreHandle::Call inside(*transaction.box->store);
  const Status required = [&] {
    const WithoutGil without;  // finds out first whether a server has conditions
    return staged.require(key, tag ? std::string_view(*tag) : kAbsent);
  }();
  unwrap(required);
}

void name_version(const PyTransaction& transaction, const Name& named) {
  const std::string_view snapshot = named;  // may raise, which needs the GIL
  Transaction& staged = open(transaction).raw();
  const StoreHandle::Call inside(*transaction.box->store);
  const Status status = [&] {
    const WithoutGil without;  // a server may be asked
    return staged.name(snapshot);
  }();
  unwrap(status);
}

Version copy(const PyStore& store, const Name& named_from, const Name& named_to) {
  const std::string_view from = named_from, to = named_to;
  return unwrap(without_gil(store, [&](Store& source) { return source.copy(from, to); }));
}

nb::dict info(const PyStore& store) {
  const StoreInfo info = open(store).info();
  nb::dict out;
  nb::dict snapshots;
  for (const SnapshotInfo& snapshot : info.snapshots)
    snapshots[snapshot.name.c_str()] = snapshot.version;
  out["composition"] = info.composition;
  out["committed"] = info.committed;
  out["durable"] = info.durable;
  out["capacity_bytes"] = info.capacity_bytes;
  out["used_bytes"] = info.used_bytes;
  out["map_bytes"] = info.map_bytes;
  out["read_only"] = info.read_only;
  out["snapshots"] = snapshots;
  nb::dict volumes;
  for (const VolumeInfo& volume : info.volumes) {
    nb::dict each;
    each["read_bytes"] = volume.read_bytes;
    each["written_bytes"] = volume.written_bytes;
    each["bytes_per_second"] = volume.bytes_per_second;
    each["capacity_bytes"] = volume.capacity_bytes;
    each["free_bytes"] = volume.free_bytes;
    each["refused_bytes"] = volume.refused_bytes;
    volumes[volume.path.c_str()] = each;
  }
  out["volumes"] = volumes;
  out["cache"] = nb::none();
  if (info.cache) {
    nb::dict cache;
    cache["usable_bytes"] = info.cache->usable_bytes;
    cache["held_bytes"] = info.cache->held_bytes;
    cache["hit_bytes"] = info.cache->hit_bytes;
    cache["memory_hit_bytes"] = info.cache->memory_hit_bytes;
    cache["merged_bytes"] = info.cache->merged_bytes;
    cache["fetched_bytes"] = info.cache->fetched_bytes;
    cache["admitted_bytes"] = info.cache->admitted_bytes;
    cache["commits"] = info.cache->commits;
    cache["damaged_blocks"] = info.cache->damaged_blocks;
    cache["plans"] = info.cache->plans;
    cache["epochs"] = info.cache->epochs;
    cache["epoch_fetched_bytes"] = info.cache->epoch_fetched_bytes;
    cache["epoch_bound_bytes"] = info.cache->epoch_bound_bytes;
    cache["ahead_depth_bytes"] = info.cache->ahead_depth_bytes;
    cache["ahead_bytes"] = info.cache->ahead_bytes;
    cache["prefetched_bytes"] = info.cache->prefetched_bytes;
    cache["prefetched_in_vain_bytes"] = info.cache->prefetched_in_vain_bytes;
    cache["stalls"] = info.cache->stalls;
    cache["off"] = info.cache->off;
    out["cache"] = cache;
  }
  return out;
}

void forget(const PyStore& store, const Name& named_key, const Count& offset_given,
            const Count& bytes_given) {
  const std::string_view key = named_key;
  const uint64_t offset = offset_given, bytes = bytes_given;
  unwrap(without_gil(store, [&](Store& source) { return source.forget(key, offset, bytes); }));
}

void keep_space(const PyStore& store, const Count& bytes_given) {
  const uint64_t bytes = bytes_given;
  unwrap(without_gil(store, [&](Store& source) -> Status {
    source.keep_space(bytes);
    return {};
  }));
}

using RunTable = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// seed None: as listed; counts and weights: a mixture.
void follow(const PyStore& store, const nb::object& ranges, const std::vector<std::string>& keys,
            std::optional<uint64_t> seed, const std::vector<uint64_t>& counts,
            const std::vector<double>& weights, const Count& position, const std::string& name,
            bool ahead) {
  Plan plan;
  plan.name = name;
  plan.keys = keys;
  if (keys.empty()) {
    std::map<std::string, uint64_t> known;
    for (const nb::handle each : ranges) {
      const auto [key, offset, bytes] = nb::cast<std::tuple<std::string, uint64_t, uint64_t>>(each);
      const auto [at, added] = known.try_emplace(key, plan.keys.size());
      if (added) plan.keys.push_back(key);
      plan.runs.push_back({.object = at->second, .offset = offset, .bytes = bytes});
    }
  } else {
    const auto table = nb::cast<RunTable>(ranges);
    if (table.shape(1) != 3 && table.shape(1) != 5)
      raise_invalid(
          "a plan has " + std::to_string(table.shape(1)) +
          " numbers for each range: give 3 (key, offset, bytes), or 5 (and how many such ranges, "
          "and the bytes from one to the next)");
    for (size_t i = 0; i < table.shape(0); ++i) {
      PlanRun run{table(i, 0), table(i, 1), table(i, 2)};
      if (table.shape(1) == 5) {
        run.items = table(i, 3);
        run.stride = table(i, 4);
      }
      plan.runs.push_back(run);
    }
  }
  if (!weights.empty() || !counts.empty()) {
    if (!seed) raise_invalid("a mixture needs the seed of its draws");
    plan.order = Plan::Mixed{counts, weights, *seed};
  } else if (seed) {
    plan.order = Plan::Shuffled{*seed};
  }
  plan.position = position;
  plan.ahead = ahead;
  unwrap(without_gil(store, [&](Store& source) { return source.follow(plan); }));
}

nb::list list(const PyStore& store, const Name& named_prefix, const Name& named_snapshot) {
  const std::string_view prefix = named_prefix, snapshot = named_snapshot;
  auto objects = without_gil(store, [&](Store& source) { return source.list(prefix, snapshot); });
  nb::list out;
  for (const ObjectInfo& object : unwrap(std::move(objects))) out.append(to_dict(object));
  return out;
}

nb::tuple list_level(const PyStore& store, const Name& named_prefix, const Name& named_snapshot) {
  const std::string_view prefix = named_prefix, snapshot = named_snapshot;
  const Level level = unwrap(
      without_gil(store, [&](Store& source) { return source.list_level(prefix, snapshot); }));
  nb::list objects, folders;
  for (const ObjectInfo& object : level.objects) objects.append(to_dict(object));
  for (const std::string& folder : level.folders) folders.append(to_text(folder));
  return nb::make_tuple(objects, folders);
}

bool exists(const PyStore& store, const Name& key, const Name& snapshot) {
  const auto info = stat(store, key, snapshot);
  if (!info && info.error().code == Code::not_found) return false;
  if (!info) raise(info.error());
  return true;
}

// Of a store that others serve.
std::weak_ptr<Answers> answers_of(const Store& store) {
  const auto* const has = dynamic_cast<const HasAnswers*>(&store);
  return has != nullptr ? has->answers() : std::weak_ptr<Answers>();
}

// Counts the bytes once they moved, and lets the store wait for them when it is closed.
PyFuture transfer(const std::shared_ptr<StoreHandle>& store, const Future<void>& future,
                  Counter& counter, uint64_t bytes, const std::weak_ptr<Answers>& answers = {}) {
  (void)store->track(future, [&counter, bytes](const Status& status) {
    if (status) counter.add(bytes);
  });
  return {.version = {}, .done = future, .store = store, .answers = answers};
}

PyFuture read_into(const PyStore& store, const Name& named_key, const Count& offset_given,
                   uintptr_t address, const Count& bytes_given, const std::string& priority,
                   const PyTransaction* transaction, const Name& snapshot) {
  const std::string_view key = named_key;
  const uint64_t offset = offset_given, bytes = bytes_given;
  const ReadOptions options{.snapshot = snapshot, .priority = priority_of(priority)};
  Store& source = open(store);
  Transaction* staged = transaction != nullptr ? &open(*transaction).raw() : nullptr;
  const StoreHandle::Call inside(*store.handle);
  const WithoutGil without;
  const Slice into = store.handle->runtime->slice(address, bytes);
  const auto answers = answers_of(source);
  const WillReceive scope;
  return transfer(store.handle,
                  staged != nullptr ? staged->read(key, offset, into, options)
                                    : source.read(key, offset, into, options),
                  store.handle->read_bytes, bytes, answers);
}

using Lent = nb::ndarray<nb::numpy, uint8_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

// Lives as long as the array; what is written there by mistake stays in this process.
Lent view(const PyStore& store, const Name& named_key, const Count& offset_given,
          const Count& bytes_given, const Name& named_snapshot) {
  const std::string_view key = named_key, snapshot = named_snapshot;
  const uint64_t offset = offset_given, bytes = bytes_given;
  const auto view = without_gil(store, [&](Store& source) {
    const WillReceive scope;
    const auto lent = source.view(key, offset, bytes, {.snapshot = snapshot});
    if (const auto answers = answers_of(source).lock())
      answers->receive_until([&] { return lent.ready(); }, Answers::Time::max());
    return Result<View>(lent.wait());
  });
  auto held = std::make_unique<View>(unwrap(Result<View>(view)));
  auto* data = const_cast<std::byte*>(held->data.get());
  const nb::capsule owner(held.release(),
                          [](void* each) noexcept { delete static_cast<View*>(each); });
  return Lent(data, {static_cast<size_t>(bytes)}, owner);
}

using PieceTable = nb::ndarray<const uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

PyFuture read_pieces(const PyStore& store, const std::vector<std::string>& keys,
                     const PieceTable& table, uintptr_t address, const Count& bytes_given,
                     const std::string& priority) {
  const uint64_t bytes = bytes_given;
  const ReadOptions options{.priority = priority_of(priority)};
  std::vector<Piece> pieces(table.shape(0));
  uint64_t sum = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {table(i, 0), table(i, 1), table(i, 2), table(i, 3)};
    sum += pieces[i].bytes;
  }
  Store& source = open(store);
  const StoreHandle::Call inside(*store.handle);
  const WithoutGil without;
  const Slice into = store.handle->runtime->slice(address, bytes);
  const auto answers = answers_of(source);
  const WillReceive scope;
  return transfer(store.handle, source.read_many(keys, pieces, into, options),
                  store.handle->read_bytes, sum, answers);
}

// Keeps a Python object until it is let go of, by any thread.
std::shared_ptr<PyObject> kept(nb::handle object) {
  const auto let_go = [](void* each) {
    Py_DECREF(static_cast<PyObject*>(each));
    return 0;
  };
  // Where too many wait for Python's own thread, this one stays: that costs memory only.
  return {object.inc_ref().ptr(), [let_go](PyObject* each) { Py_AddPendingCall(let_go, each); }};
}

// Waits for a transfer of memory that is free again as soon as this returns. An interrupted wait
// leaves the transfer going, and keeps what `keep` makes.
template <typename Keep>
void finish(const Future<void>& done, const std::weak_ptr<Answers>& answers, Keep keep) {
  try {
    wait_for(done, answers);
  } catch (...) {
    done.on_done([kept = keep()](const Status&) {});
    throw;
  }
}

constexpr uint64_t kUnasked = 64 << 20;

// Straight into the bytes where the store takes any memory alike.
template <typename Read>
nb::bytes read_bytes(StoreHandle& store, bool aligned, uint64_t bytes, Read read) {
  if (bytes == 0) return nb::bytes("", 0);
  if (aligned) {
    auto scratch = Scratch::make(*store.runtime, bytes);
    finish(store.track(read(scratch->slice(bytes))), {}, [&] { return scratch; });
    store.read_bytes.add(bytes);
    return nb::bytes(scratch->data(), bytes);
  }
  if (bytes > PY_SSIZE_T_MAX)
    raise_invalid(std::to_string(bytes) + " bytes do not fit an object of Python: read less");
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
  if (made == nullptr) throw nb::python_error();
  auto into = nb::steal<nb::bytes>(made);
  const Slice memory{reinterpret_cast<std::byte*>(PyBytes_AS_STRING(made)), bytes};
  const auto answers = answers_of(*store.store);
  const WillReceive scope;
  finish(store.track(read(memory)), answers, [&] { return kept(into); });
  store.read_bytes.add(bytes);
  return into;
}

nb::bytes store_read_bytes(const PyStore& store, const Name& key, const Count& offset,
                           const std::optional<Count>& bytes, const Name& snapshot) {
  const bool aligned = open(store).wants_aligned();
  uint64_t wanted = bytes ? uint64_t{*bytes} : 0;
  // Much memory is not made for an object that is not there. Of a little the read says it as well,
  // and a server is asked once.
  if (aligned || wanted == 0 || wanted > kUnasked) {
    const ObjectInfo object = unwrap(stat(store, key, snapshot));
    if (!bytes && object.bytes > offset) wanted = object.bytes - offset;
  }
  return read_bytes(*store.handle, aligned, wanted, [&](Slice into) {
    return open(store).read(key, offset, into, {.snapshot = snapshot});
  });
}

PyFuture named(const PyStore& store, const Future<void>& future) {
  return {.version = {}, .done = store.handle->track(future), .store = store.handle};
}

void close_store(PyStore& store) {
  if (!store.handle->store) return;
  if (store.handle->sessions != 0)
    raise(fail(Code::busy, "the store still has an open session; close that first"));
  store.handle->refuse();
  const WithoutGil without;
  store.handle->close();
}

// ---- Transaction

PyTransaction begin(const PyStore& store) {
  auto box = store.handle->add(unwrap(open(store).begin()));
  box->store = store.handle;
  return {std::move(box)};
}

PyFuture write_from(const PyTransaction& transaction, const Name& named_key,
                    const Count& offset_given, uintptr_t address, const Count& bytes_given,
                    const std::string& priority) {
  const std::string_view key = named_key;
  const uint64_t offset = offset_given, bytes = bytes_given;
  const Priority urgency = priority_of(priority);
  Transaction& staged = open(transaction).raw();
  const StoreHandle::Call inside(*transaction.box->store);
  const WithoutGil without;  // checksums are computed in here
  const Slice from = transaction.box->store->runtime->slice(address, bytes);
  return transfer(transaction.box->store, staged.write(key, offset, from, urgency),
                  transaction.box->store->written_bytes, bytes);
}

void write_bytes(const PyTransaction& transaction, const Name& named_key, const Count& offset_given,
                 const nb::bytes& data) {
  const std::string_view key = named_key;
  const uint64_t offset = offset_given;
  if (data.size() == 0) return;
  Transaction& staged = open(transaction).raw();
  std::shared_ptr<Scratch> scratch;
  Slice from{reinterpret_cast<std::byte*>(PyBytes_AS_STRING(data.ptr())), data.size()};
  if (transaction.box->store->store->wants_aligned()) {
    scratch = Scratch::make(*transaction.box->store->runtime, data.size());
    std::memcpy(scratch->data(), data.data(), data.size());
    from = scratch->slice(data.size());
  }
  const Future<void> done = [&] {
    const StoreHandle::Call inside(*transaction.box->store);
    const WithoutGil without;  // where room is short it waits for some
    return transaction.box->store->track(staged.write(key, offset, from));
  }();
  finish(done, {}, [&] { return std::pair(scratch, kept(data)); });
  transaction.box->store->written_bytes.add(data.size());
}

nb::bytes staged_read_bytes(const PyTransaction& transaction, const Name& key, const Count& offset,
                            const Count& bytes) {
  const auto read = [&](Slice into) { return open(transaction).raw().read(key, offset, into); };
  const bool aligned =
      !transaction.box->store->store || transaction.box->store->store->wants_aligned();
  return read_bytes(*transaction.box->store, aligned, bytes, read);
}

Durability durability_of(const std::string& name) {
  if (name != "durable" && name != "deferred")
    raise_invalid("durability '" + name + "' is not one of durable, deferred");
  return name == "durable" ? Durability::durable : Durability::deferred;
}

PyFuture commit(const PyTransaction& transaction, const std::string& durability) {
  const Durability named = durability_of(durability);
  offload::StepTransaction& step = open(transaction);
  const StoreHandle::Call inside(*transaction.box->store);
  const WithoutGil without;
  return {.version = transaction.box->store->track(step.commit(named)),
          .done = {},
          .store = transaction.box->store};
}

void abandon(const PyTransaction& transaction) {
  StoreHandle& store = *transaction.box->store;
  if (store.refuses()) return;  // who closes it does that
  const StoreHandle::Call inside(store);
  const WithoutGil without;
  transaction.box->end();
}

nb::object poisoned(const PyTransaction& transaction) {
  const auto error = open(transaction).poisoned();
  return error ? nb::object(nb::str(error->message().c_str())) : nb::none();
}

void expect(const PyTransaction& transaction, const Name& key, const std::string& expected) {
  const auto named = class_of(expected);
  if (!named)
    raise_invalid("class '" + expected + "' is not one of read_only, write_only, read_write");
  unwrap(open(transaction).raw().expect(key, *named));
}

// ---- Future

bool ready(const PyFuture& future) {
  return future.done.valid() ? future.done.ready() : future.version.ready();
}

nb::object wait(const PyFuture& future, std::optional<double> timeout) {
  if (future.store && !ready(future)) check_process(*future.store);
  const int64_t limit = timeout ? static_cast<int64_t>(std::max(0.0, *timeout) * 1e9) : -1;
  const bool done = future.done.valid() ? wait_until_done(future.done, limit, future.answers)
                                        : wait_until_done(future.version, limit, future.answers);
  if (!done) {
    PyErr_SetString(PyExc_TimeoutError, "it is not done yet");
    throw nb::python_error();
  }
  if (!future.done.valid()) return nb::int_(unwrap(future.version.wait()));
  unwrap(future.done.wait());
  return nb::none();
}

nb::object error(const PyFuture& future) {
  if (!ready(future)) return nb::none();
  const Status status = future.done.valid()     ? future.done.wait()
                        : future.version.wait() ? Status()
                                                : Status(future.version.wait().error());
  return status ? nb::none() : nb::object(nb::str(status.error().message().c_str()));
}

void bind_runtime(nb::module_& module) {
  nb::class_<PyRuntime>(module, "Runtime",
                        "The threads and the memory cap that arenas and stores of a process share.")
      .def(
          "__init__",
          [](PyRuntime* self, const std::string& engine, size_t threads, uint64_t budget_bytes,
             uint32_t depth, uint64_t stall_seconds) {
            new (self) PyRuntime(make_runtime(engine, threads, budget_bytes, depth, stall_seconds));
          },
          nb::arg("engine") = "auto", nb::arg("threads") = 2,
          nb::arg("budget_bytes") = uint64_t{1} << 62, nb::arg("depth") = 64,
          nb::arg("stall_seconds") = 300)
      .def(
          "arena",
          [](const PyRuntime& runtime, uint64_t bytes) {
            return make_arena(runtime.handle, bytes);
          },
          nb::arg("bytes"))
      .def("open_store", &open_python, nb::arg("composition"), nb::arg("create") = false,
           nb::arg("capacity_bytes") = 0, nb::arg("read_only") = false, nb::arg("holder") = "",
           nb::arg("chunk_bytes") = 1 << 20, nb::arg("objects_max") = 1 << 16,
           nb::arg("same_disk") = false, nb::arg("replace") = std::vector<std::string>(),
           nb::arg("volume_weights") = std::vector<double>())
      .def("gather", &gather, nb::arg("address"), nb::arg("bytes"), nb::arg("parts"),
           "Fills memory from parts (where, address, bytes), with zeros between them.")
      .def("scatter", &scatter, nb::arg("address"), nb::arg("bytes"), nb::arg("parts"),
           "Copies parts (where, address, bytes) out of memory.")
      .def("io_counters", &io_counters)
      .def(
          "start_trace",
          [](const PyRuntime& r, size_t spans_max) { r.handle->owner->trace().start(spans_max); },
          nb::arg("spans_max") = 1 << 18)
      .def("stop_trace", &stop_trace)
      .def_prop_ro("engine",
                   [](const PyRuntime& r) { return r.handle->owner->loop().traits().name; })
      .def_prop_ro("threads", [](const PyRuntime& r) { return r.handle->owner->pool().threads(); })
      .def_prop_ro("budget_bytes",
                   [](const PyRuntime& r) { return r.handle->owner->budget().cap(); })
      .def_prop_ro("budget_used",
                   [](const PyRuntime& r) { return r.handle->owner->budget().used(); })
      .def_prop_ro("budget_peak",
                   [](const PyRuntime& r) { return r.handle->owner->budget().peak(); });
}

}  // namespace
}  // namespace stoker::python

void bind_store(nanobind::module_& module) {
  using namespace stoker::python;
  bind_runtime(module);
  nb::class_<PyFuture>(module, "Future", "The result of something that is still going on.")
      .def("ready", &ready)
      .def("wait", &wait, nb::arg("timeout").none() = nb::none())
      .def("error", &error);
  nb::class_<PyHashing>(module, "Hashing", "A copy that is going on, and the hash of its chunk.")
      .def("wait", &digest);
  nb::class_<PyTransaction>(module, "Transaction",
                            "Changes that become visible together, by one commit, or not at all.")
      .def(
          "resize",
          [](const PyTransaction& t, const Name& key, const Count& bytes, uint32_t chunk) {
            unwrap(open(t).raw().resize(key, bytes, chunk));
          },
          nb::arg("key"), nb::arg("bytes"), nb::arg("chunk_bytes") = 0)
      .def("write_bytes", &write_bytes, nb::arg("key"), nb::arg("offset"), nb::arg("data"))
      .def("write", &write_from, nb::arg("key"), nb::arg("offset"), nb::arg("address"),
           nb::arg("bytes"), nb::arg("priority") = "write_back")
      .def("read_bytes", &staged_read_bytes, nb::arg("key"), nb::arg("offset"), nb::arg("bytes"))
      .def(
          "remove",
          [](const PyTransaction& t, const Name& key) { unwrap(open(t).raw().remove(key)); },
          nb::arg("key"))
      .def("expect", &expect, nb::arg("key"), nb::arg("expected"))
      .def("require", &require, nb::arg("key"), nb::arg("tag").none())
      .def("name", &name_version, nb::arg("snapshot"))
      .def("commit", &commit, nb::arg("durability") = "durable")
      .def("abandon", &abandon)
      .def_prop_ro("poisoned", &poisoned)
      .def_prop_ro("active_jobs",
                   [](const PyTransaction& t) { return open(t).jobs()->computing(); });
  nb::class_<PyStore>(module, "Store", "Named objects of bytes, changed only by transactions.")
      .def(
          "arena",
          [](const PyStore& store, uint64_t bytes) {
            return make_arena(store.handle->runtime, bytes);
          },
          nb::arg("bytes"))
      .def("info", &info)
      .def("features", &features)
      .def("health", &health)
      .def(
          "stat",
          [](const PyStore& s, const Name& key, const Name& snapshot) {
            return to_dict(unwrap(stat(s, key, snapshot)));
          },
          nb::arg("key"), nb::arg("snapshot") = "")
      .def("exists", &exists, nb::arg("key"), nb::arg("snapshot") = "")
      .def("list", &list, nb::arg("prefix") = "", nb::arg("snapshot") = "")
      .def("list_level", &list_level, nb::arg("prefix") = "", nb::arg("snapshot") = "")
      .def("read_bytes", &store_read_bytes, nb::arg("key"), nb::arg("offset") = 0,
           nb::arg("bytes").none() = nb::none(), nb::arg("snapshot") = "")
      .def("read", &read_into, nb::arg("key"), nb::arg("offset"), nb::arg("address"),
           nb::arg("bytes"), nb::arg("priority") = "prefetch", nb::arg("txn").none() = nb::none(),
           nb::arg("snapshot") = "")
      .def("read_many", &read_pieces, nb::arg("keys"), nb::arg("pieces"), nb::arg("address"),
           nb::arg("bytes"), nb::arg("priority") = "prefetch")
      .def("view", &view, nb::arg("key"), nb::arg("offset"), nb::arg("bytes"),
           nb::arg("snapshot") = "")
      .def("begin", &begin)
      .def("forget", &forget, nb::arg("key"), nb::arg("offset"), nb::arg("bytes"))
      .def("keep_space", &keep_space, nb::arg("bytes"),
           "Says that objects are removed to make room for others like them. The store may then "
           "keep so many bytes of removed ones, to write into them again, until it is closed; 0 "
           "ends that.")
      .def("follow", &follow, nb::arg("ranges"), nb::arg("keys") = std::vector<std::string>(),
           nb::arg("seed") = nb::none(), nb::arg("counts") = std::vector<uint64_t>(),
           nb::arg("weights") = std::vector<double>(), nb::arg("position") = 0,
           nb::arg("name") = "", nb::arg("ahead") = false,
           "Tells a cache what will be read, so that it keeps what is read soonest. `ranges`: "
           "(key, offset, bytes) in order of use. Or, with `keys`, an array of uint64 [n, 3]: "
           "which key, offset, bytes; [n, 5]: also how many such items there are, and how far "
           "apart. With `seed` all items are read once an epoch, in the order of Permutation(n, "
           "seed, epoch). With `counts` (items of each source) and `weights` too, they are drawn "
           "by Mixture(weights, seed), source i in the order of the seed `seed + 1 + i`. "
           "`position` is read next, counted through all epochs. A plan takes the place of the "
           "one of its `name`; one without ranges ends it. With `ahead` reads come in this "
           "order, all of them through this store, and what comes next is fetched ahead of them.")
      .def("copy", &copy, nb::arg("from_key"), nb::arg("to_key"))
      .def(
          "snapshot",
          [](const PyStore& s, const Name& name) { return named(s, open(s).snapshot(name)); },
          nb::arg("name"))
      .def(
          "drop",
          [](const PyStore& s, const Name& name, const std::string& durability) {
            return named(s, open(s).drop(name, durability_of(durability)));
          },
          nb::arg("name"), nb::arg("durability") = "durable")
      .def("close", &close_store);
}
