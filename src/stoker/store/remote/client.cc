#include "stoker/store/remote/client.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "stoker/base/fork.h"
#include "stoker/store/read_many.h"
#include "stoker/store/remote/link.h"

namespace stoker {
namespace remote {
namespace {

constexpr int kAttempts = 100;  // to read a large object of one content

using LinkPtr = std::shared_ptr<Link>;

// Copies what the spans hold, in order.
Status copy_spans(const Link& link, const Answer& answer, const std::byte* memory, size_t room,
                  std::span<const Slice> into) {
  const uint64_t place = link.place_of(memory);
  size_t at = 0;    // of the spans
  size_t used = 0;  // of this span
  for (const Slice& each : into) {
    for (size_t done = 0; done < each.size;) {
      if (at == answer.spans.size())
        return fail(Code::corruption,
                    "`stoker serve` answered with fewer bytes than it said; restart `stoker "
                    "serve`, with the same version of Stoker as here");
      const Span& span = answer.spans[at];
      if (used == span.bytes) {
        ++at;
        used = 0;
        continue;
      }
      const std::byte* from = nullptr;
      if (link.lent(span)) {
        from = link.blocks() + span.offset;
      } else if (span.slot == kNoSlot && span.offset >= place && span.offset - place <= room &&
                 span.bytes <= room - (span.offset - place)) {
        from = memory + (span.offset - place);
      } else {
        return fail(Code::corruption,
                    "`stoker serve` named memory outside what it shares; restart `stoker serve`, "
                    "with the same version of Stoker as here");
      }
      const size_t now = std::min<size_t>(span.bytes - used, each.size - done);
      std::memcpy(each.data + done, from + used, now);
      used += now;
      done += now;
    }
  }
  return {};
}

uint64_t number_of(Priority priority) { return static_cast<uint64_t>(priority); }

// Asks for an answer and waits for it.
Result<Answer> ask(const LinkPtr& link, Request request) {
  auto promise = std::make_shared<Promise<Answer>>();
  const Future<Answer> future = promise->future();
  {
    const WillReceive scope;
    link->ask({.request = std::move(request),
               .after = [promise](const Result<Answer>& answer, const std::byte*) {
                 promise->complete(answer);
               }});
  }
  link->receive_until([&] { return future.ready(); }, Answers::Time::max());
  return future.wait();
}

Status ask_plainly(const LinkPtr& link, Request request) {
  const auto answer = ask(link, std::move(request));
  if (!answer) return answer.error();
  return {};
}

Future<Version> version_of(const LinkPtr& link, Request request) {
  auto promise = std::make_shared<Promise<Version>>();
  Future<Version> future = promise->future();
  link->ask({.request = std::move(request),
             .after = [promise](const Result<Answer>& answer, const std::byte*) {
               promise->complete(answer ? Result<Version>(answer->number)
                                        : Result<Version>(answer.error()));
             }});
  return future;
}

// One request of kReadMax bytes at most. `done` gets the tag, and the piece that failed first.
void read_once(const LinkPtr& link, Request request, std::vector<Slice> into,
               std::function<void(const Result<Answer>&)> done) {
  size_t bytes = 0;
  for (const Slice& each : into) bytes += each.size;
  request.kind = Kind::read;
  link->ask({.request = std::move(request),
             .memory = bytes,
             .after = [link, bytes, into = std::move(into), done = std::move(done)](
                          const Result<Answer>& answer, const std::byte* memory) {
               if (!answer) return done(answer);
               const Status copied = copy_spans(*link, *answer, memory, bytes, into);
               link->unpin(answer->spans);
               if (copied)
                 done(answer);
               else
                 done(copied.error());
             }});
}

// A read of more than one request: all of it is of one tag, or it begins anew.
class LargeRead : public std::enable_shared_from_this<LargeRead> {
 public:
  LargeRead(LinkPtr link, Request request, uint64_t offset, Slice into)
      : link_(std::move(link)), request_(std::move(request)), offset_(offset), into_(into) {}
  Future<void> future() const { return promise_.future(); }

  void begin() {
    one(0, {}, [self = shared_from_this()](const Result<Answer>& answer) {
      if (!answer) return self->promise_.complete(answer.error());
      if (self->request_.transaction == 0 && answer->tag.empty()) return self->again();
      self->rest(answer->tag);
    });
  }

 private:
  void one(uint64_t at, const std::string& tag, std::function<void(const Result<Answer>&)> done) {
    Request request = request_;
    const uint64_t bytes = std::min<uint64_t>(kReadMax, into_.size - at);
    request.tag = tag;
    request.pieces = {{0, offset_ + at, bytes}};
    read_once(link_, std::move(request), {into_.sub(at, bytes)}, std::move(done));
  }
  void rest(const std::string& tag) {
    const size_t count = (into_.size - 1) / kReadMax;
    const auto down = std::make_shared<Countdown>(count);
    const Future<void> all = down->future();
    for (size_t i = 0; i < count; ++i) {
      one((i + 1) * kReadMax, tag, [down, i](const Result<Answer>& answer) {
        down->done(i, answer ? Status() : Status(answer.error()));
      });
    }
    all.on_done([self = shared_from_this()](const Status& status) {
      if (!status && status.error().code == Code::conflict) return self->again();
      self->promise_.complete(status);
    });
  }
  void again() {
    if (++attempts_ < kAttempts) return begin();
    promise_.complete(
        fail(Code::busy,
             "'{}' was changed during each of {} reads: read less at once, or stop its writers",
             request_.keys[0], kAttempts));
  }

  const LinkPtr link_;
  const Request request_;
  const uint64_t offset_;
  const Slice into_;
  int attempts_ = 0;
  Promise<void> promise_;
};

Future<void> read_range(const LinkPtr& link, std::string_view key, uint64_t offset, Slice into,
                        const ReadOptions& options, uint64_t transaction) {
  Request request;
  request.transaction = transaction;
  request.number = number_of(options.priority);
  request.text = options.snapshot;
  request.keys.emplace_back(key);
  if (into.size <= kReadMax || offset > UINT64_MAX - into.size) {
    // A range that cannot be is refused by its first part.
    const Slice part = into.sub(0, std::min<size_t>(into.size, kReadMax));
    request.pieces = {{0, offset, part.size}};
    auto promise = std::make_shared<Promise<void>>();
    Future<void> future = promise->future();
    read_once(link, std::move(request), {part}, [promise](const Result<Answer>& answer) {
      promise->complete(answer ? Status() : Status(answer.error()));
    });
    return future;
  }
  const auto large = std::make_shared<LargeRead>(link, std::move(request), offset, into);
  Future<void> future = large->future();
  large->begin();
  return future;
}

class RemoteTransaction final : public Transaction {
 public:
  RemoteTransaction(LinkPtr link, uint64_t id) : link_(std::move(link)), id_(id) {}
  ~RemoteTransaction() override {
    // Behind what is still to be sent of it, and never waits.
    link_->ask({.request = {.kind = Kind::abandon, .transaction = id_},
                .after = [](const Result<Answer>&, const std::byte*) {}});
  }
  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override {
    Request request = of(Kind::resize, key);
    request.bytes = bytes;
    request.number = chunk_bytes;
    return ask_plainly(link_, std::move(request));
  }
  Status remove(std::string_view key) override { return ask_plainly(link_, of(Kind::remove, key)); }
  Status expect(std::string_view key, Class expected) override {
    Request request = of(Kind::expect, key);
    request.number = static_cast<uint64_t>(expected);
    return ask_plainly(link_, std::move(request));
  }
  Status require(std::string_view key, std::string_view tag) override {
    Request request = of(Kind::require, key);
    request.text = tag;
    return ask_plainly(link_, std::move(request));
  }
  Status name(std::string_view snapshot) override {
    return ask_plainly(link_, of(Kind::name, snapshot));
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    return read_range(link_, key, offset, into, options, id_);
  }
  Future<void> write(std::string_view key, uint64_t offset, Slice from,
                     Priority priority) override {
    // A range that cannot be is refused by its first part.
    const bool wraps = offset > UINT64_MAX - from.size;
    const size_t parts = wraps || from.size == 0 ? 1 : (from.size + kReadMax - 1) / kReadMax;
    const auto down = std::make_shared<Countdown>(parts);
    Future<void> all = down->future();
    {
      MutexLock lock(mutex_);
      std::erase_if(writes_, [](const Future<void>& each) { return each.ready(); });
      writes_.push_back(all);
    }
    for (size_t i = 0; i < parts; ++i) {
      const size_t at = i * kReadMax;
      const Slice part = from.sub(at, std::min<size_t>(kReadMax, from.size - at));
      Request request = of(Kind::write, key);
      request.offset = offset + at;
      request.bytes = part.size;
      request.number = number_of(priority);
      link_->ask({.request = std::move(request),
                  .memory = part.size,
                  .before =
                      [part](std::byte* memory) {
                        if (part.size != 0) std::memcpy(memory, part.data, part.size);
                      },
                  .after =
                      [down, i](const Result<Answer>& answer, const std::byte*) {
                        down->done(i, answer ? Status() : Status(answer.error()));
                      }});
    }
    return all;
  }
  Future<Version> commit(Durability durability) override {
    Request request = of(Kind::commit, {});
    request.number = durability == Durability::durable ? 1 : 0;
    const Future<Version> committed = version_of(link_, std::move(request));
    // Done after its writes, whose answers may come later than its own.
    std::vector<Future<void>> writes;
    {
      MutexLock lock(mutex_);
      writes = writes_;
    }
    auto promise = std::make_shared<Promise<Version>>();
    Future<Version> future = promise->future();
    all(writes).on_done([committed, promise](const Status&) {
      committed.on_done([promise](const Result<Version>& version) { promise->complete(version); });
    });
    return future;
  }

 private:
  Request of(Kind kind, std::string_view key) const {
    Request request{.kind = kind};
    request.transaction = id_;
    request.key = key;
    return request;
  }
  const LinkPtr link_;
  const uint64_t id_;
  Mutex mutex_;
  std::vector<Future<void>> writes_ GUARDED_BY(mutex_);  // those not done
};

// What one process has of a store. A forked one makes its own, and touches that of its parent
// never again: its locks are as they happened to be.
struct Process {
  const uint64_t made = forks();
  std::atomic<int> socket{-1};
  Mutex mutex;  // guards what follows
  LinkPtr link;
  std::thread thread;  // runs the link
};

class RemoteStore final : public Store, public HasAnswers {
 public:
  RemoteStore(std::string path, bool read_only) : path_(std::move(path)), read_only_(read_only) {}
  ~RemoteStore() override {
    Process* process = process_.load();
    if (process->made != forks()) return;  // nothing of it is this process's
    if (process->link) process->link->lose();
    if (process->thread.joinable()) process->thread.join();
    delete process;
  }

  Status start() {
    STOKER_ASSIGN(const LinkPtr link, connected());
    features_ = link->welcome().features;
    return {};
  }

  Features features() const override { return *features_; }
  bool wants_aligned() const override { return false; }
  bool works_after_fork() const override { return true; }

  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override {
    STOKER_ASSIGN(Answer answer, asked(Kind::stat, key, snapshot));
    if (answer.objects.size() != 1)
      return fail(Code::corruption,
                  "`stoker serve` named no object; restart `stoker serve`, with the same version "
                  "of Stoker as here");
    return std::move(answer.objects[0]);
  }
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot) override {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      STOKER_ASSIGN(auto all, list_once(prefix, snapshot));
      if (all) return std::move(*all);
    }
    return fail(
        Code::busy,
        "objects were changed each time they were listed; list a longer prefix, or a snapshot");
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    STOKER_ASSIGN(const LinkPtr link, connected());
    return read_range(link, key, offset, into, options, 0);
  }
  Future<void> read_many(std::span<const std::string> keys, std::span<const Piece> pieces,
                         Slice into, ReadOptions options) override;
  Future<View> view(std::string_view key, uint64_t offset, size_t bytes,
                    ReadOptions options) override;
  Result<std::unique_ptr<Transaction>> begin() override {
    STOKER_ASSIGN(const LinkPtr link, connected());
    STOKER_ASSIGN(const Answer answer, ask(link, {.kind = Kind::begin}));
    return std::unique_ptr<Transaction>(new RemoteTransaction(link, answer.number));
  }
  Result<Version> copy(std::string_view from, std::string_view to) override {
    STOKER_ASSIGN(const Answer answer, asked(Kind::copy, from, to));
    return answer.number;
  }
  Status forget(std::string_view key, uint64_t offset, uint64_t bytes) override {
    STOKER_ASSIGN(const LinkPtr link, connected());
    Request request{.kind = Kind::forget, .offset = offset, .bytes = bytes};
    request.key = key;
    return ask_plainly(link, std::move(request));
  }
  Status follow(const Plan& plan) override {
    STOKER_ASSIGN(const LinkPtr link, connected());
    return ask_plainly(link, encode(plan));
  }
  Status remove(const std::vector<std::string>& keys) override {
    STOKER_ASSIGN(const LinkPtr link, connected());
    return ask_plainly(link, {.kind = Kind::remove_many, .keys = keys});
  }
  std::weak_ptr<Answers> answers() const override {
    Process* const mine = process();
    MutexLock lock(mine->mutex);
    return mine->link;
  }
  Future<void> snapshot(std::string_view name) override { return named(Kind::snapshot, name); }
  Future<void> drop(std::string_view name, Durability durability) override {
    return named(Kind::drop, name, durability);
  }
  StoreInfo info() const override {
    StoreInfo info;
    const auto answer = asked(Kind::info, {}, {});
    auto told = answer ? decode_info(answer->blob) : Result<StoreInfo>(answer.error());
    if (told)
      info = std::move(*told);
    else
      info.read_only = told.error().message();
    info.composition = "unix:" + path_;
    return info;
  }

 private:
  Result<LinkPtr> connected() const;
  Process* process() const;
  // Page by page. None: the store changed between two of them.
  Result<std::optional<std::vector<ObjectInfo>>> list_once(std::string_view prefix,
                                                           std::string_view snapshot) const {
    STOKER_ASSIGN(const LinkPtr link, connected());
    std::vector<ObjectInfo> all;
    std::string version;
    for (bool more = true; more;) {
      Request request{.kind = Kind::list};
      request.key = prefix;
      request.text = snapshot;
      if (!all.empty()) request.tag = all.back().key;
      STOKER_ASSIGN(Answer page, ask(link, std::move(request)));
      if (!all.empty() && page.tag != version) return std::optional<std::vector<ObjectInfo>>();
      version = page.tag;
      more = page.number != 0;
      if (more &&
          (page.objects.empty() || (!all.empty() && page.objects.back().key <= all.back().key)))
        return fail(Code::corruption,
                    "the list that `stoker serve` sends does not end; restart `stoker serve`, with "
                    "the same version of Stoker as here");
      all.insert(all.end(), std::make_move_iterator(page.objects.begin()),
                 std::make_move_iterator(page.objects.end()));
    }
    return std::optional(std::move(all));
  }
  Result<Answer> asked(Kind kind, std::string_view key, std::string_view text) const {
    STOKER_ASSIGN(const LinkPtr link, connected());
    Request request{.kind = kind};
    request.key = key;
    request.text = text;
    return ask(link, std::move(request));
  }
  Future<void> named(Kind kind, std::string_view name,
                     Durability durability = Durability::durable) const {
    STOKER_ASSIGN(const LinkPtr link, connected());
    Request request{.kind = kind, .number = durability == Durability::deferred ? 1U : 0U};
    request.key = name;
    return version_of(link, std::move(request)).then([](const Result<Version>& done) -> Status {
      if (!done) return done.error();
      return {};
    });
  }

  const std::string path_;
  const bool read_only_;
  std::optional<Features> features_;  // set by start()
  mutable std::atomic<Process*> process_{new Process};
};

Process* RemoteStore::process() const {
  Process* found = process_.load();
  while (found->made != forks()) {
    auto own = std::make_unique<Process>();
    Process* const parents = found;
    if (!process_.compare_exchange_strong(found, own.get())) continue;
    // The parent's end of the connection must end with the parent.
    if (const int socket = parents->socket.load(); socket >= 0) ::close(socket);
    return own.release();
  }
  return found;
}

Result<LinkPtr> RemoteStore::connected() const {
  Process* const mine = process();
  MutexLock lock(mine->mutex);
  if (mine->link && !mine->link->lost()) return mine->link;
  STOKER_ASSIGN(LinkPtr link, Link::make(path_, read_only_));
  const Features now = link->welcome().features;
  if (features_ &&
      (now.atomic != features_->atomic || now.update != features_->update ||
       now.snapshots != features_->snapshots || now.conditional != features_->conditional ||
       now.verified != features_->verified || now.versions != features_->versions))
    return fail(
        Code::mismatch,
        "another kind of store is served at 'unix:{}' than when it was opened: open it again",
        path_);
  if (mine->thread.joinable()) mine->thread.join();
  mine->socket = link->socket();
  mine->link = link;
  mine->thread = std::thread([link] { link->run(); });
  return link;
}

// As many pieces to a request as fit.
Future<void> RemoteStore::read_many(std::span<const std::string> keys,
                                    std::span<const Piece> pieces, Slice into,
                                    ReadOptions options) {
  STOKER_TRY(check_pieces(keys.size(), pieces, into.size));
  if (pieces.empty()) return Status();
  STOKER_ASSIGN(const LinkPtr link, connected());
  const auto down = std::make_shared<Countdown>(pieces.size());
  Future<void> all = down->future();
  for (size_t first = 0; first < pieces.size();) {
    const auto slice = [&](const Piece& piece) { return into.sub(piece.into, piece.bytes); };
    if (pieces[first].bytes > kReadMax) {
      read_range(link, keys[pieces[first].object], pieces[first].offset, slice(pieces[first]),
                 options, 0)
          .on_done([down, first](const Status& status) { down->done(first, status); });
      ++first;
      continue;
    }
    Request request;
    request.number = number_of(options.priority);
    request.text = options.snapshot;
    std::unordered_map<uint64_t, uint64_t> named;  // keys of this request
    std::vector<Slice> places;
    uint64_t bytes = 0;
    size_t names = 0;
    size_t next = first;
    for (; next < pieces.size() && places.size() < kPiecesMax; ++next) {
      const Piece& piece = pieces[next];
      const std::string& key = keys[piece.object];
      if (piece.bytes > kReadMax - bytes || names + key.size() > kMessageMax / 4) break;
      const auto [at, is_new] = named.emplace(piece.object, request.keys.size());
      if (is_new) {
        request.keys.push_back(key);
        names += key.size() + sizeof(uint32_t);
      }
      request.pieces.push_back({at->second, piece.offset, piece.bytes});
      places.push_back(slice(piece));
      bytes += piece.bytes;
    }
    read_once(link, std::move(request), std::move(places),
              [down, first, next](const Result<Answer>& answer) {
                // The error is that of the first piece that failed; the others say nothing.
                for (size_t i = first; i < next; ++i)
                  down->done(i, answer ? Status() : Status(answer.error()));
              });
    first = next;
  }
  return all;
}

Future<View> RemoteStore::view(std::string_view key, uint64_t offset, size_t bytes,
                               ReadOptions options) {
  if (bytes == 0 || bytes > kReadMax) return Store::view(key, offset, bytes, options);
  STOKER_ASSIGN(const LinkPtr link, connected());
  Request request{.kind = Kind::read};
  request.number = number_of(options.priority);
  request.text = options.snapshot;
  request.keys.emplace_back(key);
  request.pieces = {{0, offset, bytes}};
  auto promise = std::make_shared<Promise<View>>();
  Future<View> future = promise->future();
  const auto finish = [link, bytes](const Answer& answer, const std::byte* memory) -> Result<View> {
    if (answer.spans.size() != 1 || !link->lent(answer.spans[0])) {
      // In several blocks, or in none: a copy.
      const std::shared_ptr<std::byte[]> copy(new std::byte[bytes]);
      const Slice into{copy.get(), bytes};
      const Status copied = copy_spans(*link, answer, memory, bytes, std::span(&into, 1));
      link->unpin(answer.spans);
      if (!copied) return copied.error();
      return View{std::shared_ptr<const std::byte>(copy, copy.get()), bytes};
    }
    // A mapping of its own: who writes there by mistake gets a page of his own, which nobody else
    // sees, and which is gone with the view.
    const Span span = answer.spans[0];
    const uint64_t skew = span.offset % kIoAlign;
    auto mapping =
        Mapping::make(link->blocks_fd(), span.offset - skew, bytes + skew, Mapping::How::own);
    if (!mapping) {
      link->unpin(answer.spans);
      return mapping.error();
    }
    struct Lent {
      LinkPtr link;
      Span span;
      Mapping mapping;
      Lent(LinkPtr the_link, const Span& the_span, Mapping the_mapping)
          : link(std::move(the_link)), span(the_span), mapping(std::move(the_mapping)) {
        link->lend();
      }
      Lent(const Lent&) = delete;
      Lent& operator=(const Lent&) = delete;
      ~Lent() { link->give_back(span); }
    };
    (void)madvise(mapping->data(), mapping->size(), MADV_POPULATE_READ);
    const auto lent = std::make_shared<Lent>(link, span, std::move(*mapping));
    return View{std::shared_ptr<const std::byte>(lent, lent->mapping.data() + skew), bytes};
  };
  link->ask({.request = std::move(request),
             .memory = bytes,
             .after = [promise, finish](const Result<Answer>& answer, const std::byte* memory) {
               promise->complete(answer ? finish(*answer, memory) : Result<View>(answer.error()));
             }});
  return future;
}

}  // namespace
}  // namespace remote

Result<std::unique_ptr<Store>> open_remote_store(const std::string& path,
                                                 const StoreOptions& options) {
  auto store = std::make_unique<remote::RemoteStore>(path, options.read_only);
  STOKER_TRY(store->start());
  return std::unique_ptr<Store>(std::move(store));
}

}  // namespace stoker
