#include "stoker/store/remote/session.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "stoker/store/blocking_io.h"
#include "stoker/store/read_many.h"

namespace stoker::remote {
namespace {

constexpr uint64_t kListBytes = 4 * kMiB;  // a list under way counts as much
constexpr int kListsMax = 8;               // until one is of one version
constexpr size_t kListingsMax = 8;         // that a connection may have told in part

uint64_t bytes_of(const Request& request) {
  if (request.kind == Kind::write) return request.bytes;
  if (request.kind == Kind::list) return kListBytes;
  uint64_t sum = 0;
  if (request.kind == Kind::read)
    for (const Range& piece : request.pieces) sum += piece.bytes;
  return sum;
}

constexpr uint64_t kObjectBytes = 64;  // of an object in an answer, beside its key and tag

Priority priority_of(const Request& request) {
  return request.number < kPriorities ? static_cast<Priority>(request.number) : Priority::demand;
}

template <typename T>
Result<Answer> numbered(const Result<T>& result) {
  if (!result) return result.error();
  return Answer{.number = *result};
}

Result<Answer> plain(const Status& status) {
  if (!status) return status.error();
  return Answer{};
}

}  // namespace

// Pieces of a read, and what came of them.
struct Session::Reading {
  uint64_t id = 0, bytes = 0;
  Request request;
  TransactionPtr transaction;
  std::vector<uint64_t> places;          // by piece, in the memory of the client
  std::vector<std::vector<Span>> spans;  // by piece
  std::string tag;                       // of a read of one piece
  Mutex mutex;                           // guards what follows
  size_t left = 0;
  size_t first_failed = SIZE_MAX;
  std::optional<Error> error;

  const std::string& key(size_t index) const { return request.keys[request.pieces[index].object]; }
  ReadOptions options() const {
    return {.snapshot = request.text, .priority = priority_of(request)};
  }
  // Whether it was the last one.
  bool done(size_t index, const Status& status) {
    MutexLock lock(mutex);
    if (!status && index < first_failed) {
      first_failed = index;
      error = status.error();
    }
    return --left == 0;
  }
  std::vector<uint32_t> kept() const {
    std::vector<uint32_t> slots;
    for (const auto& each : spans)
      for (const Span& span : each)
        if (span.slot != kNoSlot) slots.push_back(span.slot);
    return slots;
  }
  Answer answer() const {
    Answer all;
    all.error = error;
    all.number = error ? first_failed : 0;
    all.tag = tag;
    if (!error)
      for (const auto& each : spans) all.spans.insert(all.spans.end(), each.begin(), each.end());
    return all;
  }
};

Session::Session(Served& served, Fd socket)
    : served_(served), socket_(std::move(socket)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Session::~Session() {
  for (const auto& [slot, pins] : pins_)
    for (uint32_t left = pins; left > 0; --left) served_.blocks->unpin(slot);
  transactions_.clear();
  served_.sessions_ended.add(1);
}

void Session::end() {
  {
    MutexLock lock(mutex_);
    ended_ = stopping_ = true;
  }
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

bool Session::has_room() { return under_way_ < kUnderWayMax && bytes_under_way_ <= memory_bytes_; }

void Session::run() {
  using Clock = std::chrono::steady_clock;
  const auto heartbeat = std::chrono::milliseconds(served_.options.heartbeat_ms);
  auto heard = Clock::now();
  bool silent = false;  // or deaf
  for (bool going = true; going;) {
    pollfd polled[2] = {{socket_.get(), 0, 0}, {wake_.get(), POLLIN, 0}};
    bool room = false;
    {
      MutexLock lock(mutex_);
      if (ended_) break;
      room = has_room();
      if (room) polled[0].events |= POLLIN;
      if (!out_.empty()) polled[0].events |= POLLOUT;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(heard + heartbeat - Clock::now());
    const int ready = poll(polled, 2, static_cast<int>(std::max<int64_t>(0, left.count() + 1)));
    if (ready < 0 && errno != EINTR) break;
    uint64_t woken = 0;
    if ((polled[1].revents & POLLIN) != 0) (void)!::read(wake_.get(), &woken, sizeof woken);
    if (ready == 0 && Clock::now() >= heard + heartbeat) {
      MutexLock lock(mutex_);
      silent = room || !out_.empty();
      if (silent) break;
      heard = Clock::now();  // the store is slow, and nothing is read meanwhile
      continue;
    }
    if ((polled[0].revents & POLLOUT) != 0) {
      MutexLock lock(mutex_);
      flush();
    }
    if ((polled[0].revents & POLLIN) != 0) {
      heard = Clock::now();
      auto packet = receive(socket_.get(), kRequestMax);
      if (!packet && packet.error().code == Code::mismatch) answer(0, packet.error(), 0);
      going = packet && *packet && (greeted_ ? take(**packet) : hello(std::move(**packet)));
    } else if ((polled[0].revents & (POLLHUP | POLLERR)) != 0) {
      break;
    }
  }
  std::map<uint64_t, Open> transactions;
  {
    MutexLock lock(mutex_);
    ended_ = true;
    transactions.swap(transactions_);
    listings_.clear();
    out_.clear();
  }
  transactions.clear();
  end_plans();
  if (silent) linger();
  shutdown(socket_.get(), SHUT_RDWR);
  std::unordered_map<uint32_t, uint32_t> pins;
  {
    MutexLock lock(mutex_);
    pins.swap(pins_);
  }
  for (const auto& [slot, count] : pins)
    for (uint32_t each = 0; each < count; ++each) served_.blocks->unpin(slot);
}

// A client that was stopped may go on and read what it was lent: that ends with its socket.
void Session::linger() {
  shutdown(socket_.get(), SHUT_WR);
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (stopping_ || pins_.empty()) return;
    }
    pollfd polled[2] = {{socket_.get(), POLLRDHUP, 0}, {wake_.get(), POLLIN, 0}};
    if (poll(polled, 2, -1) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    uint64_t woken = 0;
    if ((polled[1].revents & POLLIN) != 0) (void)!::read(wake_.get(), &woken, sizeof woken);
  }
}

bool Session::hello(Packet packet) {
  auto request = decode_request(packet.header.kind, std::as_bytes(std::span(packet.body)));
  if (!request || request->kind != Kind::hello || !packet.fd) return false;
  const auto bytes = check_memory(packet.fd.get(), kClientMemoryMax);
  if (!bytes || *bytes != request->bytes) return false;
  memory_ = std::move(packet.fd);
  memory_bytes_ = *bytes;
  read_only_ = served_.options.read_only || request->number == 1;
  greeted_ = true;
  const Welcome welcome{.features = served_.store.features(),
                        .heartbeat_ms = served_.options.heartbeat_ms,
                        .blocks_bytes = served_.blocks->bytes()};
  auto message = outgoing({Kind::answer, false, packet.header.id},
                          encode(Answer{.blob = welcome.encode()}), Fd(dup(served_.blocks->fd())));
  return message && send(socket_.get(), *message, false) == Sent::all;
}

void Session::answer(uint64_t id, const Error& error, uint64_t bytes) {
  answer(id, Answer{.error = error}, bytes);
}

void Session::answer(uint64_t id, const Answer& content, uint64_t bytes) {
  auto message = outgoing({Kind::answer, false, id}, encode(content));
  if (!message)
    message = outgoing({Kind::answer, false, id}, encode(Answer{.error = message.error()}));
  served_.requests.add(1);
  MutexLock lock(mutex_);
  if (ended_ || !message) return;
  const bool full = !has_room() || !out_.empty();
  out_.push_back({std::move(*message), bytes});
  if (out_.size() == 1) flush();
  if (!full && out_.empty()) return;
  const uint64_t one = 1;  // the thread of run() polls for something else now
  (void)!::write(wake_.get(), &one, sizeof one);
}

void Session::flush() {
  while (!out_.empty()) {
    const Sent sent = send(socket_.get(), out_.front().message, false);
    if (sent == Sent::later) return;
    if (sent == Sent::closed) ended_ = true;
    if (under_way_ > 0) --under_way_;
    bytes_under_way_ -= out_.front().bytes;
    out_.pop_front();
  }
}

bool Session::take(const Packet& packet) {
  auto decoded = decode_request(packet.header.kind, std::as_bytes(std::span(packet.body)));
  if (!decoded || decoded->kind == Kind::hello || packet.fd) return false;
  Request& request = *decoded;
  const uint64_t id = packet.header.id;
  if (request.kind == Kind::unpin) return unpin(request.numbers);
  if (request.kind == Kind::abandon) {
    TransactionPtr ended;  // ends without the mutex
    MutexLock lock(mutex_);
    if (const auto at = transactions_.find(request.transaction); at != transactions_.end()) {
      ended = std::move(at->second.transaction);
      transactions_.erase(at);
    }
    return true;
  }
  const uint64_t bytes = bytes_of(request);
  const bool moves = request.kind == Kind::write || request.kind == Kind::read;
  if (moves && (bytes > kReadMax || !in_memory(request.place, bytes))) return false;
  {
    MutexLock lock(mutex_);
    ++under_way_;
    bytes_under_way_ += bytes;
  }
  if (const Status allowed = check_rights(request); !allowed) {
    answer(id, allowed.error(), bytes);
    return true;
  }
  switch (request.kind) {
    case Kind::ping:
      answer(id, Answer(), 0);
      return true;
    case Kind::write:  // and commit: in the order in which they came
      write(id, request);
      return true;
    case Kind::commit:
      commit(id, request);
      return true;
    case Kind::read: {
      const auto reading = std::make_shared<Reading>();
      reading->id = id;
      reading->bytes = bytes;
      reading->request = std::move(request);
      read(reading);
      return true;
    }
    case Kind::snapshot:
    case Kind::drop: {
      const auto deferred = request.number == 1 ? Durability::deferred : Durability::durable;
      const auto done = request.kind == Kind::snapshot ? served_.store.snapshot(request.key)
                                                       : served_.store.drop(request.key, deferred);
      done.on_done([self = shared_from_this(), id](const Status& status) {
        self->answer(id, status ? Answer() : Answer{.error = status.error()}, 0);
      });
      return true;
    }
    default:
      served_.workers.run([self = shared_from_this(), id, bytes, request = std::move(request)] {
        const auto result = self->blocking(request);
        self->answer(id, result ? *result : Answer{.error = result.error()}, bytes);
      });
      return true;
  }
}

// ---- rights

Status Session::check_key(std::string_view key) const {
  if (key.starts_with(served_.options.prefix)) return {};
  return fail(Code::no_permission,
              "'{}' is not served: only names that start with '{}' are; start `stoker serve` with "
              "another --prefix",
              key, served_.options.prefix);
}

Status Session::check_rights(const Request& request) const {
  const Kind kind = request.kind;
  const bool changes = changes_the_store(kind) || kind == Kind::begin;
  if (changes && read_only_)
    return fail(Code::read_only, "{}",
                served_.options.read_only
                    ? "the store is served read-only; start `stoker serve` without --read-only"
                    : "the store was opened read-only; open it for writing");
  if (served_.options.prefix.empty()) return {};
  if (kind == Kind::snapshot || kind == Kind::drop || kind == Kind::name)
    return fail(Code::no_permission,
                "a snapshot is of the whole store, but only names that start with '{}' are served; "
                "start `stoker serve` without --prefix",
                served_.options.prefix);
  const bool of_a_key = kind == Kind::stat || kind == Kind::resize || kind == Kind::write ||
                        kind == Kind::remove || kind == Kind::expect || kind == Kind::require ||
                        kind == Kind::copy || kind == Kind::forget;
  if (of_a_key) STOKER_TRY(check_key(request.key));
  if (kind == Kind::copy) STOKER_TRY(check_key(request.text));
  for (const std::string& key : request.keys) STOKER_TRY(check_key(key));
  return {};
}

Session::TransactionPtr Session::transaction(uint64_t id) {
  MutexLock lock(mutex_);
  const auto at = transactions_.find(id);
  return at == transactions_.end() ? nullptr : at->second.transaction;
}

Session::TransactionPtr Session::open_transaction(uint64_t id) {
  MutexLock lock(mutex_);
  const auto at = transactions_.find(id);
  return at == transactions_.end() || at->second.committed ? nullptr : at->second.transaction;
}

// As long as it lives the transaction is not committed. Null: it cannot be changed any more.
class Session::Use {
 public:
  Use(Session& session, uint64_t id) : session_(session), id_(id) {
    MutexLock lock(session_.mutex_);
    const auto at = session_.transactions_.find(id_);
    if (at == session_.transactions_.end() || at->second.committed) return;
    ++at->second.calls;
    transaction_ = at->second.transaction;
  }
  ~Use() {
    if (!transaction_) return;
    MutexLock lock(session_.mutex_);
    if (const auto at = session_.transactions_.find(id_); at != session_.transactions_.end())
      --at->second.calls;
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  explicit operator bool() const { return transaction_ != nullptr; }
  Transaction* operator->() const { return transaction_.get(); }

 private:
  Session& session_;
  const uint64_t id_;
  TransactionPtr transaction_;  // its last holder ends it, without the mutex
};

bool Session::in_memory(uint64_t place, uint64_t bytes) const {
  return place <= memory_bytes_ && bytes <= memory_bytes_ - place;
}

// ---- what may wait for the store

// All of it, as of one version.
Result<Session::Listing> Session::whole_list(const Request& request) {
  const std::string& prefix = served_.options.prefix;
  const std::string& narrower = request.key.starts_with(prefix) ? request.key : prefix;
  const bool versions = request.text.empty() && served_.store.features().versions;
  Listing all{.prefix = request.key, .snapshot = request.text, .behind = request.tag};
  for (int attempt = 0;; ++attempt) {
    const Version before = versions ? served_.store.info().committed : 0;
    served_.lists.add(1);
    STOKER_ASSIGN(all.objects, served_.store.list(narrower, request.text));
    if (versions && served_.store.info().committed != before && attempt < kListsMax) continue;
    if (versions) all.version = std::to_string(before);
    break;
  }
  const auto first = std::ranges::upper_bound(all.objects, request.tag, {}, &ObjectInfo::key);
  if (!request.tag.empty()) all.next = static_cast<size_t>(first - all.objects.begin());
  return all;
}

// One page: what is behind the key that `tag` names.
Result<Answer> Session::list(const Request& request) {
  const std::string& prefix = served_.options.prefix;
  if (!request.key.starts_with(prefix) && !prefix.starts_with(request.key)) return Answer{};
  std::optional<Listing> all = rest_of_list(request);
  if (!all) {
    STOKER_ASSIGN(all, whole_list(request));
  }
  Answer page{.tag = all->version};
  for (uint64_t bytes = 0; all->next < all->objects.size(); ++all->next) {
    ObjectInfo& object = all->objects[all->next];
    bytes += kObjectBytes + object.key.size() + object.tag.size();
    if (!page.objects.empty() && bytes > served_.options.list_bytes) break;
    page.objects.push_back(std::move(object));
  }
  if (all->next == all->objects.size()) return page;
  page.number = 1;
  all->behind = page.objects.back().key;
  keep_list(std::move(*all));
  return page;
}

// What a page before left of it.
std::optional<Session::Listing> Session::rest_of_list(const Request& request) {
  MutexLock lock(mutex_);
  const auto at = std::ranges::find_if(listings_, [&](const Listing& each) {
    return each.behind == request.tag && each.prefix == request.key &&
           each.snapshot == request.text;
  });
  if (request.tag.empty() || at == listings_.end()) return {};
  std::optional<Listing> rest = std::move(*at);
  listings_.erase(at);
  return rest;
}

// Where the budget has no room for it, it is listed anew for the next page.
void Session::keep_list(Listing rest) {
  if (rest.memory.bytes() == 0) {
    uint64_t left = 0;
    for (size_t at = rest.next; at < rest.objects.size(); ++at)
      left += sizeof(ObjectInfo) + rest.objects[at].key.size() + rest.objects[at].tag.size();
    auto memory = served_.budget.take(left, "the rest of a list");
    if (!memory) return;
    rest.memory = std::move(*memory);
  }
  MutexLock lock(mutex_);
  if (ended_) return;
  listings_.push_back(std::move(rest));
  if (listings_.size() > kListingsMax) listings_.pop_front();
}

Result<Answer> Session::begin() {
  STOKER_ASSIGN(auto begun, served_.store.begin());
  served_.transactions_begun.add(1);
  const auto end = [&served = served_](Transaction* each) {
    delete each;
    served.transactions_ended.add(1);
  };
  TransactionPtr shared(begun.release(), end);
  MutexLock lock(mutex_);
  if (ended_) return fail(Code::cancelled, "the client is gone");
  if (transactions_.size() >= kTransactionsMax)
    return fail(Code::busy, "{} transactions of this client are open: commit or drop some",
                kTransactionsMax);
  transactions_.emplace(next_transaction_, Open{.transaction = std::move(shared)});
  return Answer{.number = next_transaction_++};
}

Result<Answer> Session::blocking(const Request& request) {
  Store& store = served_.store;
  switch (request.kind) {
    case Kind::stat: {
      STOKER_ASSIGN(ObjectInfo object, store.stat(request.key, request.text));
      Answer answer;
      answer.objects.push_back(std::move(object));
      return answer;
    }
    case Kind::list:
      return list(request);
    case Kind::begin:
      return begin();
    case Kind::copy:
      return numbered(store.copy(request.key, request.text));
    case Kind::remove_many:
      return plain(store.remove(request.keys));
    case Kind::info: {
      StoreInfo info = store.info();
      if (read_only_ && info.read_only.empty()) info.read_only = "it is served to be read only";
      return Answer{.blob = encode(info)};
    }
    case Kind::forget: {
      // The store first: a block that is filled before it forgot holds what it forgot.
      const Status forgot = store.forget(request.key, request.offset, request.bytes);
      const auto object = store.stat(request.key);
      const uint64_t block = served_.blocks->block_bytes();
      if (object && request.offset < object->bytes && request.bytes != 0) {
        const uint64_t end =
            request.offset + std::min(request.bytes, object->bytes - request.offset);
        for (uint64_t index = request.offset / block; index * block < end; ++index)
          served_.blocks->forget(block_name(request.key, object->tag, index));
      }
      return plain(forgot);
    }
    case Kind::follow:
      return follow(request);
    default:
      break;
  }
  const Use staged(*this, request.transaction);
  if (!staged) return fail(Code::invalid_argument, "this transaction has ended: begin another");
  switch (request.kind) {
    case Kind::resize:
      if (request.number > UINT32_MAX)
        return fail(Code::invalid_argument, "a chunk has at most 8 MiB, not {} bytes",
                    request.number);
      return plain(
          staged->resize(request.key, request.bytes, static_cast<uint32_t>(request.number)));
    case Kind::remove:
      return plain(staged->remove(request.key));
    case Kind::require:
      return plain(staged->require(request.key, request.text));
    case Kind::name:
      return plain(staged->name(request.key));
    case Kind::expect:
      if (request.number >= kClasses.size())
        return fail(
            Code::invalid_argument,
            "the client names the unknown class {} of objects; use one version of Stoker on "
            "both sides",
            request.number);
      return plain(staged->expect(request.key, static_cast<Class>(request.number)));
    default:
      return fail(Code::invalid_argument,
                  "the client makes a request of the unknown kind {}; use one version of Stoker on "
                  "both sides",
                  static_cast<unsigned>(request.kind));
  }
}

// The plan's name is of all clients together, as it is inside the process that has the store. It
// ends with the connection that named it last.
Result<Answer> Session::follow(const Request& request) {
  STOKER_ASSIGN(const Plan plan, decode_plan(request));
  MutexLock lock(served_.plans_mutex);
  {
    MutexLock own(mutex_);
    if (ended_) return fail(Code::cancelled, "the client is gone");
  }
  const auto mine = [this](const auto& each) { return each.second == this; };
  const auto at = served_.plans.find(plan.name);
  const bool more = at == served_.plans.end() || at->second != this;
  if (more && static_cast<size_t>(std::ranges::count_if(served_.plans, mine)) >= kPlansMax)
    return fail(
        Code::busy,
        "this client has {} plans already, the most; end one before '{}' (follow() with its name "
        "and no ranges)",
        kPlansMax, plan.name);
  STOKER_TRY(served_.store.follow(plan));
  served_.plans.erase(plan.name);
  if (!plan.runs.empty()) served_.plans.emplace(plan.name, this);
  return Answer{};
}

void Session::end_plans() {
  MutexLock lock(served_.plans_mutex);
  for (auto at = served_.plans.begin(); at != served_.plans.end();) {
    if (at->second != this) {
      ++at;
      continue;
    }
    (void)served_.store.follow({.name = at->first});
    at = served_.plans.erase(at);
  }
}

// ---- transactions

void Session::write(uint64_t id, const Request& request) {
  const TransactionPtr staged = open_transaction(request.transaction);
  if (!staged)
    return answer(id, fail(Code::invalid_argument, "this transaction has ended: begin another"),
                  request.bytes);
  struct Held {
    Grant grant;
    AlignedBytes memory;
  };
  auto grant = served_.budget.take(request.bytes, "a write of a client");
  if (!grant) return answer(id, grant.error(), request.bytes);
  const auto held = std::make_shared<Held>(Held{std::move(*grant), AlignedBytes(request.bytes)});
  const Slice from = held->memory.slice().sub(0, request.bytes);
  if (const Status copied = read_memory(memory_.get(), request.place, from.span()); !copied)
    return answer(id, copied.error(), request.bytes);
  staged->write(request.key, request.offset, from, priority_of(request))
      .on_done([self = shared_from_this(), id, held](const Status& status) {
        const uint64_t bytes = held->grant.bytes();
        self->answer(id, status ? Answer() : Answer{.error = status.error()}, bytes);
      });
}

void Session::commit(uint64_t id, const Request& request) {
  TransactionPtr staged;
  {
    MutexLock lock(mutex_);
    const auto at = transactions_.find(request.transaction);
    if (at != transactions_.end() && at->second.calls == 0 && !at->second.committed) {
      at->second.committed = true;
      staged = at->second.transaction;
    }
  }
  if (!staged)
    return answer(id,
                  fail(Code::invalid_argument,
                       "this transaction has ended, or another call is changing it; wait for that "
                       "call, or begin another transaction"),
                  0);
  const Future<Version> done =
      staged->commit(request.number == 1 ? Durability::durable : Durability::deferred);
  done.on_done([self = shared_from_this(), id,
                staged = std::move(staged)](const Result<Version>& version) {
    self->answer(id, version ? Answer{.number = *version} : Answer{.error = version.error()}, 0);
    // Not here: it may be the last to hold it, and the store is still at work with it.
    self->served_.workers.run([self, staged] {});
  });
}

// ---- reads

void Session::read(const std::shared_ptr<Reading>& reading) {
  const size_t pieces = reading->request.pieces.size();
  reading->left = pieces;
  reading->spans.resize(pieces);
  uint64_t place = reading->request.place;
  for (const Range& piece : reading->request.pieces) {
    reading->places.push_back(place);
    place += piece.bytes;
  }
  if (reading->request.transaction != 0) return read_staged(reading);
  if (read_resident(*reading)) return answer(reading->id, reading->answer(), reading->bytes);
  for (size_t i = 0; i < pieces; ++i) {
    served_.workers.run([self = shared_from_this(), reading, i] {
      const Status status = self->read_piece(*reading, i);
      if (!reading->done(i, status)) return;
      if (reading->error) (void)self->unpin(reading->kept());  // the client hears of none of them
      self->answer(reading->id, reading->answer(), reading->bytes);
    });
  }
}

void Session::read_staged(const std::shared_ptr<Reading>& reading) {
  const TransactionPtr staged = transaction(reading->request.transaction);
  if (!staged)
    return answer(reading->id,
                  fail(Code::invalid_argument, "this transaction has ended: begin another"),
                  reading->bytes);
  const auto memory = std::make_shared<AlignedBytes>(reading->bytes);
  uint64_t at = 0;
  for (size_t i = 0; i < reading->request.pieces.size(); ++i) {
    const Range& piece = reading->request.pieces[i];
    const Slice into = memory->slice().sub(at, piece.bytes);
    at += piece.bytes;
    staged->read(reading->key(i), piece.offset, into, reading->options())
        .on_done([self = shared_from_this(), reading, memory, into, i](const Status& read) {
          Status status = read;
          if (status) status = write_memory(self->memory_.get(), reading->places[i], into.span());
          reading->spans[i] = {{kNoSlot, reading->places[i], static_cast<uint32_t>(into.size)}};
          if (reading->done(i, status))
            self->answer(reading->id, reading->answer(), reading->bytes);
        });
  }
}

// All of it at once, if the blocks are there, the client may pin them, and the store knows without
// asking anybody that they are those of the objects. Else nothing has happened: workers read it.
bool Session::read_resident(Reading& reading) {
  Blocks& blocks = *served_.blocks;
  const uint64_t block = blocks.block_bytes();
  const Request& request = reading.request;
  if (blocks.slots() == 0 || !request.text.empty()) return false;
  std::vector<std::string> names;
  std::vector<std::vector<Span>> spans(request.pieces.size());  // by piece; still without slots
  std::string tag;
  for (size_t i = 0; i < request.pieces.size(); ++i) {
    const Range& piece = request.pieces[i];
    const auto object = served_.store.stat_at_once(reading.key(i));
    if (!object || piece.bytes == 0 || piece.offset > object->bytes ||
        piece.bytes > object->bytes - piece.offset ||
        (!request.tag.empty() && object->tag != request.tag))
      return false;
    tag = object->tag;
    for (uint64_t done = 0; done < piece.bytes;) {
      const uint64_t offset = piece.offset + done;
      const uint64_t bytes = std::min(block - offset % block, piece.bytes - done);
      names.push_back(block_name(reading.key(i), tag, offset / block));
      spans[i].push_back({kNoSlot, offset % block, static_cast<uint32_t>(bytes)});
      done += bytes;
    }
  }
  const std::vector<uint32_t> slots = blocks.find_full(names);
  if (slots.empty()) return false;
  if (!keep_all(slots)) {
    for (const uint32_t slot : slots) blocks.unpin(slot);
    return false;
  }
  auto slot = slots.begin();
  for (auto& each : spans)
    for (Span& span : each) {
      span.slot = *slot++;
      span.offset += blocks.offset(span.slot);
    }
  reading.spans = std::move(spans);
  if (request.pieces.size() == 1) reading.tag = std::move(tag);
  return true;
}

Status Session::read_piece(Reading& reading, size_t index) {
  const Range& piece = reading.request.pieces[index];
  const std::string& tag = reading.request.tag;
  for (int attempt = 0; attempt < 4 && served_.blocks->slots() != 0 && piece.bytes != 0;
       ++attempt) {
    STOKER_ASSIGN(const ObjectInfo object,
                  served_.store.stat(reading.key(index), reading.request.text));
    if (!tag.empty() && object.tag != tag) break;
    if (piece.offset > object.bytes || piece.bytes > object.bytes - piece.offset) break;
    STOKER_ASSIGN(const Outcome outcome, read_blocks(reading, index, object));
    if (outcome == Outcome::done) return {};
    if (outcome == Outcome::direct) break;
  }
  return read_direct(reading, index);
}

Result<Session::Outcome> Session::read_blocks(Reading& reading, size_t index,
                                              const ObjectInfo& object) {
  struct Part {
    Blocks::Place place;
    uint64_t at = 0;     // in the block
    uint64_t bytes = 0;  // wanted
    Future<void> fill = {};
  };
  Blocks& blocks = *served_.blocks;
  const uint64_t block = blocks.block_bytes();
  const Range& piece = reading.request.pieces[index];
  const std::string& key = reading.key(index);
  std::vector<Part> parts;
  bool all_found = true;
  for (uint64_t done = 0; done < piece.bytes && all_found;) {
    const uint64_t offset = piece.offset + done;
    const uint64_t number = offset / block;
    const uint64_t whole = std::min(block, object.bytes - number * block);
    Part part;
    part.at = offset % block;
    part.bytes = std::min(whole - part.at, piece.bytes - done);
    part.place = blocks.find(block_name(key, object.tag, number), 2 * part.bytes >= whole);
    all_found = part.place.found != Blocks::Found::none;
    if (part.place.found == Blocks::Found::empty)
      part.fill = served_.store.read(
          key, number * block, blocks.memory(part.place.slot).sub(0, whole), reading.options());
    done += part.bytes;
    if (all_found) parts.push_back(std::move(part));
  }
  // What this read began to fill it fills, whatever becomes of the rest: others may wait for it.
  bool read_all = true;
  bool same = true;
  bool began = false;
  for (const Part& part : parts) {
    if (!part.fill.valid()) continue;
    began = true;
    read_all &= part.fill.wait().has_value();
  }
  if (began) {
    const auto now = served_.store.stat(key, reading.request.text);
    same = now && now->tag == object.tag;
  }
  bool whole = all_found && read_all && same;
  for (const Part& part : parts)
    if (part.fill.valid()) blocks.filled(part.place.slot, same && part.fill.wait().has_value());
  for (const Part& part : parts)
    if (part.place.found == Blocks::Found::filling) whole &= blocks.wait(part.place.slot);
  Status copied;
  uint64_t place = reading.places[index];
  std::vector<Span> spans;
  for (const Part& part : parts) {
    const uint32_t slot = part.place.slot;
    const auto bytes = static_cast<uint32_t>(part.bytes);
    if (whole && keep(slot)) {
      spans.push_back({slot, blocks.offset(slot) + part.at, bytes});
    } else {
      if (whole && copied)
        copied =
            write_memory(memory_.get(), place, blocks.memory(slot).sub(part.at, part.bytes).span());
      spans.push_back({kNoSlot, place, bytes});
      blocks.unpin(slot);
    }
    place += bytes;
  }
  if (!whole) return all_found && read_all ? Outcome::again : Outcome::direct;
  if (!copied) {
    std::vector<uint32_t> kept;
    for (const Span& span : spans)
      if (span.slot != kNoSlot) kept.push_back(span.slot);
    (void)unpin(kept);
    return copied.error();
  }
  reading.spans[index] = std::move(spans);
  if (reading.request.pieces.size() == 1) reading.tag = object.tag;
  return Outcome::done;
}

Status Session::read_direct(Reading& reading, size_t index) {
  const Range& piece = reading.request.pieces[index];
  const std::string& key = reading.key(index);
  const std::string& wanted = reading.request.tag;
  const bool tells = reading.request.pieces.size() == 1;
  std::string tag;
  if (tells) {
    STOKER_ASSIGN(const ObjectInfo before, served_.store.stat(key, reading.request.text));
    tag = before.tag;
  }
  STOKER_ASSIGN(const Grant grant, served_.budget.take(piece.bytes, "a read of a client"));
  const AlignedBytes memory(piece.bytes);
  const Slice into = memory.slice().sub(0, piece.bytes);
  STOKER_TRY(served_.store.read(key, piece.offset, into, reading.options()).wait());
  if (tells) {
    const auto after = served_.store.stat(key, reading.request.text);
    if (!after || after->tag != tag) tag.clear();
    if (!wanted.empty() && tag != wanted)
      return fail(Code::conflict, "'{}' was changed while it was read; read it again", key);
    reading.tag = tag;
  }
  STOKER_TRY(write_memory(memory_.get(), reading.places[index], into.span()));
  reading.spans[index] = {{kNoSlot, reading.places[index], static_cast<uint32_t>(piece.bytes)}};
  return {};
}

size_t Session::pins_most() const {
  const Blocks& blocks = *served_.blocks;
  return std::min<uint64_t>(served_.options.pinned_bytes / blocks.block_bytes(),
                            std::max<size_t>(1, blocks.slots() / 4));
}

bool Session::keep(uint32_t slot) {
  MutexLock lock(mutex_);
  if (ended_ || pin_count_ >= pins_most()) return false;
  ++pins_[slot];
  ++pin_count_;
  return true;
}

bool Session::keep_all(const std::vector<uint32_t>& slots) {
  const size_t most = pins_most();
  MutexLock lock(mutex_);
  if (ended_ || pin_count_ > most || slots.size() > most - pin_count_) return false;
  for (const uint32_t slot : slots) ++pins_[slot];
  pin_count_ += slots.size();
  return true;
}

bool Session::unpin(const std::vector<uint32_t>& slots) {
  for (const uint32_t slot : slots) {
    {
      MutexLock lock(mutex_);
      const auto at = pins_.find(slot);
      if (at == pins_.end()) return ended_;
      if (--at->second == 0) pins_.erase(at);
      --pin_count_;
    }
    served_.blocks->unpin(slot);
  }
  return true;
}

}  // namespace stoker::remote
