// S3Store against a server that misbehaves. Counts requests and looks at bytes; never at the clock.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "stoker/base/log.h"
#include "stoker/store/runtime.h"
#include "stoker/store/s3/store.h"
#include "stoker/testing/s3_server.h"
#include "stoker/testing/store_harness.h"

// Stands before the C library's, for the HTTP library too: a name with three addresses.
extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (node == nullptr || std::string_view(node) != "three.test")
    return real(node, service, hints, found);
  addrinfo* list = nullptr;
  for (const char* address : {"127.0.0.3", "127.0.0.2", "127.0.0.1"}) {
    addrinfo* one = nullptr;
    addrinfo numeric = *hints;
    numeric.ai_family = AF_INET;
    if (const int error = real(address, service, &numeric, &one); error != 0) return error;
    one->ai_next = list;
    list = one;
  }
  *found = list;
  return 0;
}

namespace stoker {
namespace {

using Json = nlohmann::json;

class S3Fault : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new S3Server(); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override {
    server_->control({{"clear", true}});
    runtime_ = std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
    open();
  }
  void TearDown() override {
    store_.reset();
    runtime_.reset();
  }
  void open(const std::string& options = "", bool read_only = false) {
    store_.reset();
    StoreOptions how;
    how.read_only = read_only;
    auto opened = open_s3_store(server_->store(options), runtime_->runtime(), how);
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }
  Status put(const std::string& key, Bytes bytes, const char* tag = nullptr) {
    STOKER_ASSIGN(auto change, store_->begin());
    STOKER_TRY(change->resize(key, bytes.size()));
    if (tag != nullptr) STOKER_TRY(change->require(key, tag));
    STOKER_TRY(change->write(key, 0, slice_of(bytes)).wait());
    const auto done = change->commit(Durability::durable).wait();
    return done ? Status() : Status(done.error());
  }
  Status read(const std::string& key, Bytes& into) {
    return store_->read(key, 0, slice_of(into)).wait();
  }

  static inline S3Server* server_ = nullptr;
  std::unique_ptr<RuntimeOwner> runtime_;
  std::unique_ptr<Store> store_;
};

TEST_F(S3Fault, AStormOf503IsWaitedOut) {
  server_->fault({{"kind", "status"}, {"status", 503}, {"code", "SlowDown"}, {"times", 6}});
  EXPECT_OK(put("object", pattern(1000, 1)));
  server_->fault({{"kind", "status"}, {"status", 503}, {"code", "SlowDown"}, {"times", 5}});
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
}

TEST_F(S3Fault, AReadGoesOnWhereItWasCut) {
  const Bytes bytes = pattern(20 * kMiB, 2);
  ASSERT_OK(put("object", bytes));
  for (const Json& fault :
       {Json{{"kind", "truncate"}, {"bytes", 3'000'000}}, Json{{"kind", "close"}},
        Json{{"kind", "close_after"}}, Json{{"kind", "wrong_range"}},
        Json{{"kind", "status"}, {"status", 500}},
        Json{{"kind", "status"}, {"status", 503}, {"code", "SlowDown"}}}) {
    server_->fault(fault);
    Bytes into(bytes.size());
    EXPECT_OK(read("object", into)) << fault;
    EXPECT_EQ(into, bytes) << fault;
    EXPECT_EQ(server_->log().size(), 3U + 1) << "three ranges, and one of them again: " << fault;
  }
}

// Many reads of 1000 bytes at once.
class S3Many : public S3Fault {
 protected:
  void SetUp() override {
    S3Fault::SetUp();
    ASSERT_OK(put("object", bytes_));
  }
  void read_many(size_t count) {
    std::vector<Bytes> into(count, Bytes(bytes_.size()));
    std::vector<Future<void>> reads;
    reads.reserve(count);
    for (auto& each : into) reads.push_back(store_->read("object", 0, slice_of(each), {}));
    for (size_t i = 0; i < count; ++i) {
      EXPECT_OK(reads[i].wait());
      EXPECT_EQ(into[i], bytes_);
    }
  }
  uint64_t seen(const char* what) { return server_->seen()[what].get<uint64_t>(); }

  const Bytes bytes_ = pattern(1000, 2);
};

TEST_F(S3Many, ASlowRequestIsOvertakenByASecondOne) {
  // So slow that the noise of the machine is none of theirs.
  server_->fault({{"kind", "slow"}, {"method", "GET"}, {"times", 1000}, {"seconds", 0.05}});
  read_many(400);
  server_->fault({{"kind", "slow"}, {"method", "GET"}, {"seconds", 10}});
  read_many(1);
  EXPECT_EQ(seen("arrived"), 2U);
  EXPECT_EQ(server_->log().size(), 1U) << "the slow one is not answered yet";
}

TEST_F(S3Many, SecondRequestsAreOneInFiftyAtMost) {
  server_->control(Json::object());
  read_many(120);
  uint64_t arrived = seen("arrived");
  server_->fault({{"kind", "slow"}, {"method", "GET"}, {"times", 12}, {"seconds", 1.5}});
  read_many(12);
  arrived += seen("arrived");
  EXPECT_LE(arrived, 132U + 2);
}

TEST_F(S3Many, FewerRequestsAreUnderWayAfterThrottling) {
  const auto peak_under = [&](const Json& fault) {
    open("&patience=60");
    if (!fault.is_null()) server_->fault(fault);
    read_many(4);
    server_->fault({{"kind", "slow"}, {"method", "GET"}, {"times", 1000}, {"seconds", 0.6}});
    read_many(24);
    return seen("peak");
  };
  EXPECT_GT(peak_under({}), 12U);
  for (const Json& fault :
       {Json{{"kind", "status"}, {"status", 503}, {"code", "SlowDown"}},
        Json{{"kind", "status"}, {"status", 429}}, Json{{"kind", "status"}, {"status", 500}}})
    EXPECT_LE(peak_under(fault), 12U) << fault;
}

// Sixteen are under way, and sixty wait, when it comes.
TEST_F(S3Many, WhatSomebodyWaitsForOvertakesWhatIsFetchedAhead) {
  ASSERT_OK(put("wanted", bytes_));
  server_->fault({{"kind", "slow"}, {"method", "GET"}, {"times", 16}, {"seconds", 1}});
  std::vector<Bytes> into(77, Bytes(bytes_.size()));
  std::vector<Future<void>> reads;
  for (size_t i = 0; i < 76; ++i)
    reads.push_back(store_->read("object", 0, slice_of(into[i]), {.priority = Priority::prefetch}));
  reads.push_back(store_->read("wanted", 0, slice_of(into[76])));
  for (auto& each : reads) EXPECT_OK(each.wait());
  const auto log = server_->log();
  size_t place = 0;
  while (log.at(place)[1].get<std::string>().find("wanted") == std::string::npos) ++place;
  EXPECT_GE(log.size(), 77U);
  EXPECT_LT(place, 40U) << "behind those under way, and those that began with it";
}

TEST_F(S3Many, ConnectionsSpreadOverTheAddressesOfTheEndpoint) {
  store_.reset();
  std::string where = server_->store();
  where.replace(where.find("127.0.0.1"), 9, "three.test");
  store_ = std::move(*open_s3_store(where, runtime_->runtime(), {}));
  server_->fault({{"kind", "slow"}, {"method", "GET"}, {"times", 1000}, {"seconds", 0.05}});
  read_many(32);
  std::set<std::string> addresses;
  for (const auto& each : server_->log()) addresses.insert(each[3].get<std::string>());
  EXPECT_GE(addresses.size(), 2U);  // drawn by lot: now and then not all three
}

TEST_F(S3Fault, AnObjectThatIsReplacedDuringAReadIsAnError) {
  ASSERT_OK(put("object", pattern(20 * kMiB, 2)));
  server_->fault({{"kind", "replace"}, {"method", "GET"}});
  Bytes into(20 * kMiB);
  const Status status = read("object", into);
  EXPECT_EQ(code_of(status), Code::conflict);
  EXPECT_NE(status.error().what.find("was replaced while it was read"), std::string::npos)
      << status.error().what;
}

TEST_F(S3Fault, AnObjectThatVanishesDuringAReadIsAnError) {
  ASSERT_OK(put("object", pattern(20 * kMiB, 2)));
  server_->fault({{"kind", "vanish"}, {"method", "GET"}});
  Bytes into(20 * kMiB);
  const Status status = read("object", into);
  EXPECT_EQ(code_of(status), Code::not_found);
  EXPECT_NE(status.error().what.find("there is no object"), std::string::npos);
}

// XML takes a CR for a LF, which is another object here.
TEST_F(S3Fault, RemovingManyRemovesTheseAlone) {
  const std::vector<std::string> keys = {"a\rb", "plain", "\x01", "ö", "no text \xff"};
  for (const std::string& key : keys) ASSERT_OK(put(key, pattern(10, 1))) << key;
  ASSERT_OK(put("a\nb", pattern(10, 1)));
  EXPECT_OK(store_->remove(keys));
  const auto left = store_->list("");
  ASSERT_EQ(left->size(), 1U);
  EXPECT_EQ(left->front().key, "a\nb");
}

TEST_F(S3Fault, AWrongRangeForEverIsAnError) {
  ASSERT_OK(put("object", pattern(1000, 2)));
  server_->fault({{"kind", "wrong_range"}, {"method", "GET"}, {"times", 1000}});
  Bytes into(500);
  EXPECT_EQ(code_of(read("object", into)), Code::io);
  EXPECT_LE(server_->log().size(), 5U);
}

// The answer is lost when the PUT is done: sent once, and found to be ours.
TEST_F(S3Fault, ALostAnswerToACommitIsNotSentAgain) {
  ASSERT_OK(put("before", pattern(10, 1)));  // so that there is a kept connection, on which a
                                             // library would send it again by itself
  server_->fault({{"kind", "close_after"}, {"method", "PUT"}});
  EXPECT_OK(put("object", pattern(1000, 1)));
  EXPECT_EQ(server_->count("PUT", "object"), 1U);
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));

  ASSERT_OK(put("gone", pattern(10, 1)));
  server_->fault({{"kind", "close_after"}, {"method", "DELETE"}});
  auto change = std::move(*store_->begin());
  EXPECT_OK(change->remove("gone"));
  EXPECT_OK(change->commit(Durability::durable).wait());
  EXPECT_EQ(server_->count("DELETE", "gone"), 1U);
}

TEST_F(S3Fault, ACommitThatWasNotDoneAndNotAnsweredIsInDoubt) {
  for (const Json& fault :
       {Json{{"kind", "close"}, {"method", "PUT"}},
        Json{{"kind", "status"}, {"method", "PUT"}, {"status", 500}, {"code", "InternalError"}},
        Json{{"kind", "status"}, {"method", "PUT"}, {"status", 502}},
        Json{{"kind", "status"}, {"method", "PUT"}, {"status", 503}}}) {
    server_->fault(fault);
    EXPECT_EQ(code_of(put("object", pattern(1000, 1))), Code::in_doubt) << fault;
    EXPECT_LE(server_->count("PUT", "object"), 1U) << fault;
  }
  EXPECT_EQ(code_of(store_->stat("object")), Code::not_found);
}

TEST_F(S3Fault, AConditionalCommitIsSentAgainAndMeetsItsOwnWrite) {
  ASSERT_TRUE(store_->features().conditional);
  server_->fault({{"kind", "close_after"}, {"method", "PUT"}});
  EXPECT_OK(put("object", pattern(1000, 1), "")) << "it is ours that is there";
  EXPECT_EQ(server_->count("PUT", "object"), 2U);
  server_->fault({{"kind", "close"}, {"method", "PUT"}});
  const std::string tag = store_->stat("object")->tag;
  EXPECT_OK(put("object", pattern(1000, 2), tag.c_str()));
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 2));
  server_->fault({{"kind", "status"},
                  {"method", "PUT"},
                  {"status", 409},
                  {"code", "ConditionalRequestConflict"},
                  {"times", 2}});
  EXPECT_OK(put("other", pattern(10, 3), "")) << "409 is sent again";
  server_->fault(
      {{"kind", "status"}, {"method", "PUT"}, {"status", 404}, {"code", "NoSuchBucket"}});
  EXPECT_EQ(code_of(put("object", pattern(10, 3), tag.c_str())), Code::not_found);
  server_->control(Json::object());
  EXPECT_EQ(code_of(put("object", pattern(1000, 4), "")), Code::conflict);
  EXPECT_EQ(code_of(put("large", pattern(17 * kMiB, 4), "")), Code::unsupported);
}

TEST_F(S3Fault, AServerThatIgnoresConditionsIsFoundOut) {
  server_->control({{"conditions", false}});
  open();
  EXPECT_FALSE(store_->features().conditional);
  EXPECT_EQ(code_of(put("object", pattern(10, 1), "")), Code::unsupported);
  server_->control(Json::object());
  EXPECT_TRUE(store_->list("")->empty()) << "the probe is removed";
}

// As RGW 16.
TEST_F(S3Fault, AServerMayIgnoreConditionsOfUploadsAlone) {
  const std::string ignores = "ignores conditions of uploads";
  for (const bool known : {true, false}) {
    server_->control({{"upload_conditions", known}});
    open();
    for (int i = 0; i < 2; ++i) {
      const Status large = put("large", pattern(17 * kMiB, 4), "");
      ASSERT_EQ(code_of(large), Code::unsupported);
      EXPECT_EQ(large.error().message().find(ignores) == std::string::npos, known);
    }
    EXPECT_EQ(server_->count("POST", ".stoker-probe-"), 2U) << "one upload, begun and ended, once";
    EXPECT_TRUE(store_->list("")->empty()) << "the probe is removed";
    EXPECT_OK(put("small", pattern(10, 1), ""));
    server_->control({{"clear", true}});
  }
}

// RGW 16 compares If-Match with the ETag without its quotes.
TEST_F(S3Fault, AServerThatWantsBareTagsGetsThem) {
  server_->control({{"bare", true}});
  open();
  EXPECT_TRUE(store_->features().conditional);
  ASSERT_OK(put("object", pattern(10, 1), ""));
  const std::string tag = store_->stat("object")->tag;
  EXPECT_OK(put("object", pattern(10, 2), tag.c_str()));
  EXPECT_EQ(code_of(put("object", pattern(10, 3), tag.c_str())), Code::conflict);
  EXPECT_EQ(read_all(*store_, "object"), pattern(10, 2));
}

// What was lost while it asked says nothing about conditions.
TEST_F(S3Fault, AProbeThatIsNotAnsweredIsMadeAgain) {
  open("&patience=0");
  server_->fault({{"kind", "status"}, {"method", "PUT"}, {"status", 503}});
  EXPECT_FALSE(store_->features().conditional);
  server_->fault({{"kind", "close_after"}, {"method", "PUT"}});
  EXPECT_EQ(code_of(put("object", pattern(10, 1), "")), Code::io) << "not `unsupported`";
  server_->control(Json::object());
  EXPECT_OK(put("object", pattern(10, 1), ""));
}

// Complete and copy answer 200 before they know.
TEST_F(S3Fault, AnAnswerThatDoesNotSayIsNoSuccess) {
  server_->fault({{"kind", "blank_before"}, {"method", "POST"}, {"match", "uploadId="}});
  EXPECT_EQ(code_of(put("object", pattern(17 * kMiB, 1))), Code::in_doubt);
  EXPECT_EQ(code_of(store_->stat("object")), Code::not_found);
  server_->fault({{"kind", "blank"}, {"method", "POST"}, {"match", "uploadId="}});
  EXPECT_OK(put("object", pattern(17 * kMiB, 1))) << "it looked, and it is ours that is there";
  ASSERT_OK(put("from", pattern(10, 1)));
  server_->fault({{"kind", "blank_before"}, {"method", "PUT"}});
  EXPECT_EQ(code_of(store_->copy("from", "to")), Code::in_doubt);
}

TEST_F(S3Fault, AnUploadThatLostAPartIsAnError) {
  server_->fault({{"kind", "lost_part"}, {"method", "POST"}});
  const Status made = put("object", pattern(40 * kMiB, 1));
  ASSERT_EQ(code_of(made), Code::corruption);
  EXPECT_NE(made.error().message().find("of 2 parts, but was sent 3"), std::string::npos);
  server_->control({{"opaque", true}});  // as a server's with keys of its own
  EXPECT_OK(put("object", pattern(40 * kMiB, 1)));
}

// Whoever answers 200 to everything, a proxy's page for one, has stored nothing and lists nothing.
TEST_F(S3Fault, APageOfAProxyIsNoAnswer) {
  const std::string page = "<html><body>please log in</body></html>";
  const auto fault = [&](const char* method, const char* match) {
    server_->fault({{"kind", "status"},
                    {"method", method},
                    {"match", match},
                    {"status", 200},
                    {"body", page},
                    {"times", 1}});
  };
  fault("PUT", "");
  EXPECT_EQ(code_of(put("object", pattern(1000, 1))), Code::in_doubt);
  EXPECT_EQ(server_->count("PUT", "object"), 1U);
  fault("POST", "uploadId=");
  EXPECT_EQ(code_of(put("object", pattern(17 * kMiB, 1))), Code::in_doubt);
  EXPECT_EQ(code_of(store_->stat("object")), Code::not_found);
  ASSERT_OK(put("there", pattern(10, 1)));
  fault("GET", "list-type");
  const auto listed = store_->list("");
  ASSERT_FALSE(listed) << "not an empty bucket";
  EXPECT_NE(listed.error().message().find("does not come from an S3 server"), std::string::npos)
      << listed.error().message();
  fault("GET", "list-type");
  const auto opened = open_s3_store(server_->store(), runtime_->runtime(), {});
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message().find("endpoint="), std::string::npos);
}

// Nothing tells the rest of it from that of another object of the same length.
TEST_F(S3Fault, ACutReadWithoutAnETagBeginsAnew) {
  const Bytes bytes = pattern(1 * kMiB, 2);
  ASSERT_OK(put("object", bytes));
  server_->control({{"etags", false},
                    {"faults", Json::array({{{"kind", "truncate"}, {"bytes", 300'000}},
                                            {{"kind", "replace"}, {"method", "GET"}}})}});
  Bytes into(bytes.size());
  EXPECT_OK(read("object", into));
  EXPECT_EQ(into, Bytes(bytes.size())) << "all of the new one, nothing of the old one";
}

// Patience is for what does not go on; a long read is no reason to lose it.
TEST_F(S3Fault, PatienceBeginsWithTheFailure) {
  const Bytes bytes = pattern(1 * kMiB, 2);
  ASSERT_OK(put("object", bytes));
  open("&patience=1");
  server_->control({{"faults", Json::array({{{"kind", "slow"}, {"method", "GET"}, {"seconds", 1.2}},
                                            {{"kind", "close"}, {"method", "GET"}}})}});
  Bytes into(bytes.size());
  EXPECT_OK(read("object", into));
  EXPECT_EQ(into, bytes);
}

TEST_F(S3Fault, WhatStallsIsAskedForAgain) {
  const Bytes bytes = pattern(1 * kMiB, 2);
  ASSERT_OK(put("object", bytes));
  open("&patience=3");
  for (const char* kind : {"stall", "stall_in_body"}) {
    server_->fault({{"kind", kind}, {"method", "GET"}, {"seconds", 30}});
    Bytes into(bytes.size());
    EXPECT_OK(read("object", into)) << kind;
    EXPECT_EQ(into, bytes) << kind;
  }
  server_->fault({{"kind", "stall"}, {"method", "PUT"}, {"seconds", 30}});
  EXPECT_EQ(code_of(put("other", pattern(10, 1))), Code::in_doubt);
}

// It would wait for itself, for ever.
TEST_F(S3Fault, AContinuationThatWaitsForTheServerIsAnError) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  server_->fault({{"kind", "slow"}, {"method", "GET"}, {"seconds", 0.2}});
  Bytes into(1000);
  Promise<void> looked;
  const Future<void> seen = looked.future();
  Code code{};
  store_->read("object", 0, slice_of(into)).on_done([&](const Status&) {
    code = code_of(store_->stat("object"));
    looked.complete(Status());
  });
  EXPECT_OK(seen.wait());
  EXPECT_EQ(code, Code::unsupported);
}

// Parts on their way fill the budget: the next one waits for them.
TEST_F(S3Fault, ALargeObjectGoesThroughASmallBudget) {
  store_.reset();
  runtime_ = std::move(
      *RuntimeOwner::make({.engine = "posix", .cpu_threads = 2, .budget_bytes = 40 * kMiB}));
  open();
  const Bytes bytes = pattern(100 * kMiB, 7);
  EXPECT_OK(put("object", bytes));
  EXPECT_EQ(read_all(*store_, "object"), bytes);
}

TEST_F(S3Fault, UploadsInPartsAreTriedAgainCompletedOnceAndAborted) {
  const Bytes bytes = pattern(40 * kMiB, 5);
  server_->control(
      {{"faults",
        Json::array({{{"kind", "close"}, {"method", "PUT"}, {"match", "partNumber=2"}},
                     {{"kind", "status"},
                      {"method", "PUT"},
                      {"match", "partNumber=1"},
                      {"status", 503},
                      {"code", "SlowDown"},
                      {"times", 3}},
                     {{"kind", "close_after"}, {"method", "POST"}, {"match", "uploadId="}}})}});
  EXPECT_OK(put("object", bytes)) << "the lost answer to Complete: it is ours that is there";
  EXPECT_EQ(server_->count("POST", "uploadId="), 1U);
  EXPECT_EQ(read_all(*store_, "object"), bytes);

  server_->fault({{"kind", "late_error"}, {"method", "POST"}});
  EXPECT_EQ(code_of(put("other", bytes)), Code::in_doubt) << "200, and then an error";
  EXPECT_EQ(code_of(store_->stat("other")), Code::not_found);

  server_->control(Json::object());
  {
    auto change = std::move(*store_->begin());
    Bytes part = pattern(16 * kMiB, 6);
    EXPECT_OK(change->resize("abandoned", 40 * kMiB));
    EXPECT_OK(change->write("abandoned", 0, slice_of(part)).wait());
  }
  store_.reset();  // waits for the abort
  EXPECT_EQ(server_->count("DELETE", "uploadId="), server_->count("POST", "uploads="));
}

TEST_F(S3Fault, PartsHaveAChecksumThatTheServerChecks) {
  const Bytes bytes = pattern(18 * kMiB, 5);
  server_->control({{"checksums", true}});
  ASSERT_OK(put("object", bytes));
  EXPECT_EQ(server_->seen()["checked"], 2U);
  EXPECT_EQ(read_all(*store_, "object"), bytes);
}

TEST_F(S3Fault, WhatIsDamagedOnItsWayIsSentAgain) {
  const Bytes bytes = pattern(18 * kMiB, 5);
  server_->fault({{"kind", "wrong_bytes"}, {"method", "PUT"}});
  EXPECT_OK(put("small", pattern(1000, 1)));
  EXPECT_EQ(server_->count("PUT", "small"), 2U);
  server_->fault({{"kind", "wrong_bytes"}, {"method", "PUT"}, {"match", "partNumber=2"}});
  EXPECT_OK(put("large", bytes));
  EXPECT_EQ(server_->count("PUT", "partNumber=2"), 2U);
  EXPECT_EQ(read_all(*store_, "large"), bytes);
}

// The file of a living writer is locked. A copy of it is what a dead one leaves.
TEST_F(S3Fault, UploadsOfADeadWriterAreAborted) {
  const auto begin = [this](const std::string& key) {
    auto change = std::move(*store_->begin());
    Bytes part = pattern(16 * kMiB, 6);
    EXPECT_OK(change->resize(key, 40 * kMiB));
    EXPECT_OK(change->write(key, 0, slice_of(part)).wait());
    while (server_->count("PUT", "partNumber=1") == 0) {
    }
    return change;
  };
  auto change = begin("left over");
  const auto files = [this] {
    std::vector<std::filesystem::path> found;
    for (const auto& each : std::filesystem::directory_iterator(server_->uploads()))
      found.push_back(each.path());
    return found;
  };
  ASSERT_EQ(files().size(), 1U);
  const auto other = [this](bool read_only) {
    StoreOptions how;
    how.read_only = read_only;
    ASSERT_OK(open_s3_store(server_->store(), runtime_->runtime(), how));
  };
  other(false);
  EXPECT_EQ(server_->count("DELETE", "uploadId="), 0U) << "its writer lives";
  std::filesystem::copy_file(files()[0], server_->uploads() / "dead.uploads");
  other(true);
  EXPECT_EQ(server_->count("DELETE", "uploadId="), 0U) << "a reader aborts nothing";
  other(false);
  EXPECT_EQ(server_->count("DELETE", "uploadId="), 1U);
  EXPECT_EQ(files().size(), 1U) << "that of the living one";
  EXPECT_FALSE(change->commit(Durability::durable).wait()) << "it is gone";
  change.reset();
  store_.reset();
  EXPECT_TRUE(files().empty());

  // Nothing is left of what was completed or abandoned; the other bucket's is not ours.
  open();
  ASSERT_OK(put("object", pattern(40 * kMiB, 6)));
  { const auto abandoned = begin("abandoned"); }
  store_.reset();
  EXPECT_TRUE(files().empty());
  std::ofstream(server_->uploads() / "other.uploads") << "stoker-uploads 1 other\nbegun id key\n";
  server_->control(Json::object());
  other(false);
  EXPECT_EQ(server_->log().size(), 1U) << "the look at the bucket alone";
  EXPECT_EQ(files().size(), 1U);
}

// Credentials of a metadata service, with what the tests have set put back.
class S3Metadata : public S3Fault {
 protected:
  void SetUp() override {
    S3Fault::SetUp();
    ASSERT_OK(put("object", pattern(1000, 1)));
    unsetenv("AWS_ACCESS_KEY_ID");
    setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null", 1);
    setenv("AWS_CONFIG_FILE", "/dev/null", 1);
  }
  void TearDown() override {
    setenv("AWS_ACCESS_KEY_ID", "AKIDTEST", 1);
    for (const char* name :
         {"AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_EC2_METADATA_SERVICE_ENDPOINT",
          "AWS_EC2_METADATA_DISABLED", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
          "AWS_CONTAINER_AUTHORIZATION_TOKEN"})
      unsetenv(name);
    S3Fault::TearDown();
  }
};

TEST_F(S3Metadata, AnInstanceNamesThemAndNewOnesBeforeTheyExpire) {
  setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server_->endpoint().c_str(), 1);
  server_->control({{"lifetimes", {200, 3600}}, {"tokens", {"given-1", "given-2"}}});
  open();
  EXPECT_EQ(server_->count("PUT", "/latest/api/token"), 2U) << "the first ones expire soon";
  server_->control({{"tokens", {"given-2"}}});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
  for (const auto& each : server_->log()) EXPECT_NE(each[2], 400) << "none met an expired token";
  EXPECT_EQ(server_->count("PUT", "/latest/api/token"), 0U) << "an hour is long";
}

TEST_F(S3Metadata, WhileTheyAreLookedForOtherRequestsGoOn) {
  setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server_->endpoint().c_str(), 1);
  server_->control({{"lifetimes", {3600}}, {"tokens", {"given-1"}}});
  open();
  server_->control(
      {{"lifetimes", {3600}},
       {"given", 1},
       {"tokens", {"given-2"}},
       {"faults", Json::array({{{"kind", "slow"}, {"match", "/latest/api"}, {"seconds", 0.6}}})}});
  Bytes first(1000), second(1000);
  const auto one = store_->read("object", 0, slice_of(first), {});
  while (server_->count("GET", "/bucket") == 0) std::this_thread::yield();
  const auto other = store_->read("object", 0, slice_of(second), {});
  EXPECT_OK(one.wait());
  EXPECT_OK(other.wait());
  EXPECT_EQ(second, pattern(1000, 1));
  EXPECT_EQ(server_->count("PUT", "/latest/api/token"), 1U) << "once for both";
  const auto log = server_->log();
  ASSERT_GE(log.size(), 3U);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(log[i][2], 400) << "both came before: " << log;
  EXPECT_EQ(log[2][1], "/latest/api/token");
}

TEST_F(S3Metadata, AContainerNamesThem) {
  setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", (server_->endpoint() + "/container").c_str(), 1);
  setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "container-token", 1);
  server_->control({{"lifetimes", {3600}}, {"tokens", {"given-1"}}});
  open();
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
  EXPECT_EQ(server_->count("GET", "/container"), 1U);
}

TEST_F(S3Metadata, NoneIsAnErrorAndTheTokenStaysHere) {
  setenv("AWS_EC2_METADATA_DISABLED", "true", 1);
  setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1.example/container", 1);
  const auto opened = open_s3_store(server_->store(), runtime_->runtime(), {});
  ASSERT_FALSE(opened);
  EXPECT_EQ(code_of(opened), Code::not_found);
  EXPECT_NE(opened.error().message().find("there are no credentials"), std::string::npos);
}

TEST_F(S3Fault, TheBucketMayStandInTheName) {
  std::string where = server_->store("&style=host");
  where.replace(where.find("127.0.0.1"), 9, "localhost");
  store_ = std::move(*open_s3_store(where, runtime_->runtime(), {}));
  server_->control(Json::object());
  ASSERT_OK(put("a b", pattern(1000, 1)));
  EXPECT_EQ(read_all(*store_, "a b"), pattern(1000, 1));
  EXPECT_OK(store_->copy("a b", "c"));
  EXPECT_EQ(store_->list("")->size(), 2U);
  for (const auto& each : server_->log())
    EXPECT_FALSE(each[1].get<std::string>().starts_with("/bucket")) << each;
}

TEST_F(S3Fault, AListingThatNeverEndsIsCutOff) {
  for (int i = 0; i < 5; ++i) ASSERT_OK(put("object" + std::to_string(i), pattern(10, 1)));
  server_->control(
      {{"page", 2}, {"faults", Json::array({{{"kind", "page_loop"}, {"times", 1000}}})}});
  EXPECT_EQ(code_of(store_->list("")), Code::io);
  server_->control({{"page", 2}});
  EXPECT_EQ(store_->list("")->size(), 5U);
}

TEST_F(S3Fault, TheEnvironmentMayNameTheEndpointAndAFileTheCredentials) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  const std::filesystem::path config = server_->uploads().parent_path() / "config";
  std::filesystem::create_directories(config.parent_path());
  std::ofstream(config) << "[profile other]\naws_access_key_id=AKIDTEST\n"
                           "aws_secret_access_key=secret/of+the=test\n";
  unsetenv("AWS_ACCESS_KEY_ID");
  setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null", 1);
  setenv("AWS_CONFIG_FILE", config.c_str(), 1);
  setenv("AWS_PROFILE", "other", 1);
  setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1", 1);
  setenv("AWS_ENDPOINT_URL_S3", server_->endpoint().c_str(), 1);
  const auto opened = open_s3_store("s3://bucket/some/prefix?patience=0", runtime_->runtime(), {});
  setenv("AWS_ENDPOINT_URL_S3", "http://host/path", 1);
  const auto bad = open_s3_store("s3://bucket?patience=0", runtime_->runtime(), {});
  setenv("AWS_ENDPOINT_URL_S3", "http://user:password@host", 1);
  const auto with_user = open_s3_store("s3://bucket?patience=0", runtime_->runtime(), {});
  for (const char* name : {"AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_PROFILE",
                           "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"})
    unsetenv(name);
  setenv("AWS_ACCESS_KEY_ID", "AKIDTEST", 1);
  ASSERT_OK(opened);
  EXPECT_EQ(read_all(**opened, "object"), pattern(1000, 1));
  EXPECT_EQ(code_of(bad), Code::invalid_argument);
  ASSERT_FALSE(with_user);
  EXPECT_EQ(with_user.error().message().find("password"), std::string::npos);
}

class LastLine final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  std::string line;
  int lines = 0;

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    line.assign(message.payload.data(), message.payload.size());
    ++lines;
  }
  void flush_() override {}
};

// A command that waits for a server looks like one that hangs.
TEST_F(S3Fault, AWaitIsToldOf) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  const auto told = std::make_shared<LastLine>();
  log().logger().sinks().push_back(told);
  server_->fault({{"kind", "status"}, {"method", "GET"}, {"status", 503}, {"times", 7}});
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
  log().logger().sinks().pop_back();
  EXPECT_EQ(told->lines, 1);
  EXPECT_THAT(told->line, testing::HasSubstr("trying again, for"));
}

// Silence would make a copy look whole.
TEST_F(S3Fault, NamesThatCannotBeUsedAreToldWhenTheyAreLeftOut) {
  server_->fill("a//", 2);
  server_->fill("folder/", 1);
  ASSERT_OK(put("one", pattern(10, 1)));
  const auto told = std::make_shared<LastLine>();
  log().logger().sinks().push_back(told);
  const auto all = store_->list("");
  const auto level = store_->list_level("a/");
  log().logger().sinks().pop_back();
  ASSERT_OK(all);
  EXPECT_EQ(all->size(), 2U);
  ASSERT_OK(level);
  EXPECT_TRUE(level->objects.empty() && level->folders.empty());
  EXPECT_EQ(told->lines, 2);
  EXPECT_THAT(told->line, testing::HasSubstr("the first is 'a//'"));
}

// Ten pages; of a folder beside them, its name alone.
TEST_F(S3Fault, TenThousandKeysAreListedAndNoneBelowAFolder) {
  server_->fill("many/", 10'000);
  ASSERT_OK(put("one", pattern(10, 1)));
  server_->control(Json::object());
  const auto all = store_->list("");
  ASSERT_OK(all);
  ASSERT_EQ(all->size(), 10'001U);
  EXPECT_EQ(all->front().key, "many/000000");
  EXPECT_EQ((*all)[9'999].key, "many/009999");
  EXPECT_EQ(server_->log().size(), 11U);
  server_->control(Json::object());
  const auto level = store_->list_level("");
  ASSERT_OK(level);
  EXPECT_EQ(level->folders, std::vector<std::string>{"many/"});
  ASSERT_EQ(level->objects.size(), 1U);
  EXPECT_EQ(level->objects[0].key, "one");
  EXPECT_EQ(server_->log().size(), 1U) << "one request, whatever lies below";
  server_->control({{"page", 2}});
  server_->fill("b/", 3);
  server_->fill("c/", 3);
  EXPECT_EQ(store_->list_level("")->folders, (std::vector<std::string>{"b/", "c/", "many/"}));
}

TEST_F(S3Fault, AWrongClockIsPutRight) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  for (const int skew : {7200, -86400}) {
    server_->control({{"skew", skew}});
    EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1)) << skew;
    EXPECT_OK(put("object", pattern(1000, 1)));
  }
}

TEST_F(S3Fault, ExpiredCredentialsAreReadAnewOrSaid) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  server_->control({{"tokens", {"fresh"}}});
  Bytes into(1000);
  const Status expired = read("object", into);
  EXPECT_FALSE(expired);
  EXPECT_NE(expired.error().what.find("ExpiredToken"), std::string::npos);
  EXPECT_EQ(expired.error().message().find("secret/of"), std::string::npos);
  setenv("AWS_SESSION_TOKEN", "fresh", 1);
  EXPECT_OK(read("object", into));
  unsetenv("AWS_SESSION_TOKEN");
}

TEST_F(S3Fault, WhatCannotBeIsSaidInASentence) {
  const auto error_of = [this](const std::string& composition) {
    const auto opened = open_s3_store(composition, runtime_->runtime(), {});
    return opened ? std::string("it opened") : opened.error().message();
  };
  const std::string good = server_->store();
  std::string other = good;
  other.replace(5, 6, "nobody");
  EXPECT_NE(error_of(other).find("there is no bucket 'nobody'"), std::string::npos)
      << error_of(other);
  EXPECT_NE(error_of("s3://bucket?endpoint=http://127.0.0.1:1&patience=0").find("no answer"),
            std::string::npos);
  EXPECT_NE(
      error_of("s3://bucket?endpoint=http://no.such.host.invalid&patience=0").find("no answer"),
      std::string::npos);
  std::string tls = good;
  tls.replace(tls.find("http://"), 7, "https://");
  EXPECT_NE(error_of(tls + "&patience=0").find("no answer"), std::string::npos);
  server_->fault({{"kind", "status"}, {"status", 403}, {"code", "AccessDenied"}, {"times", 100}});
  EXPECT_NE(error_of(good).find("check that the credentials are right"), std::string::npos);
  server_->fault({{"kind", "status"}, {"status", 500}, {"code", "InternalError"}, {"times", 100}});
  EXPECT_NE(error_of(good + "&patience=1").find("given up after"), std::string::npos);
}

// A 301 names another region, a 307 another host of the same name: the server takes the signature
// of neither unless it is made anew.
TEST_F(S3Fault, RedirectsAreSignedAgain) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  server_->fault(
      {{"kind", "status"}, {"status", 301}, {"headers", {{"x-amz-bucket-region", "eu-west-1"}}}});
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
  for (const auto& each : server_->log())
    EXPECT_TRUE(each[2] == 301 || each[5] == "eu-west-1") << each;

  std::string where = server_->store();
  where.replace(where.find("127.0.0.1"), 9, "localhost");
  store_ = std::move(*open_s3_store(where, runtime_->runtime(), {}));
  const std::string port = where.substr(where.find("localhost:") + 9, 6);
  const std::string host = "near.localhost" + port.substr(0, port.find('&'));
  server_->fault({{"kind", "status"},
                  {"status", 307},
                  {"headers", {{"Location", "http://" + host + "/bucket/some/prefix/object"}}}});
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
  for (const auto& each : server_->log()) EXPECT_TRUE(each[2] == 307 || each[4] == host) << each;
}

// Ranges of one read are under way when the first of them is sent elsewhere, or hears of the clock:
// the others were signed before.
TEST_F(S3Fault, AllThatWereSignedBeforeTheRedirectAreSignedAgain) {
  const Bytes bytes = pattern(20 * kMiB, 2);
  ASSERT_OK(put("object", bytes));
  const auto expect_read = [&](const Json& faults) {
    Json all = faults;
    all.push_back({{"kind", "slow"}, {"method", "GET"}, {"times", 3}, {"seconds", 0.3}});
    server_->control({{"faults", all}});
    Bytes into(bytes.size());
    EXPECT_OK(read("object", into)) << faults;
    EXPECT_EQ(into, bytes);
    EXPECT_LE(server_->log().size(), 6U) << "three ranges, each of them twice";
  };
  expect_read({{{"kind", "status"},
                {"method", "GET"},
                {"status", 301},
                {"times", 100},
                {"signed", "us-east-1"},
                {"headers", {{"x-amz-bucket-region", "eu-west-1"}}}}});

  std::string where = server_->store();
  where.replace(where.find("127.0.0.1"), 9, "localhost");
  store_ = std::move(*open_s3_store(where, runtime_->runtime(), {}));
  const std::string port = where.substr(where.find("localhost:") + 9, 6);
  const std::string old = "localhost" + port.substr(0, port.find('&'));
  const std::string host = "near." + old;
  expect_read({{{"kind", "status"},
                {"method", "GET"},
                {"status", 307},
                {"times", 100},
                {"signed", old},
                {"headers", {{"Location", "http://" + host + "/bucket/some/prefix/object"}}}}});
}

TEST_F(S3Fault, AllThatWereSignedByTheWrongClockAreSignedAgain) {
  const Bytes bytes = pattern(20 * kMiB, 2);
  ASSERT_OK(put("object", bytes));
  server_->control(
      {{"skew", 7200},
       {"faults",
        Json::array({{{"kind", "slow"}, {"method", "GET"}, {"times", 3}, {"seconds", 0.3}}})}});
  Bytes into(bytes.size());
  EXPECT_OK(read("object", into));
  EXPECT_EQ(into, bytes);
  EXPECT_LE(server_->log().size(), 6U) << "three ranges, each of them twice";
}

// As Amazon does it where the credential's scope names another region.
TEST_F(S3Fault, TheRegionMayStandInTheErrorAlone) {
  ASSERT_OK(put("object", pattern(1000, 1)));
  server_->fault({{"kind", "status"},
                  {"method", "GET"},
                  {"status", 400},
                  {"body",
                   "<Error><Code>AuthorizationHeaderMalformed</Code><Message>m</Message>"
                   "<Region>eu-west-1</Region></Error>"}});
  EXPECT_EQ(read_all(*store_, "object"), pattern(1000, 1));
  EXPECT_EQ(server_->log().back()[5], "eu-west-1");
}

// The token would go to whoever we are sent to.
TEST_F(S3Fault, RedirectsElsewhereAreNotFollowed) {
  server_->fault({{"kind", "status"},
                  {"status", 307},
                  {"times", 100},
                  {"headers", {{"Location", "http://localhost:1/bucket"}}}});
  Bytes into(10);
  const Status sent = read("object", into);
  EXPECT_FALSE(sent);
  EXPECT_NE(sent.error().what.find("Stoker does not follow"), std::string::npos)
      << sent.error().what;
}

TEST_F(S3Fault, AReadOnlyStoreWritesNothing) {
  open("", true);
  EXPECT_EQ(code_of(store_->begin()), Code::read_only);
  EXPECT_EQ(code_of(store_->copy("a", "b")), Code::read_only);
  EXPECT_FALSE(store_->features().conditional);
  for (const auto& each : server_->log()) EXPECT_EQ(each[0], "GET");
}

}  // namespace
}  // namespace stoker
