// Sequence, SampleTable and BatchReader for Python: batches as numpy arrays that share memory with
// the reader.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "convert.h"
#include "handles.h"
#include "stoker/data/batch_reader.h"
#include "stoker/data/image_decoder.h"
#include "stoker/data/shrink.h"

namespace nb = nanobind;

namespace stoker::python {
namespace {

using data::Batch;
using data::BatchPtr;
using data::BatchReader;
using data::BatchSource;
using data::Pick;
using data::SampleTable;
using data::Sequence;

using Numbers = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Triples = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

uint64_t at_least_one(int64_t count) {
  if (count < 1)
    throw nb::value_error(
        ("an order needs at least one sample, not " + std::to_string(count)).c_str());
  return static_cast<uint64_t>(count);
}

// An array of numpy that owns what `fill` writes into it.
template <typename Fill>
Row numbers(size_t count, Fill fill) {
  auto owned = std::make_unique<uint64_t[]>(count);
  for (size_t i = 0; i < count; ++i) owned[i] = fill(i);
  uint64_t* const data = owned.release();
  return Row(data, {count},
             nb::capsule(data, [](void* each) noexcept { delete[] static_cast<uint64_t*>(each); }));
}

data::Reads reads_of(const Sequence& sequence, int64_t first, int64_t last) {
  if (first < 0 || last < first) {
    throw nb::index_error(("there are no positions from " + std::to_string(first) + " to " +
                           std::to_string(last) +
                           ": they count from 0, and the first is not above the last")
                              .c_str());
  }
  return sequence.reads(static_cast<uint64_t>(first), static_cast<uint64_t>(last));
}

std::pair<Row, Row> picks(const Sequence& sequence, int64_t first, int64_t last) {
  const std::vector<Pick> all = reads_of(sequence, first, last).picks;
  return {numbers(all.size(), [&](size_t i) { return all[i].source; }),
          numbers(all.size(), [&](size_t i) { return all[i].sample; })};
}

// count, run, window, lanes, batch
using ShapeOfPython = std::array<int64_t, 5>;

WindowShape shape_of(const ShapeOfPython& given) {
  const auto [count, run, window, lanes, batch] = given;
  constexpr int64_t kMost = int64_t{1} << 62;
  for (const int64_t each : given) {
    if (each < 1 || each > kMost)
      throw nb::value_error(
          ("the numbers of a window are 1 to 2^62, not " + std::to_string(each)).c_str());
  }
  if (batch % lanes != 0)
    throw nb::value_error(("a batch of " + std::to_string(batch) +
                           " samples cannot be divided into " + std::to_string(lanes) +
                           " equal lanes: give a multiple of " + std::to_string(lanes))
                              .c_str());
  return {static_cast<uint64_t>(count), static_cast<uint64_t>(run), static_cast<uint64_t>(window),
          static_cast<uint64_t>(lanes), static_cast<uint64_t>(batch)};
}

Sequence mixed(const std::vector<uint64_t>& counts, const std::vector<double>& weights,
               const nb::int_& seed) {
  for (const uint64_t count : counts) at_least_one(static_cast<int64_t>(count));
  return unwrap(Sequence::mixed(counts, weights, low_bits(seed)));
}

std::shared_ptr<SampleTable> equal_table(std::vector<std::string> keys, const Triples& runs,
                                         uint64_t stride, uint64_t bytes) {
  std::vector<data::EqualRun> all(runs.shape(0));
  for (size_t i = 0; i < all.size(); ++i) all[i] = {runs(i, 0), runs(i, 1), runs(i, 2)};
  return std::make_shared<SampleTable>(
      unwrap(SampleTable::equal(std::move(keys), all, stride, bytes)));
}

// object, samples, offset of the first row of each array
using RowRunOfPython = std::tuple<uint64_t, uint64_t, std::vector<uint64_t>>;

std::shared_ptr<SampleTable> row_table(std::vector<std::string> keys,
                                       const std::vector<RowRunOfPython>& runs,
                                       std::vector<uint64_t> row_bytes) {
  std::vector<data::RowRun> all;
  for (const auto& [object, samples, offsets] : runs) all.push_back({object, samples, offsets});
  return std::make_shared<SampleTable>(
      unwrap(SampleTable::rows(std::move(keys), std::move(all), std::move(row_bytes))));
}

// Keeps the arrays alive: some are mapped files.
template <typename T>
std::span<const T> span_of(
    const nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>& array) {
  return {array.data(), array.shape(0)};
}

data::Packing packing(const std::string& name) {
  const auto found = data::packing_of(name);
  if (!found) raise_invalid("unknown compression '" + name + "': give \"gz\" or \"zstd\"");
  return *found;
}

// kind of compression, bytes in the store
using PackedOfPython = std::pair<std::string, uint64_t>;

std::shared_ptr<SampleTable> range_table(std::vector<std::string> keys,
                                         std::vector<uint64_t> object_bytes, const Numbers& starts,
                                         const Words& objects, const Numbers& offsets,
                                         const Numbers& bytes, const std::optional<Words>& crcs,
                                         data::RecordLayout record,
                                         const std::vector<PackedOfPython>& packed) {
  std::vector<data::PackedObject> all_packed;
  for (const auto& [name, stored] : packed) all_packed.push_back({packing(name), stored});
  struct Owner {
    Numbers starts;
    Words objects;
    Numbers offsets, bytes;
    std::optional<Words> crcs;
  };
  // Let go of by whichever thread is last, with the GIL.
  const std::shared_ptr<const Owner> owner(new Owner{starts, objects, offsets, bytes, crcs},
                                           [](const Owner* all) {
                                             const nb::gil_scoped_acquire gil;
                                             delete all;
                                           });
  data::RangeArrays arrays{span_of(starts),
                           span_of(objects),
                           span_of(offsets),
                           span_of(bytes),
                           crcs ? span_of(*crcs) : std::span<const uint32_t>(),
                           owner};
  return std::make_shared<SampleTable>(
      unwrap(SampleTable::ranges(std::move(keys), std::move(object_bytes), std::move(arrays),
                                 std::move(record), std::move(all_packed))));
}

using Runs = nb::ndarray<nb::numpy, uint64_t, nb::shape<-1, 5>>;

// As Store.follow() takes them.
Runs plan_of(const SampleTable& table) {
  const std::vector<PlanRun> all = unwrap([&] {
    const WithoutGil without;
    return table.plan();
  }());
  auto owned = std::make_unique<uint64_t[]>(all.size() * 5);
  for (size_t i = 0; i < all.size(); ++i) {
    const PlanRun& run = all[i];
    std::ranges::copy(std::to_array({run.object, run.offset, run.bytes, run.items, run.stride}),
                      &owned[i * 5]);
  }
  uint64_t* const data = owned.release();
  return Runs(data, {all.size(), 5}, nb::capsule(data, [](void* each) noexcept {
                delete[] static_cast<uint64_t*>(each);
              }));
}

using StoreHandles = std::vector<std::shared_ptr<StoreHandle>>;

// Of a loader. Its reader and its decoder end before it does; in a forked process it stays.
struct PyPipelineThreads {
  std::shared_ptr<data::PipelineThreads> threads;
};

struct PyBatchReader {
  PyBatchReader() = default;
  PyBatchReader(PyBatchReader&&) = default;
  ~PyBatchReader();
  StoreHandles stores;           // of each source; end after the reader
  Unforked<BatchReader> reader;  // in a forked process there is nothing to wait for
};

struct PyBatch {
  Future<BatchPtr> future;
  StoreHandles stores;
};

PyBatchReader::~PyBatchReader() {
  if (reader == nullptr) return;
  if (PyGILState_Check() != 0) {
    const WithoutGil without;
    reader.reset();
  } else {
    reader.reset();
  }
}

// store, table, integers, tags
using SourceOfPython = std::tuple<PyStore*, std::shared_ptr<SampleTable>,
                                  std::optional<std::string>, std::vector<std::string>>;

// Lives as long as a batch in it.
std::shared_ptr<Arena> shared(const std::optional<PyArena>& arena) {
  if (!arena) return nullptr;
  return {arena->handle, arena->handle->arena.get()};
}

PyBatchReader* make_reader(const std::vector<SourceOfPython>& sources, size_t spares,
                           uint64_t unpacked_bytes, const PyPipelineThreads& threads,
                           const std::optional<PyArena>& arena) {
  std::vector<BatchSource> all;
  StoreHandles stores;
  for (const auto& [store, table, integers, tags] : sources) {
    std::optional<data::Integer> kind;
    if (integers) {
      kind = data::integer_of(*integers);
      if (!kind)
        raise_invalid("unknown type of integers '" + *integers +
                      "': give a type of numpy, such as \"uint16\"");
    }
    all.push_back({&open(*store), table, kind, tags, &store->handle->runtime->owner->budget()});
    stores.push_back(store->handle);
  }
  auto made = std::make_unique<PyBatchReader>();
  made->stores = std::move(stores);
  made->reader = Unforked<BatchReader>(
      unwrap(BatchReader::make(std::move(all), spares, {unpacked_bytes, shared(arena)},
                               threads.threads))
          .release());
  return made.release();
}

PyBatch start(const PyBatchReader& reader, data::Reads reads) {
  for (const auto& store : reader.stores) {
    check_process(*store->runtime);
    if (!store->store) raise_invalid("the store of this data was closed; open it again");
  }
  const WithoutGil without;
  const data::BatchRead begun = reader.reader->read(std::move(reads));
  for (const auto& [source, done] : begun.begun) (void)reader.stores[source]->track(done);
  const Future<BatchPtr>& future = begun.batch;
  for (size_t i = 0; i < reader.stores.size(); ++i) {
    StoreHandle* const store = reader.stores[i].get();
    (void)store->track(future, [store, i](const Result<BatchPtr>& batch) {
      if (batch) store->read_bytes.add((*batch)->asked[i]);
    });
  }
  return {future, reader.stores};
}

PyBatch read_positions(const PyBatchReader& reader, const Sequence& sequence, int64_t first,
                       int64_t last) {
  return start(reader, reads_of(sequence, first, last));
}

PyBatch read_samples(const PyBatchReader& reader, uint32_t source, const Numbers& samples) {
  std::vector<Pick> all(samples.shape(0));
  for (size_t i = 0; i < all.size(); ++i) all[i] = {source, samples(i)};
  return start(reader, {std::move(all), {}, {}});
}

void wait_for_batch(const PyBatch& batch) {
  check_process(*batch.stores.front()->runtime);
  wait_until_done(batch.future);
  if (const Result<BatchPtr>& result = batch.future.wait(); !result) raise(result.error());
}

const Batch& done(const PyBatch& batch) {
  if (!batch.future.ready()) throw nb::value_error("the batch is not there yet: wait() for it");
  const Result<BatchPtr>& result = batch.future.wait();
  if (!result) raise(result.error());
  return **result;
}

// Lives as long as the array, or what was made of it.
Bytes memory(const PyBatch& batch) {
  const Batch& read = done(batch);
  auto owner = std::make_unique<Future<BatchPtr>>(batch.future);
  return Bytes(reinterpret_cast<uint8_t*>(read.memory.data()), {read.bytes},
               nb::capsule(owner.release(), [](void* each) noexcept {
                 delete static_cast<Future<BatchPtr>*>(each);
               }));
}

std::pair<Row, Row> picked(const PyBatch& batch) {
  const std::vector<Pick>& all = done(batch).picks;
  return {numbers(all.size(), [&](size_t i) { return all[i].source; }),
          numbers(all.size(), [&](size_t i) { return all[i].sample; })};
}

// Bytes and ranges that the stores were asked for.
std::pair<uint64_t, uint64_t> asked(const PyBatch& batch) {
  const Batch& read = done(batch);
  return {std::reduce(read.asked.begin(), read.asked.end()),
          std::reduce(read.ranges.begin(), read.ranges.end())};
}

std::vector<std::vector<std::pair<uint64_t, uint64_t>>> places(const PyBatch& batch) {
  const Batch& read = done(batch);
  std::vector<std::vector<std::pair<uint64_t, uint64_t>>> all(read.picks.size());
  for (size_t i = 0; i < all.size(); ++i) {
    for (uint64_t part = read.starts[i]; part < read.starts[i + 1]; ++part)
      all[i].emplace_back(read.parts[part].offset, read.parts[part].bytes);
  }
  return all;
}

// One behind another, in nanoseconds of time.perf_counter_ns().
std::vector<std::tuple<std::string, uint64_t, uint64_t>> stages(const PyBatch& batch) {
  const data::StageTimes& at = done(batch).times;
  return {{"read", at.begun, at.read},
          {"unpack", at.read, at.unpacked},
          {"queue", at.unpacked, at.taken},
          {"verify", at.taken, at.verified},
          {"assemble", at.verified, at.assembled}};
}

std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> objects(const PyBatch& batch) {
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> all;
  for (const data::Asked& each : done(batch).objects)
    all.emplace_back(each.source, each.object, each.bytes);
  return all;
}

struct PyImageDecoder {
  PyImageDecoder() = default;
  PyImageDecoder(PyImageDecoder&&) = default;
  ~PyImageDecoder();
  Unforked<data::ImageDecoder> decoder;  // in a forked process it has no threads
};

PyImageDecoder::~PyImageDecoder() {
  if (decoder == nullptr) return;
  if (PyGILState_Check() != 0) {
    const WithoutGil without;
    decoder.reset();
  } else {
    decoder.reset();
  }
}

std::optional<nb::bytes> shrink(const nb::bytes& file, uint32_t side, int quality) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(file.data()), file.size());
  auto made = [&] {
    const WithoutGil without;
    return data::shrink_jpeg(bytes, side, quality);
  }();
  const auto smaller = unwrap(std::move(made));
  if (!smaller) return std::nullopt;
  return nb::bytes(smaller->data(), smaller->size());
}

nb::bytes unpack(const nb::bytes& packed, const std::string& kind, uint64_t most) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(packed.data()),
                                         packed.size());
  const data::Packing how = packing(kind);
  const auto raw = unwrap([&] {
    const WithoutGil without;
    return data::unpack_all(how, bytes, most);
  }());
  return nb::bytes(raw.data(), raw.size());
}

struct PyImages {
  Future<data::ImagesPtr> future;
  StoreHandles stores;
};

using Floats3 = std::tuple<float, float, float>;

PyImageDecoder* make_decoder(uint32_t height, uint32_t width, const std::string& crop, bool flip,
                             const std::optional<std::pair<Floats3, Floats3>>& normalise,
                             const nb::int_& seed, const PyPipelineThreads& threads, size_t spares,
                             const std::optional<PyArena>& arena) {
  data::JpegOptions options;
  options.height = height;
  options.width = width;
  options.flip = flip;
  options.seed = low_bits(seed);
  if (crop == "random") {
    options.crop = data::Crop::random;
  } else if (crop == "centre") {
    options.crop = data::Crop::centre;
  } else if (crop != "whole") {
    raise_invalid("unknown crop '" + crop + "': give \"random\", \"centre\" or None");
  }
  if (normalise) {
    const auto [mean, deviation] = *normalise;
    options.normalise =
        data::Normalise{{std::get<0>(mean), std::get<1>(mean), std::get<2>(mean)},
                        {std::get<0>(deviation), std::get<1>(deviation), std::get<2>(deviation)}};
  }
  auto made = std::make_unique<PyImageDecoder>();
  made->decoder = Unforked<data::ImageDecoder>(
      unwrap(data::ImageDecoder::make(options, threads.threads, spares, shared(arena))).release());
  return made.release();
}

PyImages decode_images(const PyImageDecoder& decoder, const PyBatch& batch, uint64_t first,
                       uint64_t samples) {
  check_process(*batch.stores.front()->runtime);
  const WithoutGil without;
  return {decoder.decoder->decode(batch.future, first, samples), batch.stores};
}

void wait_for_images(const PyImages& images) {
  check_process(*images.stores.front()->runtime);
  wait_until_done(images.future);
  if (const auto& result = images.future.wait(); !result) raise(result.error());
}

const data::Images& done(const PyImages& images) {
  if (!images.future.ready()) throw nb::value_error("the images are not there yet: wait()");
  const auto& result = images.future.wait();
  if (!result) raise(result.error());
  return **result;
}

// Lives as long as the array, or what was made of it.
Bytes image_memory(const PyImages& images) {
  const data::Images& decoded = done(images);
  auto owner = std::make_unique<Future<data::ImagesPtr>>(images.future);
  return Bytes(reinterpret_cast<uint8_t*>(decoded.memory.data()), {decoded.bytes},
               nb::capsule(owner.release(), [](void* each) noexcept {
                 delete static_cast<Future<data::ImagesPtr>*>(each);
               }));
}

}  // namespace
}  // namespace stoker::python

void bind_data(nb::module_& module) {
  using namespace stoker;
  using namespace stoker::python;
  nb::class_<Sequence>(module, "Sequence",
                       "Which sample of which source stands at each position, over all epochs.")
      .def_static(
          "in_order", [](int64_t count) { return Sequence::in_order(at_least_one(count)); },
          nb::arg("count"))
      .def_static(
          "shuffled",
          [](int64_t count, const nb::int_& seed) {
            return Sequence::shuffled(at_least_one(count), low_bits(seed));
          },
          nb::arg("count"), nb::arg("seed"))
      .def_static(
          "windowed",
          [](const ShapeOfPython& shape, const nb::int_& seed) {
            return Sequence::windowed(shape_of(shape), low_bits(seed));
          },
          nb::arg("shape"), nb::arg("seed"))
      .def_static("mixed", &mixed, nb::arg("counts"), nb::arg("weights"), nb::arg("seed"))
      .def_prop_ro("count", &Sequence::count)
      .def("picks", &picks, nb::arg("first"), nb::arg("last"));
  nb::class_<SampleTable>(module, "SampleTable", "Where the bytes of each sample of a source lie.")
      .def_static("equal", &equal_table, nb::arg("keys"), nb::arg("runs"), nb::arg("stride"),
                  nb::arg("bytes"))
      .def_static("rows", &row_table, nb::arg("keys"), nb::arg("runs"), nb::arg("row_bytes"))
      .def_static("ranges", &range_table, nb::arg("keys"), nb::arg("object_bytes"),
                  nb::arg("starts"), nb::arg("objects"), nb::arg("offsets"), nb::arg("bytes"),
                  nb::arg("crcs") = nb::none(), nb::arg("record") = data::RecordLayout(),
                  nb::arg("packed") = std::vector<PackedOfPython>())
      .def(
          "key",
          [](const SampleTable& table, uint64_t object) -> const std::string& {
            if (object >= table.keys().size())
              throw nb::index_error(("there is no object " + std::to_string(object) +
                                     ": there are " + std::to_string(table.keys().size()))
                                        .c_str());
            return table.keys()[object];
          },
          nb::arg("object"))
      .def("__len__", &SampleTable::samples)
      .def_prop_ro("keys", &SampleTable::keys)
      .def_prop_ro("apart", &SampleTable::apart)
      .def("plan", &plan_of, nb::rv_policy::automatic);
  nb::class_<PyBatch>(module, "Batch", "A batch that is read, or was.")
      .def("ready", [](const PyBatch& batch) { return batch.future.ready(); })
      .def("wait", &wait_for_batch)
      .def("__len__", [](const PyBatch& batch) { return done(batch).picks.size(); })
      .def_prop_ro("memory", &memory, nb::rv_policy::automatic)
      .def_prop_ro("picks", &picked, nb::rv_policy::automatic)
      .def_prop_ro("asked", &asked)
      .def_prop_ro("places", &places)
      .def_prop_ro("stages", &stages)
      .def_prop_ro("objects", &objects);
  nb::class_<PyPipelineThreads>(module, "PipelineThreads", "Threads of one loader.")
      .def(
          "__init__",
          [](PyPipelineThreads* self, size_t threads, size_t most) {
            if (threads < 1 || most < threads)
              raise_invalid("a pipeline of " + std::to_string(threads) + " threads and at most " +
                            std::to_string(most) +
                            " cannot be made: give at least 1, and no more than the most");
            new (self) PyPipelineThreads{std::shared_ptr<data::PipelineThreads>(
                new data::PipelineThreads(threads, most), DeleteWhereMade())};
          },
          nb::arg("threads"), nb::arg("most"))
      .def(
          "use", [](PyPipelineThreads& all, size_t threads) { all.threads->use(threads); },
          nb::arg("threads"))
      .def_prop_ro("threads", [](const PyPipelineThreads& all) { return all.threads->threads(); })
      .def_prop_ro("most", [](const PyPipelineThreads& all) { return all.threads->most(); })
      .def_prop_ro("busy_ns", [](const PyPipelineThreads& all) { return all.threads->busy_ns(); });
  nb::class_<PyImages>(module, "Images", "The images of a batch that are decoded, or were.")
      .def("ready", [](const PyImages& images) { return images.future.ready(); })
      .def("wait", &wait_for_images)
      .def_prop_ro("memory", &image_memory, nb::rv_policy::automatic)
      .def_prop_ro("kept", [](const PyImages& images) { return done(images).kept; })
      .def_prop_ro("parts", [](const PyImages& images) { return done(images).parts; })
      .def_prop_ro("damaged",
                   [](const PyImages& images) {
                     std::vector<std::pair<uint64_t, std::string>> all;
                     for (const auto& each : done(images).damaged)
                       all.emplace_back(each.at, each.why);
                     return all;
                   })
      .def_prop_ro("stage", [](const PyImages& images) {
        const data::Images& decoded = done(images);
        return std::tuple("decode", decoded.begun, decoded.decoded);
      });
  nb::class_<PyImageDecoder>(module, "ImageDecoder", "Decodes the JPEGs of batches.")
      .def(
          "__init__",
          [](PyImageDecoder* self, uint32_t height, uint32_t width, const std::string& crop,
             bool flip, const std::optional<std::pair<Floats3, Floats3>>& normalise,
             const nb::int_& seed, const PyPipelineThreads& threads, size_t spares,
             const std::optional<PyArena>& arena) {
            auto made = std::unique_ptr<PyImageDecoder>(
                make_decoder(height, width, crop, flip, normalise, seed, threads, spares, arena));
            new (self) PyImageDecoder(std::move(*made));
          },
          nb::arg("height"), nb::arg("width"), nb::arg("crop"), nb::arg("flip"),
          nb::arg("normalise").none(), nb::arg("seed"), nb::arg("threads"), nb::arg("spares"),
          nb::arg("arena") = nb::none())
      .def("decode", &decode_images, nb::arg("batch"), nb::arg("first"), nb::arg("samples"));
  module.def("unpack", &unpack, nb::arg("packed"), nb::arg("kind"), nb::arg("most"),
             "Bytes that were compressed as a whole (\"gz\", \"zstd\").");
  module.def("shrink_jpeg", &shrink, nb::arg("file"), nb::arg("side"), nb::arg("quality"));
  nb::class_<PyBatchReader>(module, "BatchReader", "Reads samples of several sources into batches.")
      .def(
          "__init__",
          [](PyBatchReader* self, const std::vector<SourceOfPython>& sources, size_t spares,
             uint64_t unpacked_bytes, const PyPipelineThreads& threads,
             const std::optional<PyArena>& arena) {
            auto made = std::unique_ptr<PyBatchReader>(
                make_reader(sources, spares, unpacked_bytes, threads, arena));
            new (self) PyBatchReader(std::move(*made));
          },
          nb::arg("sources"), nb::arg("spares"), nb::arg("unpacked_bytes"), nb::arg("threads"),
          nb::arg("arena") = nb::none())
      .def("read", &read_positions, nb::arg("sequence"), nb::arg("first"), nb::arg("last"))
      .def("read_samples", &read_samples, nb::arg("source"), nb::arg("samples"));
}
