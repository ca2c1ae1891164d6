// What is special about a store that another process serves: limits, rights, death of either side.
#include "stoker/store/remote/server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "stoker/store/memory_store.h"
#include "stoker/store/remote/link.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/held_reads.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

using remote::Kind;

class Remote : public ::testing::Test {
 protected:
  Remote() {
    options_.path = testing::TempDir() + "remote_test_" + std::to_string(getpid());
    options_.memory_bytes = 4 * kMiB;
    options_.block_bytes = 64 * kKiB;
    options_.heartbeat_ms = 30'000;
    inner_ = std::move(*MemoryStore::make(runtime_->budget()));
  }
  ~Remote() override {
    client_.reset();
    server_.reset();
    std::filesystem::remove(options_.path + ".lock");
  }
  void start() {
    auto server = serve(*inner_, runtime_->runtime(), options_);
    ASSERT_OK(server);
    server_ = std::move(*server);
    auto client = connect();
    ASSERT_OK(client);
    client_ = std::move(*client);
  }
  // The same over a store whose reads can be held.
  HeldReads* start_held() {
    auto held = std::make_unique<HeldReads>(std::move(inner_));
    HeldReads* const reads = held.get();
    inner_ = std::move(held);
    start();
    return reads;
  }
  Result<std::unique_ptr<Store>> connect(bool read_only = false) {
    StoreOptions options;
    options.read_only = read_only;
    return open_store("unix:" + options_.path, runtime_->runtime(), options);
  }
  static Status put(Store& store, const std::string& key, Bytes bytes) {
    STOKER_ASSIGN(const auto change, store.begin());
    STOKER_TRY(change->resize(key, bytes.size()));
    STOKER_TRY(change->write(key, 0, slice_of(bytes)).wait());
    if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    return {};
  }
  template <typename Condition>
  static bool soon(Condition condition) {
    for (int i = 0; i < 5000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  ServeOptions options_;
  std::unique_ptr<RuntimeOwner> runtime_ =
      std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
  std::unique_ptr<Store> inner_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Store> client_;
};

TEST_F(Remote, BlocksAreFilledOnceAndLentToAll) {
  start();
  const Bytes bytes = pattern(256 * kKiB, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  const auto other = connect();
  ASSERT_OK(other);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(read_all(*client_, "a"), bytes);
    EXPECT_EQ(read_all(**other, "a"), bytes);
  }
  EXPECT_EQ(server_->counts().fills, 4U);
  EXPECT_EQ(server_->counts().hits, 36U);
  ASSERT_OK(put(**other, "a", pattern(256 * kKiB, 2)));
  EXPECT_EQ(read_all(*client_, "a"), pattern(256 * kKiB, 2)) << "never stale";
}

TEST_F(Remote, AViewIsLentAndWhatIsWrittenToItStaysHere) {
  start();
  const Bytes bytes = pattern(100'000, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  const auto view = client_->view("a", 100, 60'000).wait();
  ASSERT_OK(view);
  EXPECT_EQ(std::memcmp(view->data.get(), bytes.data() + 100, 60'000), 0);
  EXPECT_EQ(server_->counts().pins, 1U) << "no copy was made";
  const_cast<std::byte*>(view->data.get())[5] ^= std::byte{0xFF};
  EXPECT_EQ(read_all(*client_, "a"), bytes);
  EXPECT_EQ(read_all(**connect(), "a"), bytes);
  const auto again = client_->view("a", 100, 60'000).wait();
  EXPECT_EQ(std::memcmp(again->data.get(), bytes.data() + 100, 60'000), 0);
  EXPECT_EQ(code_of(client_->view("a", 100'000, 1).wait()), Code::invalid_argument);
}

// All workers wait for the store. A block that is there is lent all the same.
TEST_F(Remote, WhatIsThereWaitsForNoWorker) {
  HeldReads* const reads = start_held();
  const Bytes bytes = pattern(128 * kKiB, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  ASSERT_OK(put(*inner_, "b", pattern(16 * 64 * kKiB, 2)));
  EXPECT_EQ(read_all(*client_, "a"), bytes);
  reads->hold();
  std::vector<Bytes> into(16, Bytes(64 * kKiB));
  std::vector<Future<void>> waiting;
  for (uint64_t i = 0; i < into.size(); ++i)
    waiting.push_back(client_->read("b", i * 64 * kKiB, slice_of(into[i])));
  while (reads->waiting < 16) std::this_thread::yield();
  const uint64_t hits = server_->counts().hits;
  Bytes part(70'000);
  EXPECT_OK(client_->read("a", 1000, slice_of(part)).wait());
  EXPECT_EQ(std::memcmp(part.data(), bytes.data() + 1000, part.size()), 0);
  EXPECT_OK(client_->view("a", 5, 60'000).wait());
  EXPECT_EQ(server_->counts().hits, hits + 3);
  reads->let_go();
  for (const auto& each : waiting) EXPECT_OK(each.wait());
  EXPECT_EQ(std::memcmp(into[3].data(), pattern(16 * 64 * kKiB, 2).data() + 3 * 64 * kKiB,
                        into[3].size()),
            0);
}

std::shared_ptr<remote::Link> link_of(const Store& client) {
  return std::static_pointer_cast<remote::Link>(
      dynamic_cast<const HasAnswers&>(client).answers().lock());
}

// And those of others, while it waits.
TEST_F(Remote, WhoWaitsReceivesItsAnswer) {
  HeldReads* const reads = start_held();
  const Bytes bytes = pattern(128 * kKiB, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  const auto link = link_of(*client_);
  reads->hold();
  Bytes into(64 * kKiB), behind(64 * kKiB);
  const auto first = client_->read("a", 0, slice_of(into));
  std::thread waiter(
      [&] { link->receive_until([&] { return first.ready(); }, Answers::Time::max()); });
  while (!link->waiter_receives()) std::this_thread::yield();
  const auto second = client_->read("a", 64 * kKiB, slice_of(behind));
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int each = 0; each < 20; ++each) EXPECT_OK(client_->stat("a"));
    });
  for (auto& each : callers) each.join();
  EXPECT_TRUE(link->waiter_receives());
  EXPECT_EQ(link->received_by_waiters(), 0U) << "it still waits";
  reads->let_go();
  EXPECT_OK(first.wait());
  EXPECT_OK(second.wait()) << "nobody who waits receives it";
  waiter.join();
  EXPECT_EQ(link->received_by_waiters(), 1U);
  EXPECT_EQ(into, Bytes(bytes.begin(), bytes.begin() + 64 * kKiB));
  EXPECT_EQ(behind, Bytes(bytes.begin() + 64 * kKiB, bytes.end()));
}

TEST_F(Remote, AnAnswerIsReceivedWhenWhoWaitedForItIsGone) {
  HeldReads* const reads = start_held();
  const Bytes bytes = pattern(1000, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  const auto link = link_of(*client_);
  for (int each = 0; each < 20; ++each) {
    reads->hold();
    Bytes into(1000);
    const auto read = client_->read("a", 0, slice_of(into));
    const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(each % 4);
    link->receive_until([&] { return read.ready(); }, soon);
    reads->let_go();
    EXPECT_OK(read.wait());
    EXPECT_EQ(into, bytes);
    ASSERT_OK(client_->forget("a", 0, 1000));  // of the server's blocks
  }
}

// Sixteen at once. A client that is short of them gives them back before it reads.
TEST_F(Remote, PinsOfReadsAreGivenBackTogether) {
  start();
  const Bytes bytes = pattern(64 * kKiB, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  for (uint64_t each = 1; each <= 10; ++each) {
    EXPECT_EQ(read_all(*client_, "a"), bytes);
    EXPECT_EQ(server_->counts().pins, each);
  }
  for (uint64_t each = 0; each < 6; ++each) EXPECT_EQ(read_all(*client_, "a"), bytes);
  EXPECT_TRUE(soon([&] { return server_->counts().pins == 0; }));

  client_.reset();
  server_.reset();
  options_.memory_bytes = 4 * options_.block_bytes;  // one pin a client
  start();
  read_all(*client_, "a");  // and the next is a copy
  for (uint64_t each = 0; each < 4; ++each) {
    EXPECT_EQ(read_all(*client_, "a"), bytes);
    EXPECT_EQ(server_->counts().pins, 1U);
  }
  const auto view = client_->view("a", 0, bytes.size()).wait();
  ASSERT_OK(view);
  EXPECT_TRUE(soon([&] { return server_->counts().pins == 1; }));
}

// Where their size lets them be huge pages.
TEST_F(Remote, BlocksAreMappedAtHugePages) {
  start();
  const auto link = link_of(*client_);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(link->blocks()) % remote::kHugePage, 0U);
  const auto whole =
      remote::Mapping::make(link->blocks_fd(), 0, 4 * kMiB, remote::Mapping::How::read_only);
  ASSERT_OK(whole);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(whole->data()) % remote::kHugePage, 0U);
  EXPECT_EQ(whole->size(), 4 * kMiB);
}

TEST_F(Remote, AnAnswerThatNobodyReceivesComesAllTheSame) {
  start();
  const Bytes bytes = pattern(1000, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  for (int each = 0; each < 20; ++each) {
    EXPECT_OK(client_->stat("a"));  // received by who waits
    const WillReceive scope;
    Bytes into(1000);
    EXPECT_OK(client_->read("a", 0, slice_of(into)).wait());
    EXPECT_EQ(into, bytes);
  }
}

TEST_F(Remote, ManyThreadsOfOneClientWaitAndReceive) {
  start();
  const Bytes bytes = pattern(256 * kKiB, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  const auto link = link_of(*client_);
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 6; ++i)
    threads.emplace_back([&, i] {
      Bytes into(1000 * (i + 1));
      for (uint64_t each = 0; each < 300; ++each) {
        const uint64_t offset = (each * 7919 + i * 104'729) % (bytes.size() - into.size());
        const bool receives = each % 3 != 0;
        std::optional<WillReceive> scope;
        if (receives) scope.emplace();
        const auto read = client_->read("a", offset, slice_of(into));
        if (receives) link->receive_until([&] { return read.ready(); }, Answers::Time::max());
        ASSERT_OK(read.wait());
        ASSERT_EQ(std::memcmp(into.data(), bytes.data() + offset, into.size()), 0);
      }
    });
  for (auto& each : threads) each.join();
}

// Pages of some objects each. What is left of a list waits for the client, if there is memory.
TEST_F(Remote, ListsComeInPages) {
  options_.list_bytes = 1000;
  start();
  constexpr uint64_t kObjects = 100;
  for (uint64_t i = 0; i < kObjects; ++i)
    ASSERT_OK(put(*inner_, "o/" + std::to_string(1000 + i), pattern(10, i)));
  ASSERT_OK(put(*inner_, "p", pattern(10, 1)));
  const uint64_t requests = server_->counts().requests;
  const auto all = client_->list("o/");
  ASSERT_OK(all);
  ASSERT_EQ(all->size(), kObjects);
  for (uint64_t i = 0; i < kObjects; ++i) EXPECT_EQ((*all)[i].key, "o/" + std::to_string(1000 + i));
  EXPECT_GE(server_->counts().requests - requests, 8U) << "each has less than 15 objects";
  EXPECT_EQ(server_->counts().lists, 1U) << "the store is asked once";
  {
    const auto full = runtime_->budget().take(
        runtime_->budget().cap() - runtime_->budget().used() - 100, "the test");
    ASSERT_OK(full);
    EXPECT_EQ(client_->list("")->size(), kObjects + 1);
    EXPECT_GE(server_->counts().lists, 8U) << "for each page";
  }
  EXPECT_EQ(client_->list("q")->size(), 0U);
}

// Something is committed while it is listed for the second time.
class ChangesWhenListed final : public Store {
 public:
  explicit ChangesWhenListed(std::unique_ptr<Store> inner) : inner_(std::move(inner)) {}
  Features features() const override { return inner_->features(); }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override {
    return inner_->stat(key, snapshot);
  }
  Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                       std::string_view snapshot) override {
    auto all = inner_->list(prefix, snapshot);
    if (++lists == 2) {
      const auto change = std::move(*inner_->begin());
      for (const char* key : {"a", "d"}) EXPECT_OK(change->resize(key, 20));
      EXPECT_OK(change->commit(Durability::durable).wait());
    }
    return all;
  }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    return inner_->read(key, offset, into, options);
  }
  Result<std::unique_ptr<Transaction>> begin() override { return inner_->begin(); }
  Future<void> snapshot(std::string_view name) override { return inner_->snapshot(name); }
  Future<void> drop(std::string_view name, Durability durability) override {
    return inner_->drop(name, durability);
  }
  StoreInfo info() const override { return inner_->info(); }

  std::atomic<int> lists{0};

 private:
  const std::unique_ptr<Store> inner_;
};

TEST_F(Remote, AListIsOfOneVersion) {
  options_.list_bytes = 1;  // an object a page
  auto changes = std::make_unique<ChangesWhenListed>(std::move(inner_));
  const std::atomic<int>& lists = changes->lists;
  inner_ = std::move(changes);
  start();
  for (const char* key : {"a", "b", "c", "d"}) ASSERT_OK(put(*inner_, key, pattern(10, 1)));
  const auto full = runtime_->budget().take(
      runtime_->budget().cap() - runtime_->budget().used() - 100, "the test");
  ASSERT_OK(full);  // each page is of a list of its own
  const auto all = client_->list("");
  ASSERT_OK(all);
  ASSERT_EQ(all->size(), 4U);
  EXPECT_EQ((*all)[0].bytes, 20U);
  EXPECT_EQ((*all)[3].bytes, 20U);
  EXPECT_GT(lists, 4);
}

TEST_F(Remote, PinsAreBoundedAndEndWithTheClient) {
  start();
  ASSERT_OK(put(*inner_, "a", pattern(4 * kMiB, 1)));
  std::vector<View> views;
  for (uint64_t at = 0; at < 4 * kMiB; at += 64 * kKiB) {
    const auto view = client_->view("a", at, 64 * kKiB).wait();
    ASSERT_OK(view);
    views.push_back(*view);
  }
  EXPECT_EQ(server_->counts().pins, 16U) << "a quarter of the blocks; the others are copies";
  EXPECT_EQ(read_all(**connect(), "a"), pattern(4 * kMiB, 1));
  views.clear();
  client_.reset();
  EXPECT_TRUE(soon([&] { return server_->counts().pins == 0; }));
}

TEST_F(Remote, AViewStaysAsItIsWhenItsStoreIsGone) {
  start();
  const Bytes bytes = pattern(64 * kKiB, 1);
  ASSERT_OK(put(*inner_, "a", bytes));
  ASSERT_OK(put(*inner_, "others", pattern(8 * kMiB, 2)));
  auto other = std::move(*connect());
  auto view = *other->view("a", 0, 64 * kKiB).wait();
  ASSERT_EQ(server_->counts().pins, 1U) << "no copy was made";
  other.reset();
  for (int round = 0; round < 2; ++round) read_all(*client_, "others");  // all slots, twice
  EXPECT_EQ(std::memcmp(view.data.get(), bytes.data(), bytes.size()), 0);
  view = {};
  EXPECT_TRUE(soon([&] { return server_->counts().clients == 1; }));
  client_.reset();  // one that lives may keep a few pins of what it read, to give back together
  EXPECT_TRUE(soon([&] { return server_->counts().pins == 0; }));
}

TEST_F(Remote, AClientThatEndsHasItsTransactionsAbandoned) {
  start();
  auto other = std::move(*connect());
  auto change = std::move(*other->begin());
  ASSERT_OK(change->resize("a", 10));
  EXPECT_EQ(code_of(put(*client_, "a", pattern(10, 1))), Code::busy);
  change.reset();
  other.reset();
  EXPECT_TRUE(soon([&] { return put(*client_, "a", pattern(10, 1)).has_value(); }));
}

// Plans go through, and end with the client that named them last.
TEST_F(Remote, PlansAreFollowedAndEndWithTheClient) {
  const std::string root = options_.path + "_slow";
  inner_ = std::move(*open_store("cached(memory:, dir:" + root + ", disk=1MiB, block=64KiB)",
                                 runtime_->runtime(), {.create = true}));
  start();
  ASSERT_OK(put(*client_, "a", pattern(256 * kKiB, 1)));
  const auto plans = [this] { return client_->info().cache->plans; };
  const Plan plan{.name = "mine",
                  .keys = {"a"},
                  .runs = {{.bytes = 64 * kKiB, .items = 4, .stride = 64 * kKiB}}};
  auto other = std::move(*connect());
  ASSERT_OK(other->follow(plan));
  Plan ours = plan;
  ours.name = "ours";
  ASSERT_OK(other->follow(ours));
  EXPECT_EQ(plans(), 2U);
  ASSERT_OK(client_->follow(ours)) << "takes the place of the other's";
  EXPECT_EQ(plans(), 2U);
  Plan wrong = plan;
  wrong.runs[0].items = 5;
  EXPECT_EQ(code_of(other->follow(wrong)), Code::invalid_argument);
  for (uint64_t i = 0; i < remote::kPlansMax; ++i) {
    ours.name = std::to_string(i);
    const Status followed = other->follow(ours);
    EXPECT_EQ(followed.has_value(), i + 1 < remote::kPlansMax) << "one was there";
  }
  other.reset();
  EXPECT_TRUE(soon([&] { return plans() == 1; }));
  ASSERT_OK(client_->follow({.name = "ours"}));
  EXPECT_EQ(plans(), 0U);
  for (uint64_t each = 0; each < 2; ++each)
    EXPECT_EQ(read_all(*client_, "a"), pattern(256 * kKiB, 1));
  client_.reset();
  server_.reset();
  inner_.reset();
  std::filesystem::remove_all(root);
}

// The clients of these two speak for themselves, as no library of ours would.
Fd greet(const std::string& path, Fd memory, uint64_t bytes) {
  Fd socket = std::move(*remote::connect_to(path));
  remote::Request hello{.kind = Kind::hello, .bytes = bytes};
  const auto message =
      remote::outgoing({Kind::hello, false, 1}, remote::encode(hello), std::move(memory));
  EXPECT_EQ(remote::send(socket.get(), *message, true), remote::Sent::all);
  return socket;
}
bool closed(int socket) {
  for (;;) {
    const auto packet = remote::receive(socket, remote::kAnswerMax);
    if (!packet || !*packet) return true;
  }
}
void send(int socket, remote::Request request) {
  const auto message = remote::outgoing({request.kind, false, 5}, remote::encode(request));
  EXPECT_EQ(remote::send(socket, *message, true), remote::Sent::all);
}

remote::Answer answer(int socket) {
  const auto packet = remote::receive(socket, remote::kAnswerMax);
  if (!packet || !*packet) return {};
  return std::move(*remote::decode_answer(std::as_bytes(std::span((*packet)->body))));
}

// Page by page, by turns. Of more than eight the one told longest ago is listed anew.
TEST_F(Remote, SeveralListsOfOneClientAreToldAtOnce) {
  options_.list_bytes = 1;  // an object a page
  start();
  for (const char* key : {"a/1", "a/2", "a/3", "b/1", "b/2", "b/3"})
    ASSERT_OK(put(*inner_, key, pattern(10, 1)));
  const Fd socket = greet(options_.path, std::move(*remote::make_memory("test", 4096)), 4096);
  ASSERT_TRUE(*remote::receive(socket.get(), remote::kAnswerMax));
  const auto page = [&](const std::string& prefix, const std::string& behind) {
    remote::Request request{.kind = Kind::list};
    request.key = prefix;
    request.tag = behind;
    send(socket.get(), request);
    const auto told = answer(socket.get());
    return told.objects.size() == 1 ? told.objects[0].key : "";
  };
  const std::vector<std::string> prefixes = {"a/", "b/", "a/", ""};  // two of one, too
  std::vector<std::string> last(prefixes.size());
  for (int at = 1; at <= 3; ++at)
    for (size_t i = 0; i < prefixes.size(); ++i) {
      last[i] = page(prefixes[i], last[i]);
      EXPECT_EQ(last[i], (prefixes[i].empty() ? "a/" : prefixes[i]) + std::to_string(at));
    }
  EXPECT_EQ(server_->counts().lists, prefixes.size()) << "one each";
  for (int each = 0; each < 9; ++each) page("b/", "");
  const uint64_t lists = server_->counts().lists;
  EXPECT_EQ(page("", last[3]), "b/1");
  EXPECT_EQ(server_->counts().lists, lists + 1);
}

TEST_F(Remote, AClientThatIsSilentIsGivenUp) {
  options_.heartbeat_ms = 300;
  start();
  const Fd socket = greet(options_.path, std::move(*remote::make_memory("test", 4096)), 4096);
  ASSERT_TRUE(*remote::receive(socket.get(), remote::kAnswerMax));
  send(socket.get(), {.kind = Kind::begin});
  EXPECT_TRUE(soon([&] { return server_->counts().transactions == 1; }));
  EXPECT_TRUE(closed(socket.get()));
  EXPECT_TRUE(soon([&] { return server_->counts().transactions == 0; }));
  EXPECT_TRUE(client_->list("")) << "the library of this one says that it lives";
}

// The client hears of no piece, so it cannot give back what was pinned for the others.
TEST_F(Remote, AReadThatFailsLeavesNoPins) {
  start();
  ASSERT_OK(put(*inner_, "a", pattern(64 * kKiB, 1)));
  Bytes into(128 * kKiB);
  const std::vector<std::string> keys = {"a", "missing"};
  const std::vector<Piece> pieces = {{0, 0, 64 * kKiB, 0}, {1, 0, 64 * kKiB, 64 * kKiB}};
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(code_of(client_->read_many(keys, pieces, slice_of(into), {}).wait()),
              Code::not_found);
  EXPECT_EQ(server_->counts().pins, 0U);
}

// One that was stopped goes on, and reads what it was lent.
TEST_F(Remote, ASilentClientKeepsItsPinsUntilItsSocketIsClosed) {
  options_.heartbeat_ms = 1000;
  start();
  ASSERT_OK(put(*inner_, "a", pattern(64 * kKiB, 1)));
  Fd socket = greet(options_.path, std::move(*remote::make_memory("test", 1 << 16)), 1 << 16);
  ASSERT_TRUE(*remote::receive(socket.get(), remote::kAnswerMax));
  send(socket.get(), {.kind = Kind::begin});
  remote::Request read{.kind = Kind::read, .keys = {"a"}};
  read.pieces = {{0, 0, 64 * kKiB}};
  send(socket.get(), read);
  EXPECT_TRUE(soon([&] { return server_->counts().transactions == 1; }));
  EXPECT_TRUE(soon([&] { return server_->counts().pins == 1; }));
  EXPECT_TRUE(closed(socket.get()));
  EXPECT_TRUE(soon([&] { return server_->counts().transactions == 0; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(server_->counts().pins, 1U);
  socket = {};
  EXPECT_TRUE(soon([&] { return server_->counts().pins == 0; }));
}

// commit() is called once, and beside no other call: the server sees to it, whoever the client is.
TEST_F(Remote, ATransactionIsCommittedOnce) {
  start();
  const Fd socket = greet(options_.path, std::move(*remote::make_memory("test", 4096)), 4096);
  ASSERT_TRUE(*remote::receive(socket.get(), remote::kAnswerMax));
  const auto next = [&] {
    const auto packet = remote::receive(socket.get(), remote::kAnswerMax);
    EXPECT_TRUE(packet && *packet);
    return *remote::decode_answer(std::as_bytes(std::span((*packet)->body)));
  };
  send(socket.get(), {.kind = Kind::begin});
  const uint64_t id = next().number;
  remote::Request request{.kind = Kind::resize, .transaction = id, .bytes = 10, .key = "a"};
  send(socket.get(), request);
  EXPECT_FALSE(next().error);
  request.kind = Kind::commit;
  for (int i = 0; i < 3; ++i) send(socket.get(), request);
  request.kind = Kind::write;
  send(socket.get(), request);
  request.kind = Kind::remove;
  send(socket.get(), request);
  int committed = 0;
  for (int i = 0; i < 5; ++i) {
    const auto answer = next();
    committed += answer.error ? 0 : 1;
    EXPECT_TRUE(!answer.error || answer.error->code == Code::invalid_argument);
  }
  EXPECT_EQ(committed, 1);
  EXPECT_OK(client_->stat("a"));
}

TEST_F(Remote, WhoBreaksARuleIsCutOff) {
  start();
  const auto memory = [] { return std::move(*remote::make_memory("test", 1 << 16)); };
  const auto greeted = [&] {
    Fd socket = greet(options_.path, memory(), 1 << 16);
    EXPECT_TRUE(*remote::receive(socket.get(), remote::kAnswerMax));
    return socket;
  };
  EXPECT_TRUE(closed(greet(options_.path, memory(), 1 << 17).get())) << "a size that is not so";
  EXPECT_TRUE(closed(greet(options_.path, Fd(memfd_create("test", MFD_CLOEXEC)), 0).get()))
      << "memory that may shrink";
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const Fd one(pipes[0]);
  EXPECT_TRUE(closed(greet(options_.path, Fd(pipes[1]), 0).get())) << "no memory";
  for (const Kind kind : {Kind::read, Kind::write}) {
    remote::Request beyond{.kind = kind, .bytes = 2, .place = (1 << 16) - 1};
    beyond.keys = {"a"};
    beyond.pieces = {{0, 0, 2}};
    const Fd socket = greeted();
    send(socket.get(), beyond);
    EXPECT_TRUE(closed(socket.get())) << "beyond its memory";
  }
  {
    const Fd socket = greeted();
    remote::Request unpin{.kind = Kind::unpin};
    unpin.numbers = {0};
    send(socket.get(), unpin);
    EXPECT_TRUE(closed(socket.get())) << "a pin that it has not";
  }
  {
    const Fd socket = greeted();
    EXPECT_EQ(::send(socket.get(), "STKR", 4, MSG_NOSIGNAL), 4);
    EXPECT_TRUE(closed(socket.get())) << "half a header";
  }
  EXPECT_OK(client_->list(""));
}

TEST_F(Remote, NobodyWritesToTheBlocks) {
  start();
  const Fd socket = greet(options_.path, std::move(*remote::make_memory("test", 4096)), 4096);
  const auto packet = remote::receive(socket.get(), remote::kAnswerMax);
  ASSERT_TRUE(packet && *packet);
  const int fd = (*packet)->fd.get();
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_EQ(pwrite(fd, "x", 1, 0), -1);
  EXPECT_EQ(ftruncate(fd, 0), -1);
  EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST_F(Remote, RightsHold) {
  options_.prefix = "in/";
  options_.read_only = true;
  ASSERT_OK(put(*inner_, "in/a", pattern(10, 1)));
  ASSERT_OK(put(*inner_, "out", pattern(10, 2)));
  start();
  struct stat socket {};
  ASSERT_EQ(stat(options_.path.c_str(), &socket), 0);
  EXPECT_EQ(socket.st_mode & 0777, 0600U);
  EXPECT_EQ(read_all(*client_, "in/a"), pattern(10, 1));
  Bytes bytes(10);
  EXPECT_EQ(code_of(client_->stat("out")), Code::no_permission);
  EXPECT_EQ(code_of(client_->read("out", 0, slice_of(bytes)).wait()), Code::no_permission);
  EXPECT_EQ(code_of(client_->forget("out", 0, 1)), Code::no_permission);
  EXPECT_EQ(client_->list("")->size(), 1U);
  EXPECT_EQ(client_->list("o")->size(), 0U);
  EXPECT_EQ(code_of(client_->begin()), Code::read_only);
  EXPECT_EQ(code_of(client_->copy("in/a", "in/b")), Code::read_only);
  EXPECT_EQ(code_of(client_->remove(std::vector<std::string>{"in/a"})), Code::read_only);
  EXPECT_EQ(code_of(client_->snapshot("s").wait()), Code::read_only);
  EXPECT_FALSE(client_->info().read_only.empty());
}

TEST_F(Remote, APrefixHoldsForWritersToo) {
  options_.prefix = "in/";
  ASSERT_OK(put(*inner_, "out", pattern(10, 2)));
  start();
  ASSERT_OK(put(*client_, "in/a", pattern(10, 1)));
  EXPECT_EQ(code_of(put(*client_, "b", pattern(10, 1))), Code::no_permission);
  EXPECT_EQ(code_of(client_->copy("out", "in/b")), Code::no_permission);
  EXPECT_EQ(code_of(client_->copy("in/a", "out")), Code::no_permission);
  EXPECT_EQ(code_of(client_->snapshot("s").wait()), Code::no_permission);
  const auto change = std::move(*client_->begin());
  EXPECT_EQ(code_of(change->require("out", kAbsent)), Code::no_permission);
  EXPECT_EQ(code_of(change->remove("out")), Code::no_permission);
}

TEST_F(Remote, OneServesAtAPlace) {
  start();
  EXPECT_EQ(code_of(serve(*inner_, runtime_->runtime(), options_)), Code::busy);
  client_.reset();
  server_.reset();
  EXPECT_EQ(code_of(connect()), Code::unavailable);
  start();
}

TEST_F(Remote, NoMoreClientsThanAllowed) {
  options_.clients = 1;
  start();
  EXPECT_EQ(code_of(connect()), Code::busy);
  EXPECT_OK(client_->list(""));
}

TEST_F(Remote, WhenTheServerEndsItIsUnavailableUntilItIsBack) {
  start();
  ASSERT_OK(put(*client_, "a", pattern(10, 1)));
  const auto view = client_->view("a", 0, 10).wait();
  ASSERT_OK(view);
  const auto change = std::move(*client_->begin());
  ASSERT_OK(change->resize("a", 10));
  server_.reset();
  EXPECT_EQ(code_of(client_->stat("a")), Code::unavailable);
  EXPECT_EQ(code_of(change->resize("a", 10)), Code::unavailable);
  EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::unavailable)
      << "it was never sent";
  EXPECT_EQ(view->data.get()[0], pattern(10, 1)[0]) << "a view outlives the server";
  auto server = serve(*inner_, runtime_->runtime(), options_);
  ASSERT_OK(server);
  server_ = std::move(*server);
  EXPECT_EQ(read_all(*client_, "a"), pattern(10, 1));
  EXPECT_EQ(code_of(change->resize("a", 10)), Code::unavailable) << "it is of a connection before";
}

// A server that answers hello and begin, and dies when it has another request, and shall.
class Dies {
 public:
  explicit Dies(const std::string& path)
      : listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_storage raw{};
    raw.ss_family = AF_UNIX;
    std::memcpy(reinterpret_cast<char*>(&raw) + sizeof(sa_family_t), path.data(), path.size());
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&raw),
                   static_cast<socklen_t>(sizeof(sa_family_t) + path.size() + 1)),
              0);
    EXPECT_EQ(listen(listener_.get(), 1), 0);
    thread_ = std::thread([this] { run(); });
  }
  void die() { dying_ = true; }
  void join() { thread_.join(); }

 private:
  void run() {
    const Fd client(accept(listener_.get(), nullptr, nullptr));
    for (;;) {
      const auto packet = remote::receive(client.get(), remote::kRequestMax);
      if (!packet || !*packet) return;
      const Kind kind = (*packet)->header.kind;
      if (kind != Kind::hello && kind != Kind::begin) break;
      remote::Answer answer{.number = 1};
      Fd fd;
      if (kind == Kind::hello) {
        answer.blob = remote::Welcome{{}, 30'000, 0}.encode();
        fd = std::move(*remote::make_memory("test", 0));
      }
      const auto message = remote::outgoing({Kind::answer, false, (*packet)->header.id},
                                            remote::encode(answer), std::move(fd));
      remote::send(client.get(), *message, true);
    }
    while (!dying_) std::this_thread::yield();
  }
  const Fd listener_;
  std::atomic<bool> dying_{false};
  std::thread thread_;
};

TEST_F(Remote, ACommitWhoseAnswerIsLostIsInDoubt) {
  Dies server(options_.path);
  server.die();
  auto client = connect();
  ASSERT_OK(client);
  const auto change = std::move(*(*client)->begin());
  EXPECT_EQ(code_of(change->commit(Durability::durable).wait()), Code::in_doubt);
  server.join();
  std::filesystem::remove(options_.path);
}

TEST_F(Remote, AServerThatDiesWhileACallerReceivesIsUnavailable) {
  Dies server(options_.path);
  auto client = connect();
  ASSERT_OK(client);
  const auto link = link_of(**client);
  Bytes into(1000);
  const auto read = (*client)->read("a", 0, slice_of(into));
  std::thread waiter(
      [&] { link->receive_until([&] { return read.ready(); }, Answers::Time::max()); });
  while (!link->waiter_receives()) std::this_thread::yield();
  const auto other = (*client)->read("a", 5, slice_of(into));
  server.die();
  EXPECT_EQ(code_of(read.wait()), Code::unavailable);
  EXPECT_EQ(code_of(other.wait()), Code::unavailable);
  waiter.join();
  server.join();
  EXPECT_TRUE(link->lost());
  std::filesystem::remove(options_.path);
}

TEST_F(Remote, AForkedProcessConnectsForItself) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer starts no threads in a forked process";
#endif
  start();
  ASSERT_OK(put(*client_, "a", pattern(100'000, 1)));
  const auto view = client_->view("a", 0, 10).wait();
  const pid_t child = fork();
  if (child == 0) {
    Bytes into(100'000);
    const bool read = client_->read("a", 0, slice_of(into)).wait().has_value();
    _exit(read && into == pattern(100'000, 1) ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_all(*client_, "a"), pattern(100'000, 1)) << "its connection is as it was";
}

TEST_F(Remote, ManyPiecesOfManyObjects) {
  start();
  std::vector<std::string> keys;
  for (uint64_t i = 0; i < 20; ++i) {
    keys.push_back("object/" + std::to_string(i));
    ASSERT_OK(put(*inner_, keys.back(), pattern(200'000, i)));
  }
  std::mt19937_64 random(3);
  std::vector<Piece> pieces;
  Bytes into(12 * kMiB);
  for (uint64_t at = 0; pieces.size() < 3000;) {
    Piece piece{.object = random() % keys.size(), .offset = random() % 190'000, .into = at};
    piece.bytes = random() % (pieces.size() % 100 == 0 ? 9'999 : 3'000);
    pieces.push_back(piece);
    at += piece.bytes;
  }
  ASSERT_OK(client_->read_many(keys, pieces, slice_of(into), {}).wait());
  for (const Piece& piece : pieces)
    ASSERT_EQ(std::memcmp(into.data() + piece.into,
                          pattern(200'000, piece.object).data() + piece.offset, piece.bytes),
              0);
  pieces[1500].offset = 200'000;
  pieces[1500].bytes = 1;
  EXPECT_EQ(code_of(client_->read_many(keys, pieces, slice_of(into), {}).wait()),
            Code::invalid_argument);
}

}  // namespace
}  // namespace stoker
