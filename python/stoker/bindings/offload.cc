// PlaneIo and UpdateJob for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "convert.h"
#include "names.h"
#include "stoker/offload/gradient.h"

namespace stoker::python {

SessionHandle::SessionHandle(std::shared_ptr<StoreHandle> the_store,
                             std::shared_ptr<ArenaHandle> the_arena,
                             std::unique_ptr<offload::Session> the_session)
    : store(std::move(the_store)), arena(std::move(the_arena)), session(the_session.release()) {
  ++store->sessions;
}

void SessionHandle::close() {
  if (!session || !session.get_deleter().here()) return;
  session.reset();
  --store->sessions;
  arena.reset();
  store.reset();
}

namespace {

using offload::BlockId;
using offload::GradSpan;
using offload::Hash128;
using offload::Plane;
using offload::Segment;
using offload::Stopwatch;

struct PySession {
  std::shared_ptr<SessionHandle> handle;
};

struct PyUpdateJob {
  std::shared_ptr<SessionHandle> session;
  std::shared_ptr<offload::UpdateJob> job;
  bool hashes;
};

offload::Session& open(const PySession& session) {
  if (!session.handle->session)
    raise_invalid("this session was closed: call stoker.offload() again");
  check_process(*session.handle->store->runtime);
  return *session.handle->session;
}

PySession make_session(const PyRuntime& runtime, const PyStore& store, const PyArena& arena,
                       const offload::SessionOptions& options) {
  auto made = offload::Session::make(python::open(store), runtime.handle->owner->runtime(),
                                     *arena.handle->arena, options);
  return {std::make_shared<SessionHandle>(store.handle, arena.handle, unwrap(std::move(made)))};
}

// The fields of a tuple that Python passes; `form` says what it should have been.
nb::tuple tuple_of(nb::handle item, size_t size, const char* form) {
  nb::tuple fields;
  if (!nb::try_cast(item, fields) || fields.size() != size)
    raise_invalid(std::string("expected a tuple ") + form);
  return fields;
}

template <typename T>
T field(const nb::tuple& fields, size_t index, const char* form) {
  T value{};
  if (!nb::try_cast(nb::object(fields[index]), value))
    raise_invalid("field " + std::to_string(index) + " of a tuple " + form + " has the wrong type");
  return value;
}

std::vector<GradSpan> spans_of(const nb::sequence& items) {
  std::vector<GradSpan> spans;
  for (nb::handle item : items) {
    constexpr const char* form = "(address, count, dtype)";
    const nb::tuple fields = tuple_of(item, 3, form);
    spans.push_back({reinterpret_cast<std::byte*>(field<uintptr_t>(fields, 0, form)),
                     field<uint64_t>(fields, 1, form),
                     grad_type_of(field<std::string>(fields, 2, form))});
  }
  return spans;
}

nb::bytes to_bytes(const Hash128& hash) { return nb::bytes(&hash, sizeof hash); }

nb::list to_list(const std::vector<Hash128>& hashes) {
  nb::list out;
  for (const Hash128& hash : hashes) out.append(to_bytes(hash));
  return out;
}

std::shared_ptr<offload::StepTransaction> share(const PyTransaction* transaction) {
  if (transaction == nullptr) return nullptr;
  python::open(*transaction);
  return transaction->box->step;
}

// ---- blocks

BlockId add_block(const PySession& session, const std::string& name, uint64_t elements,
                  const std::string& dtype, const std::string& planes) {
  const uint32_t bytes = grad_type_of(dtype) == optim::GradType::bf16 ? 2 : 4;
  if (planes.find_first_not_of("rmv") != std::string::npos)
    raise_invalid("planes '" + planes + "' may name r, m and v only");
  return unwrap(open(session).add_block({.name = name,
                                         .elements = elements,
                                         .weight_bytes = bytes,
                                         .frozen = false,
                                         .m = planes.find('m') != std::string::npos,
                                         .v = planes.find('v') != std::string::npos}));
}

BlockId add_frozen(const PySession& session, const std::string& name, uint64_t elements,
                   uint32_t element_bytes) {
  return unwrap(open(session).add_block(
      {.name = name, .elements = elements, .weight_bytes = element_bytes, .frozen = true}));
}

const offload::BlockLayout& layout(const PySession& session, BlockId block) {
  return *unwrap(open(session).layout(block));
}

nb::dict planes(const PySession& session, BlockId block) {
  const auto& geometry = layout(session, block);
  nb::dict out;
  for (Plane plane : offload::kAllPlanes) {
    if (!geometry.has(plane)) continue;
    nb::dict one;
    one["key"] = geometry.key(plane);
    one["bytes"] = geometry.plane_bytes(plane);
    one["chunk_bytes"] = geometry.chunk_bytes(plane);
    out[std::string(letter(plane)).c_str()] = one;
  }
  return out;
}

Slice weights(const PySession& session, BlockId block, uintptr_t address) {
  if (address == 0) return {};
  return session.handle->store->runtime->slice(address,
                                               layout(session, block).plane_bytes(Plane::weight));
}

PyFuture fetch_weights(const PySession& session, BlockId block, uintptr_t address,
                       const std::string& priority, const PyTransaction* transaction) {
  open(session);
  const Priority urgency = priority_of(priority);
  const auto source = share(transaction);
  const Slice into = weights(session, block, address);
  const WithoutGil without;
  const auto& store = session.handle->store;
  return {.version = {},
          .done = store->track(
              session.handle->session->fetch_weights(block, into, urgency, source.get())),
          .store = store};
}

PyFuture store_weights(const PySession& session, BlockId block, uintptr_t address,
                       const PyTransaction& transaction) {
  offload::StepTransaction& step = python::open(transaction);
  const Slice from = weights(session, block, address);
  const WithoutGil without;
  const auto& store = session.handle->store;
  return {.version = {},
          .done = store->track(session.handle->session->store_weights(block, from, step)),
          .store = store};
}

// ---- updates

PyUpdateJob update(const PySession& session, BlockId block, std::vector<Segment> segments,
                   uintptr_t weight_in, uintptr_t weight_out, const PyTransaction& transaction,
                   const PyTransaction* source, bool hashes) {
  offload::UpdateRequest request;
  request.segments = std::move(segments);
  request.weight_in = weights(session, block, weight_in);
  request.weight_out = weights(session, block, weight_out);
  request.transaction = share(&transaction);
  request.source = share(source);
  request.hashes = hashes;
  auto& target = open(session);
  auto job = [&] {
    const WithoutGil without;
    return target.update(block, std::move(request));
  }();
  return {session.handle, unwrap(std::move(job)), hashes};
}

size_t prefetch_state(const PySession& session, BlockId block, const PyTransaction* source,
                      bool with_weights) {
  auto& target = open(session);
  const auto from = share(source);
  auto begun = [&] {
    const WithoutGil without;
    return target.prefetch_state(block, from, with_weights);
  }();
  return unwrap(std::move(begun));
}

Slice region(const PySession& session, uintptr_t address, uint64_t bytes) {
  const Slice slice = session.handle->store->runtime->slice(address, bytes);
  if (slice.arena < 0)
    raise_invalid("this memory cannot be lent to the updates: take it from an arena");
  return slice;
}

size_t lend(const PySession& session, uintptr_t address, uint64_t bytes) {
  auto& target = open(session);
  const Slice lent = region(session, address, bytes);
  const WithoutGil without;
  return target.lend(lent);
}

void recall(const PySession& session, uintptr_t address, uint64_t bytes) {
  auto& target = open(session);
  const Slice lent = region(session, address, bytes);
  const WithoutGil without;
  target.recall(lent);
}

void wait_counted(const PyUpdateJob& job, const Future<void>& future,
                  Counter offload::Traffic::*counter) {
  if (job.session->session) check_process(*job.session->store->runtime);
  if (!future.ready() && job.session->session) {
    const Stopwatch watch(job.session->session->traffic().*counter);
    wait_until_done(future);
  }
  wait_for(future);
}

nb::list hashes(const PyUpdateJob& job) {
  if (!job.hashes) raise_invalid("this update was not asked for hashes; pass hashes=True");
  wait_for(job.job->computed());
  return to_list(job.job->hashes());
}

void close_session(const PySession& session) {
  const WithoutGil without;
  session.handle->close();
}

// ---- gradients

nb::list hash_many(const PySession& session, const nb::sequence& items) {
  std::vector<std::span<const std::byte>> spans;
  for (nb::handle item : items) {
    constexpr const char* form = "(address, bytes)";
    const nb::tuple fields = tuple_of(item, 2, form);
    spans.emplace_back(reinterpret_cast<const std::byte*>(field<uintptr_t>(fields, 0, form)),
                       field<uint64_t>(fields, 1, form));
  }
  Pool& pool = open(session).pool();
  const auto hashes = [&] {
    const WithoutGil without;
    return offload::hash(pool, spans);
  }();
  return to_list(hashes);
}

nb::bytes hash_one(const PySession& session, uintptr_t address, uint64_t bytes) {
  const std::array<std::span<const std::byte>, 1> spans = {
      std::span(reinterpret_cast<const std::byte*>(address), bytes)};
  Pool& pool = open(session).pool();
  const auto hashes = [&] {
    const WithoutGil without;
    return offload::hash(pool, spans);
  }();
  return to_bytes(hashes.front());
}

std::vector<double> sum_of_squares(const PySession& session, const nb::sequence& items) {
  const auto spans = spans_of(items);
  Pool& pool = open(session).pool();
  const WithoutGil without;
  return offload::sums_of_squares(pool, spans);
}

void scale(const PySession& session, const nb::sequence& items, double factor) {
  const auto spans = spans_of(items);
  Pool& pool = open(session).pool();
  const WithoutGil without;
  offload::scale(pool, spans, static_cast<float>(factor));
}

// ---- counters

nb::dict by_class(const std::array<Counter, offload::kPlanes>& planes, const Counter& other) {
  nb::dict out;
  for (Plane plane : offload::kAllPlanes)
    out[std::string(offload::name(plane)).c_str()] = planes[static_cast<size_t>(plane)].get();
  out["other"] = other.get();
  return out;
}

double arithmetic_seconds(const PySession& session) {
  const offload::Traffic& traffic = open(session).traffic();
  const uint64_t ns = traffic.kernel_ns.get() + traffic.hash_ns.get() + traffic.copy_ns.get() +
                      traffic.stage_ns.get();
  return static_cast<double>(ns) * 1e-9 / static_cast<double>(open(session).pool().threads());
}

nb::dict counters(const PySession& session) {
  const offload::Traffic& traffic = open(session).traffic();
  const auto seconds_of = [](const Counter& counter) {
    return static_cast<double>(counter.get()) * 1e-9;
  };
  nb::dict seconds;
  seconds["kernel"] = seconds_of(traffic.kernel_ns);
  seconds["hash"] = seconds_of(traffic.hash_ns);
  seconds["copy"] = seconds_of(traffic.copy_ns);
  seconds["stage"] = seconds_of(traffic.stage_ns);
  seconds["read_latency"] = seconds_of(traffic.read_latency_ns);
  seconds["write_latency"] = seconds_of(traffic.write_latency_ns);
  seconds["wait_compute"] = seconds_of(traffic.wait_compute_ns);
  seconds["wait_written"] = seconds_of(traffic.wait_written_ns);
  nb::dict out;
  out["read_bytes"] = by_class(traffic.read_bytes, session.handle->store->read_bytes);
  out["written_bytes"] = by_class(traffic.written_bytes, session.handle->store->written_bytes);
  out["seconds"] = seconds;
  out["tiles"] = traffic.tiles.get();
  out["tiles_prefetched"] = traffic.tiles_prefetched.get();
  out["tiles_retained"] = traffic.tiles_retained.get();
  out["prefetch_dropped"] = traffic.prefetch_dropped.get();
  return out;
}

}  // namespace
}  // namespace stoker::python

void bind_offload(nanobind::module_& module) {
  using namespace stoker::python;
  nb::class_<PyUpdateJob>(module, "UpdateJob", "One optimizer step of one block, on its way.")
      .def("wait",
           [](const PyUpdateJob& j) {
             wait_counted(j, j.job->computed(), &stoker::offload::Traffic::wait_compute_ns);
           })
      .def("wait_written",
           [](const PyUpdateJob& j) {
             wait_counted(j, j.job->written(), &stoker::offload::Traffic::wait_written_ns);
           })
      .def("computed", [](const PyUpdateJob& j) { return j.job->computed().ready(); })
      .def("written", [](const PyUpdateJob& j) { return j.job->written().ready(); })
      .def("hashes", &hashes)
      .def("finite", [](const PyUpdateJob& j) {
        wait_for(j.job->computed());
        return j.job->finite();
      });
  nb::class_<Segment>(module, "Segment", "One parameter's share of an update: what it consumes.")
      .def(
          "__init__",
          [](Segment* self, uint32_t parameter, uint64_t offset, uint64_t count, uintptr_t grad,
             const std::string& dtype, const stoker::optim::Hyper& hyper) {
            new (self) Segment{
                parameter,           offset, count, reinterpret_cast<const std::byte*>(grad),
                grad_type_of(dtype), hyper};
          },
          nb::arg("parameter"), nb::arg("offset"), nb::arg("count"), nb::arg("grad"),
          nb::arg("dtype"), nb::arg("hyper"));
  nb::class_<PySession>(module, "PlaneIo",
                        "What moves bytes between a store, the arena and the optimizer kernels.")
      .def(
          "__init__",
          [](PySession* self, const PyRuntime& runtime, const PyStore& store, const PyArena& arena,
             uint32_t tiles, uint32_t tile_elements, const std::string& moments, uint64_t seed) {
            new (self) PySession(make_session(
                runtime, store, arena, {tiles, tile_elements, moment_type_of(moments), seed}));
          },
          nb::arg("runtime"), nb::arg("store"), nb::arg("arena"), nb::arg("tiles") = 4,
          nb::arg("tile_elements") = 1 << 19, nb::arg("moments") = "exact", nb::arg("seed") = 0)
      .def("add_block", &add_block, nb::arg("name"), nb::arg("elements"), nb::arg("dtype"),
           nb::arg("planes") = "mv")
      .def("add_frozen", &add_frozen, nb::arg("name"), nb::arg("elements"),
           nb::arg("element_bytes"))
      .def(
          "create_block",
          [](const PySession& s, BlockId block, const PyTransaction& txn) {
            unwrap(layout(s, block).create(stoker::python::open(txn).raw()));
          },
          nb::arg("block"), nb::arg("txn"))
      .def(
          "check_block",
          [](const PySession& s, BlockId block) {
            unwrap(layout(s, block).check(*s.handle->store->store));
          },
          nb::arg("block"))
      .def("planes", &planes, nb::arg("block"))
      .def("fetch_weights", &fetch_weights, nb::arg("block"), nb::arg("address"),
           nb::arg("priority") = "prefetch", nb::arg("txn").none() = nb::none())
      .def("store_weights", &store_weights, nb::arg("block"), nb::arg("address"), nb::arg("txn"))
      .def("update", &update, nb::arg("block"), nb::arg("segments"), nb::arg("weight_in"),
           nb::arg("weight_out"), nb::arg("txn"), nb::arg("source").none() = nb::none(),
           nb::arg("hashes") = false)
      .def("prefetch_state", &prefetch_state, nb::arg("block"),
           nb::arg("source").none() = nb::none(), nb::arg("weights") = false)
      .def("drop_prefetched", [](const PySession& s) { open(s).drop_prefetched(); })
      .def("lend", &lend, nb::arg("address"), nb::arg("bytes"))
      .def("recall", &recall, nb::arg("address"), nb::arg("bytes"))
      .def(
          "retain", [](const PySession& s, BlockId block) { unwrap(open(s).retain(block)); },
          nb::arg("block"))
      .def(
          "release", [](const PySession& s, BlockId block) { unwrap(open(s).release(block)); },
          nb::arg("block"))
      .def(
          "invalidate",
          [](const PySession& s, BlockId block) { unwrap(open(s).invalidate(block)); },
          nb::arg("block"))
      .def("retained_bytes", [](const PySession& s) { return open(s).retained_bytes(); })
      .def("hash", &hash_one, nb::arg("address"), nb::arg("bytes"))
      .def("hash_many", &hash_many, nb::arg("spans"))
      .def("sum_of_squares", &sum_of_squares, nb::arg("spans"))
      .def("scale", &scale, nb::arg("spans"), nb::arg("factor"))
      .def("arithmetic_seconds", &arithmetic_seconds)
      .def("counters", &counters)
      .def("close", &close_session);
}
