// The model against what can be derived: counts of each scheme as functions of one number, u, the
// share of updated bytes that were not updated since the last fold. (On public traces, by hand:
// docs/numbers.md.) The player against queues that can be worked out.
#include "curm/replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "curm/generator.h"
#include "curm/player.h"

namespace stoker::curm {
namespace {

Trace of(std::string_view profile, uint64_t requests = 0) {
  return generate(*find_profile(profile), 1, requests);
}

ReplayResult played(const Trace& trace, std::string_view scheme, Form form,
                    const ReplayOptions& options = {}) {
  auto result = replay(trace, scheme, form, options);
  EXPECT_TRUE(result) << scheme;
  return result ? *result : ReplayResult();
}

double per_byte(uint64_t bytes, const ReplayResult& result) {
  return static_cast<double>(bytes) / static_cast<double>(result.update_bytes);
}
double per_update(uint64_t count, const ReplayResult& result) {
  return static_cast<double>(count) / static_cast<double>(result.updates);
}

TEST(Replay, PublishedCountsAreThoseOfThePapers) {
  for (const std::string_view profile : {"hm", "wdev"}) {
    const Trace trace = of(profile);
    const auto run = [&](std::string_view scheme) {
      return played(trace, scheme, Form::published);
    };
    const auto expect = [&](std::string_view scheme, double reads, double random, double sequential,
                            double bytes, double trips, double messages) {
      const ReplayResult r = run(scheme);
      SCOPED_TRACE(std::string(profile) + " " + std::string(scheme));
      EXPECT_DOUBLE_EQ(per_update(r.counts.reads, r), reads);
      EXPECT_DOUBLE_EQ(per_update(r.counts.random_writes, r), random);
      EXPECT_DOUBLE_EQ(per_update(r.counts.sequential_writes, r), sequential);
      EXPECT_DOUBLE_EQ(per_byte(r.counts.payload_bytes, r), bytes);
      EXPECT_DOUBLE_EQ(per_update(r.counts.round_trips, r), trips);
      EXPECT_DOUBLE_EQ(per_update(r.counts.messages, r), messages);
      EXPECT_EQ(r.counts.flushes, 0U);
      return per_byte(r.counts.background_payload_bytes, r);
    };
    EXPECT_EQ(expect("fo", 4, 4, 0, 8, 2, 8), 0);
    const double fl = expect("fl", 1, 0, 4, 5, 2, 8), pl = expect("pl", 1, 1, 3, 5, 2, 8),
                 vdl = expect("vdl", 0, 0, 4, 4, 1, 8);
    // One log reading and writing of data, three parities each read and written where they were
    // touched, and their logs.
    const double u = vdl / 8;
    EXPECT_GT(u, 0.05);
    EXPECT_LT(u, 1);
    EXPECT_NEAR(fl, 4 + 7 * u, 1e-9);
    EXPECT_NEAR(pl, 3 + 6 * u, 1e-9);
    const ReplayResult parix = run("parix");
    // its logs hold originals too: they are full earlier
    const double w = per_byte(parix.counts.background_payload_bytes, parix) / 12;
    EXPECT_GE(w, u - 1e-9);
    EXPECT_NEAR(per_byte(parix.counts.payload_bytes, parix), 4 + 4 * w, 1e-9);
    EXPECT_LT(per_update(parix.counts.reads, parix), 1);
    EXPECT_DOUBLE_EQ(per_update(parix.counts.round_trips, parix),
                     2 + per_update(parix.counts.reads, parix));
    if (profile == "wdev") continue;
    // The ranges known of public traces, to which this profile was fitted.
    EXPECT_THAT(fl, testing::AllOf(testing::Ge(8.6), testing::Le(10.3)));
    EXPECT_THAT(pl, testing::AllOf(testing::Ge(6.9), testing::Le(8.5)));
    EXPECT_THAT(12 * w, testing::AllOf(testing::Ge(8.4), testing::Le(10.8)));
    EXPECT_THAT(vdl, testing::AllOf(testing::Ge(5.3), testing::Le(7.2)));
  }
}

TEST(Replay, SafeFormsFlushEveryCopyAndFrameIsCountedApart) {
  const Trace trace = of("hm", 3000);
  for (const std::string_view scheme : kSchemes) {
    const ReplayResult safe = played(trace, scheme, Form::safe);
    SCOPED_TRACE(scheme);
    EXPECT_DOUBLE_EQ(per_update(safe.counts.flushes, safe), 4);
    EXPECT_EQ(safe.counts.framing_bytes % kRecordHeaderBytes, 0U);
    EXPECT_EQ(safe.counts.framing_bytes, 4 * safe.updates * kRecordHeaderBytes);
    EXPECT_EQ(safe.update_bytes % 4096, 0U);
    EXPECT_GE(safe.space_peak_bytes, safe.space_base_bytes);
    EXPECT_GT(safe.recovery_seconds, 0);
    EXPECT_LE(safe.drained_updates_per_second, safe.updates_per_second);
  }
}

// As published the writer has the newest bytes in memory still; the safe form reads them out of D's
// log, as the coded store does: one byte more for each that a fold brings in, which is as many as
// it writes to data chunks.
TEST(Replay, ASafeFoldReadsTheLog) {
  Trace trace;
  trace.name = "blocks";
  trace.objects = {"0"};
  trace.requests.push_back({0, 0, true, 0, 4096});
  const Counts one = played(trace, "vdl", Form::safe).counts;
  EXPECT_EQ(one.background_reads, 1 + 1 + 3U) << "the log, the base, the parities";
  EXPECT_EQ(one.background_writes, 3 + 4 + 4U) << "stages, commits, blocks";
  EXPECT_EQ(one.background_framing_bytes, (3 + 4) * kRecordHeaderBytes + 4 * kChunkHeaderBytes)
      << "and marks";
  for (uint64_t i = 1; i < 10; ++i) trace.requests.push_back({i, 0, true, i * 8192, 4096});
  const ReplayResult published = played(trace, "vdl", Form::published),
                     safe = played(trace, "vdl", Form::safe);
  EXPECT_DOUBLE_EQ(per_byte(published.counts.background_payload_bytes, published), 2 + 2 * 3);
  // and stages of the parities
  EXPECT_DOUBLE_EQ(per_byte(safe.counts.background_payload_bytes, safe), 1 + 2 + 3 * 3);
  EXPECT_DOUBLE_EQ(per_update(published.counts.background_reads, published), 1 + 3);
  // all that is wanted of a log in one request
  EXPECT_EQ(safe.counts.background_reads, 10 * (1 + 3) + 1U);
}

TEST(Replay, CurmFoldsLessThanVdl) {
  const Trace trace = of("hm");
  const ReplayResult vdl = played(trace, "vdl", Form::safe),
                     curm = played(trace, "curm", Form::safe);
  EXPECT_LT(curm.counts.background_payload_bytes, vdl.counts.background_payload_bytes);
  EXPECT_EQ(curm.counts.payload_bytes, vdl.counts.payload_bytes);
}

TEST(Replay, AWideWriteIsWrittenThrough) {
  Trace trace;
  trace.name = "wide";
  trace.objects = {"0"};
  const uint64_t chunk = 64 << 10;
  for (uint64_t i = 0; i < 10; ++i)
    trace.requests.push_back({i, 0, true, i * 6 * chunk, 6 * chunk});
  ReplayOptions options;
  options.chunk_bytes = chunk;
  const ReplayResult vdl = played(trace, "vdl", Form::safe, options),
                     curm = played(trace, "curm", Form::safe, options);
  EXPECT_DOUBLE_EQ(per_byte(vdl.counts.payload_bytes, vdl), 4);
  // staged, and written in place: data and parity
  EXPECT_DOUBLE_EQ(per_byte(curm.counts.payload_bytes, curm), 2 * 9.0 / 6);
  EXPECT_EQ(curm.counts.reads, 0U);
  EXPECT_EQ(curm.counts.background_payload_bytes, 0U);
}

TEST(Replay, RefusesWhatCannotBe) {
  const Trace trace = of("wdev", 10);
  ReplayOptions few;
  few.nodes = 8;
  EXPECT_THAT(replay(trace, "vdl", Form::safe, few).error().what,
              testing::HasSubstr("needs at least as many nodes as chunks, and there are 8"));
  EXPECT_THAT(replay(trace, "raid", Form::safe, {}).error().what,
              testing::HasSubstr("there is no scheme `raid`"));
}

// A device in round numbers: 100 ns before each byte, a byte a ns, 10 ns a flush; messages take
// 1000 ns and no bandwidth to speak of.
constexpr Device kPlain{
    "plain", 1, 100, 100, 20, 10, 1'000'000'000, 1'000'000'000, 1'000'000'000'000'000, 1000};

Play exchange(NodeId to, std::vector<Play::Step> steps) {
  Play play;
  play.errands.push_back({to, 0, 0, std::move(steps)});
  return play;
}

Play acknowledge() {
  Play play;
  play.kind = Round::Kind::acknowledge;
  return play;
}

// What is wanted of a log is read in its order, whoever asks: a record far behind the last one is a
// seek, a small gap is read along.
TEST(Model, PicksRecordsAlikeInFoldsAndRebuilds) {
  Model model(kPlain);  // jumps in 100 ns, and reads 100 bytes in that time
  const auto value = [](uint64_t bytes) {
    return Record{Record::Kind::value, 1, 1, {0, 0}, {{0, Value::sized(bytes)}}};
  };
  Round appends;
  Errand& errand = appends.to(0);
  std::vector<PlaceSlot> places;
  for (const uint64_t bytes : {36, 36, 1000, 36}) places.push_back(errand.append(value(bytes)));
  ASSERT_TRUE(model.run(appends));
  const auto part = [&](size_t i) { return Step::Part{true, 0, 36, *places[i]}; };
  for (const bool background : {true, false}) {
    static_cast<void>(model.take());
    Round reads;
    reads.background = background;
    Errand& both = reads.to(0);
    const Slot first = both.gather({0, 0}, {part(3), part(0)}),
               second = both.gather({0, 0}, {part(1), part(0)});
    ASSERT_TRUE(model.run(reads));
    EXPECT_EQ(first->size(), 72U);
    EXPECT_EQ(second->size(), 72U);
    const std::vector<Play> plays = model.take();
    ASSERT_EQ(plays[0].errands[0].steps.size(), 1U) << "all in one";
    EXPECT_EQ(plays[0].errands[0].steps[0].seeks, 2U);
    EXPECT_EQ(plays[0].errands[0].steps[0].bytes, (100 + 36) + 36U)
        << "the second follows the first closely";
    model.count_no_more();  // as for a rebuild: nothing else is different
  }
  EXPECT_EQ(model.counts().background_reads, 2U);
  EXPECT_EQ(model.counts().background_payload_bytes, 4 * 36U);
  EXPECT_EQ(model.counts().reads, 0U);
}

uint64_t time_of(int clients, std::vector<Player::Job> jobs) {
  Player player(kPlain, 2, clients);
  size_t at = 0;
  return player.play_updates([&](Player::Next& next) {
    if (at == jobs.size()) return false;
    next.update = jobs[at++];
    return true;
  });
}

TEST(Player, TakesTheTimeThatCanBeWorkedOut) {
  const Play::Step read{Play::Kind::read, 1, 0, 50, 1, 0}, next{Play::Kind::read, 1, 50, 50, 1, 0},
      append{Play::Kind::append, 0, 0, 50, 1, 0}, flush{Play::Kind::flush, 0, 0, 0, 0, 0};
  // there, seek and read, back
  EXPECT_EQ(time_of(1, {{exchange(0, {read}), acknowledge()}}), 2150U);
  // the second where the first ended
  EXPECT_EQ(time_of(1, {{exchange(0, {read, next}), acknowledge()}}), 2220U);
  EXPECT_EQ(time_of(1, {{exchange(0, {append, flush}), acknowledge()}}), 2160U);
  // one client: one after the other
  EXPECT_EQ(
      time_of(1, {{exchange(0, {read}), acknowledge()}, {exchange(0, {read}), acknowledge()}}),
      4300U);
  // two nodes: at once
  EXPECT_EQ(
      time_of(2, {{exchange(0, {read}), acknowledge()}, {exchange(1, {read}), acknowledge()}}),
      2150U);
  // one disk: in turn
  EXPECT_EQ(
      time_of(2, {{exchange(0, {read}), acknowledge()}, {exchange(0, {read}), acknowledge()}}),
      2300U);
  // Three appends and flushes: the first alone, the other two together (seek 100, then 20 where the
  // log ended).
  const Player::Job logs = {exchange(0, {append, flush}), acknowledge()};
  EXPECT_EQ(time_of(3, {logs, logs, logs}), 1000 + (100 + 50) + (20 + 100) + 10 + 10 + 1000U);
}

}  // namespace
}  // namespace stoker::curm
