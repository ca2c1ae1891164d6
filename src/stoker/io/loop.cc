#include "stoker/io/loop.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <numeric>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/bounce.h"
#include "stoker/io/flights.h"
#include "stoker/io/scheduler.h"
#include "stoker/io/stalls.h"
#include "stoker/io/thread.h"
#include "stoker/memory/lost.h"

namespace stoker {

namespace {

// What an op counts against the bound on background bytes. The bounce path bounds itself.
uint64_t background_bytes(const Op& op) {
  const bool moves = op.kind == Op::Kind::read || op.kind == Op::Kind::write;
  return moves && op.priority != Priority::demand && !Bounce::needed(op) ? op.bytes.size : 0;
}

// Of disks that never answered: the engine may still write to its flights, and the kernel to what
// they name.
void keep_until_the_end(std::unique_ptr<Engine> engine, std::unique_ptr<Flights> flights) {
  using Kept = std::vector<std::pair<std::unique_ptr<Engine>, std::unique_ptr<Flights>>>;
  static Mutex mutex;
  static Kept* kept = new Kept;
  MutexLock lock(mutex);
  kept->emplace_back(std::move(engine), std::move(flights));
}

// In the trace: "prefetch read" and the like.
std::string span_name(const Op& op) {
  constexpr std::array<const char*, kPriorities> classes = {"demand", "prefetch", "write back",
                                                            "checkpoint", "scrub"};
  constexpr std::array<const char*, 4> kinds = {"read", "write", "sync", "trim"};
  return std::string(classes[static_cast<size_t>(op.priority)]) + " " +
         kinds[static_cast<size_t>(op.kind)];
}

}  // namespace

// How an Op travels: submit() (any thread) pushes it on the incoming stack -> the Loop's thread
// sorts it into the scheduler -> dispatch() hands a flight of it to the engine when there is room
// -> poll() completes that -> landed() -> completed() counts the op and calls the caller's done().
// An op of a disk that does not answer goes from watch() to completed().
class Loop::Impl {
 public:
  Impl(std::unique_ptr<Engine> engine, const LoopOptions& options, const Clock& clock)
      : engine_(std::move(engine)),
        options_(options),
        clock_(clock),
        scheduler_(options.floor_percent),
        flights_(std::make_unique<Flights>(engine_->traits().depth_max)) {}
  ~Impl();
  Status start();

  Status submit(std::span<Op* const> ops);
  Status adopt(const Arena& arena);
  Status unadopt(const Arena& arena);
  Status forget(const Arena& arena) REQUIRES(arenas_mutex_);
  Status follow(Impl& follower);
  void unfollow(Impl& follower);
  Loop* leader() const { return options_.follows; }
  Engine& engine() { return *engine_; }
  Stalls& stalls() { return stalls_; }
  const ClassCounters& counters(Priority priority) const {
    return counters_[static_cast<size_t>(priority)];
  }
  const Clock& clock() const { return clock_; }
  bool here() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  static void completed(Op& op) noexcept;
  static void landed(Op& flight) noexcept;
  void run();
  uint64_t wait_ns() const;
  void watch();
  void give_up(Op& flight, uint64_t age_ns);
  uint64_t& answered_ns(FileId file) {
    const auto at = static_cast<size_t>(std::max(file, 0));
    if (at >= answered_ns_.size()) answered_ns_.resize(at + 1);
    return answered_ns_[at];
  }
  bool refuse(Op& op);
  void take_incoming();
  Op* next();
  void dispatch();
  bool tracing() const { return options_.trace != nullptr && options_.trace->on(); }
  // Out of line: what is not traced pays for two branches, not for this one's frame.
  [[gnu::noinline, gnu::cold]] void add_span(const char* track, const Op& op, uint64_t begin_ns,
                                             uint64_t end_ns) const {
    options_.trace->add({.track = track,
                         .name = span_name(op),
                         .begin_ns = begin_ns,
                         .end_ns = end_ns,
                         .bytes = op.bytes.size});
  }
  bool idle() const {
    return in_flight_ == 0 && batch_.empty() && scheduler_.size() == 0 && bounce_.idle();
  }

  std::unique_ptr<Engine> engine_;
  const LoopOptions options_;
  const Clock& clock_;
  std::array<ClassCounters, kPriorities> counters_;
  Mutex arenas_mutex_;  // of a leader it is taken before that of its followers
  std::vector<const Arena*> arenas_ GUARDED_BY(arenas_mutex_);
  std::vector<Impl*> followers_ GUARDED_BY(arenas_mutex_);

  // Shared with the submitting threads. All sequentially consistent: either the Loop sees the new
  // head before it sleeps, or the submitter sees that it sleeps and wakes it.
  std::atomic<Op*> incoming_{nullptr};  // a stack, the newest on top
  std::atomic<size_t> waiting_{0};      // submitted and not yet handed to the engine
  std::atomic<bool> sleeping_{false};   // the Loop waits in poll() and has room for more
  std::atomic<bool> stopping_{false};

  // Of the Loop's thread.
  Scheduler scheduler_;
  Stalls stalls_;
  Bounce bounce_;
  std::unique_ptr<Flights> flights_;
  std::vector<Op*> batch_;             // flights, not yet taken by the engine
  size_t in_flight_ = 0;               // taken by it, without the orphans
  std::vector<uint64_t> answered_ns_;  // by file: when an op of it came back last
  uint64_t watched_ns_ = 0;
  // since when this thread has run; before that it idled, or the process was stopped: not the
  // disk's fault
  uint64_t awake_ns_ = 0;
  uint64_t background_bytes_ = 0;  // in flight
  size_t depth_ = 0;
  std::thread thread_;
};

Status Loop::Impl::start() {
  const auto& floors = options_.floor_percent;
  if (std::accumulate(floors.begin(), floors.end(), 0U) > 100)
    return fail(Code::invalid_argument,
                "the floors of the I/O classes add up to {} percent; give at most 100 in all",
                std::accumulate(floors.begin(), floors.end(), 0U));
  if (options_.stall_warn_ns == 0 || options_.stall_error_ns < options_.stall_warn_ns)
    return fail(Code::invalid_argument,
                "the time until a stalled disk is given up ({} ms) must be at least the time until "
                "the warning ({} ms), and that above 0",
                options_.stall_error_ns / 1'000'000, options_.stall_warn_ns / 1'000'000);
  if (options_.depth == 0 || options_.queue_max == 0)
    return fail(Code::invalid_argument, "an I/O loop needs a depth and a queue of at least 1");
  depth_ = std::min(options_.depth, engine_->traits().depth_max);
  batch_.reserve(depth_);
  STOKER_TRY(bounce_.reserve(options_.budget));
  try {
    thread_ = start_io_thread("stoker-io", [this] { run(); });
  } catch (const std::system_error& error) {
    return fail(
        error.code().value(),
        "cannot start the thread of the I/O loop; raise the limit of processes (ulimit -u)");
  }
  return {};
}

Loop::Impl::~Impl() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  engine_->wake();
  thread_.join();
  if (flights_->orphans() == 0) return;
  keep_until_the_end(std::move(engine_), std::move(flights_));
}

Status Loop::Impl::submit(std::span<Op* const> ops) {
  if (ops.empty()) return {};
  if (waiting_.fetch_add(ops.size()) + ops.size() > options_.queue_max) {
    waiting_.fetch_sub(ops.size());
    return fail(Code::busy, "the I/O queue is full ({} operations): wait for some to finish",
                options_.queue_max);
  }
  const uint64_t now = clock_.now_ns();
  Op* below = nullptr;
  for (Op* op : ops) {
    STOKER_CHECK(op->done != nullptr && static_cast<size_t>(op->priority) < kPriorities);
    op->hook = op->done;
    op->done = &Impl::completed;
    op->holder = this;
    op->queued_ns = now;
    op->next = below;
    below = op;
  }
  Op* head = incoming_.load();
  do {
    ops.front()->next = head;
  } while (!incoming_.compare_exchange_weak(head, below));
  if (sleeping_.exchange(false)) engine_->wake();
  return {};
}

// From the engine's poll().
void Loop::Impl::landed(Op& flight) noexcept {
  Impl& loop = *static_cast<Impl*>(flight.holder);
  const FileId file = flight.file;
  const uint64_t began = flight.queued_ns;
  Op* op = loop.flights_->landed(flight);
  if (op == nullptr) return loop.stalls_.landed(file);
  --loop.in_flight_;
  const uint64_t now = loop.clock_.now_ns();
  loop.answered_ns(file) = now;
  if (loop.stalls_.any()) loop.stalls_.answered(file, now - began);
  op->done(*op);
}

// On the Loop's thread: the op has landed, or is the last piece of one that was bounced, or was
// given up.
void Loop::Impl::completed(Op& op) noexcept {
  Impl& loop = *static_cast<Impl*>(op.holder);
  loop.background_bytes_ -= background_bytes(op);
  ClassCounters& counters = loop.counters_[static_cast<size_t>(op.priority)];
  counters.ops.add(1);
  const uint64_t now = loop.clock_.now_ns();
  counters.service_ns.add(now - op.queued_ns);
  if (loop.tracing()) loop.add_span("disk", op, op.queued_ns, now);
  if (!op.result) {
    counters.errors.add(1);
  } else if (op.kind == Op::Kind::read) {
    counters.bytes_read.add(op.bytes.size);
  } else if (op.kind == Op::Kind::write) {
    counters.bytes_written.add(op.bytes.size);
  }
  op.done = op.hook;
  op.hook = nullptr;
  op.done(op);  // the op may be gone after this
}

void Loop::Impl::run() {
  for (;;) {
    take_incoming();
    watch();
    dispatch();
    if (idle() && stopping_ && incoming_ == nullptr) return;
    // With the engine full a new op could not start anyway: nobody need wake us for it.
    sleeping_ = in_flight_ < depth_;
    const bool more = incoming_ != nullptr || (stopping_ && idle());
    engine_->poll(more ? 0 : wait_ns());
    sleeping_ = false;
  }
}

// With nothing under way there is nothing to watch.
uint64_t Loop::Impl::wait_ns() const {
  return in_flight_ == 0 ? UINT64_MAX : options_.stall_warn_ns / 4;
}

// Looks for ops that are older than any should be; seldom, and at no more than `depth` of them.
void Loop::Impl::watch() {
  const uint64_t now = clock_.now_ns();
  const uint64_t gap = now - watched_ns_;
  // what the engine did not take is not the disk's
  if (gap < options_.stall_warn_ns / 4 || !batch_.empty()) return;
  if (gap > options_.stall_warn_ns) awake_ns_ = now;
  watched_ns_ = now;
  flights_->each([&](Op& flight) {
    const uint64_t age_ns = now - std::max({flight.queued_ns, awake_ns_, answered_ns(flight.file)});
    if (age_ns >= options_.stall_warn_ns)
      stalls_.slow(flight.file, age_ns, options_.stall_error_ns);
    if (age_ns >= options_.stall_error_ns) give_up(flight, age_ns);
  });
}

void Loop::Impl::give_up(Op& flight, uint64_t age_ns) {
  Error error = stalls_.give_up(flight.file, age_ns);
  Op& op = Flights::caller(flight);
  if (Bounce::is_piece(op)) {
    if (!Bounce::keep_back(op)) return;
  } else if (flight.bytes.size > 0 && flight.kind != Op::Kind::trim) {
    // its next owner would have it written to, or its bytes to the disk
    if (!losable(flight.bytes)) return;
    lose(flight.bytes);
  }
  flights_->orphan(flight);
  stalls_.orphaned(flight.file);
  op.result = std::move(error);
  --in_flight_;
  op.done(op);
}

void Loop::Impl::take_incoming() {
  Op* newest = incoming_.exchange(nullptr);
  Op* oldest = nullptr;
  while (newest != nullptr) {
    Op* below = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = below;
  }
  while (oldest != nullptr) {
    Op* after = oldest->next;
    scheduler_.push(*oldest);
    oldest = after;
  }
}

// Ends an op that must not go to the engine: of a disk that was given up, or when such disks have
// taken all there is.
bool Loop::Impl::refuse(Op& op) {
  auto error = stalls_.given_up(op.file);
  if (!error && !flights_->room())
    error = Error{Code::io, ETIMEDOUT,
                  "no more transfers are possible: those of disks that do not answer fill the "
                  "queue; end this process"};
  if (!error) return false;
  op.result = *std::move(error);
  op.done(op);
  return true;
}

// The next flight for the engine: pieces of the bounce path first (they were scheduled when their
// op was). While that path is full everything waits for one of its pieces, a fraction of a
// millisecond, rather than that the order of classes is lost.
Op* Loop::Impl::next() {
  for (;;) {
    if (Op* piece = bounce_.next_piece()) {
      if (refuse(*piece)) continue;
      piece->queued_ns = clock_.now_ns();
      return &flights_->launch(*piece, &Impl::landed, this);
    }
    if (bounce_.full()) return nullptr;
    const bool demand_only =
        options_.background_bytes != 0 && background_bytes_ >= options_.background_bytes;
    Op* op = scheduler_.pop(demand_only ? Priority::demand : Priority::scrub);
    if (op == nullptr) return nullptr;
    waiting_.fetch_sub(1);
    const uint64_t now = clock_.now_ns();
    counters_[static_cast<size_t>(op->priority)].queue_ns.add(now - op->queued_ns);
    if (tracing()) add_span("queue", *op, op->queued_ns, now);
    op->queued_ns = now;  // from here on: when service began
    background_bytes_ += background_bytes(*op);
    if (refuse(*op)) continue;
    if (!Bounce::needed(*op)) return &flights_->launch(*op, &Impl::landed, this);
    bounce_.add(*op);
  }
}

void Loop::Impl::dispatch() {
  while (in_flight_ + batch_.size() < depth_) {
    Op* op = next();
    if (op == nullptr) break;
    batch_.push_back(op);
  }
  if (batch_.empty()) return;
  const size_t taken = engine_->submit(batch_);
  in_flight_ += taken;
  batch_.erase(batch_.begin(), batch_.begin() + static_cast<std::ptrdiff_t>(taken));
}

Status Loop::Impl::adopt(const Arena& arena) {
  MutexLock lock(arenas_mutex_);
  STOKER_TRY(engine_->adopt(arena));
  const bool known = std::find(arenas_.begin(), arenas_.end(), &arena) != arenas_.end();
  if (!known) arenas_.push_back(&arena);
  for (Impl* follower : followers_) {
    Status adopted = follower->adopt(arena);
    if (adopted) continue;
    // The caller may end it now: nobody may know it any more.
    if (!known) static_cast<void>(forget(arena));
    return adopted;
  }
  return {};
}

Status Loop::Impl::unadopt(const Arena& arena) {
  MutexLock lock(arenas_mutex_);
  return forget(arena);
}

Status Loop::Impl::forget(const Arena& arena) {
  for (Impl* follower : followers_) STOKER_TRY(follower->unadopt(arena));
  std::erase(arenas_, &arena);
  return engine_->unadopt(arena);
}

Status Loop::Impl::follow(Impl& follower) {
  MutexLock lock(arenas_mutex_);
  followers_.push_back(&follower);
  for (const Arena* arena : arenas_) STOKER_TRY(follower.adopt(*arena));
  return {};
}

void Loop::Impl::unfollow(Impl& follower) {
  MutexLock lock(arenas_mutex_);
  std::erase(followers_, &follower);
}

Result<std::unique_ptr<Loop>> Loop::make(std::unique_ptr<Engine> engine, LoopOptions options,
                                         const Clock& clock) {
  auto impl = std::make_unique<Impl>(std::move(engine), options, clock);
  STOKER_TRY(impl->start());
  std::unique_ptr<Loop> loop(new Loop(std::move(impl)));
  if (options.follows != nullptr) STOKER_TRY(options.follows->impl_->follow(*loop->impl_));
  return loop;
}

Loop::Loop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Loop::~Loop() {
  if (impl_->leader() != nullptr) impl_->leader()->impl_->unfollow(*impl_);
}

Result<FileInfo> Loop::open(const OpenFile& file) {
  auto info = impl_->engine().open(file);
  if (info) impl_->stalls().opened(info->id, file.path);
  return info;
}
Status Loop::close(FileId file) {
  STOKER_TRY(impl_->stalls().closed(file));
  return impl_->engine().close(file);
}
Status Loop::adopt(const Arena& arena) { return impl_->adopt(arena); }
Status Loop::unadopt(const Arena& arena) { return impl_->unadopt(arena); }
Status Loop::submit(std::span<Op* const> ops) { return impl_->submit(ops); }
Status Loop::submit(Op& op) {
  Op* one[] = {&op};
  return impl_->submit(one);
}
EngineTraits Loop::traits() const { return impl_->engine().traits(); }
const IoCounters& Loop::counters() const { return impl_->engine().counters(); }
const ClassCounters& Loop::counters(Priority priority) const { return impl_->counters(priority); }
const Clock& Loop::clock() const { return impl_->clock(); }
bool Loop::here() const { return impl_->here(); }

}  // namespace stoker
