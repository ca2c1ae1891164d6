#include "curm/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "curm/generator.h"

namespace stoker::curm {
namespace {

using testing::HasSubstr;

TEST(Trace, ReadsMsrCambridgeLines) {
  const auto trace = parse_trace(
      "t", "100,hm,1,Write,8192,4096,5\n200,hm,1,Read,512,1024,7\r\n\n350,hm,0,Write,0,1,9", false);
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_EQ(trace->format, "msr");
  EXPECT_EQ(trace->objects, (std::vector<std::string>{"hm.1", "hm.0"}));
  ASSERT_EQ(trace->requests.size(), 3U);
  const Request& first = trace->requests[0];
  EXPECT_TRUE(first.write && first.time_us == 0 && first.object == 0 && first.offset == 8192 &&
              first.bytes == 4096);
  EXPECT_FALSE(trace->requests[1].write);
  EXPECT_EQ(trace->requests[2].time_us, 25U);
  EXPECT_EQ(trace->requests[2].object, 1U);
}

TEST(Trace, ReadsCloudPhysicsLines) {
  const auto trace = parse_trace(
      "t", "version,time,op,size,lbn\n1,10,2a,6656,100\n1,12,28,512,7\n1,12,8A,512,7\n", false);
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_EQ(trace->format, "cloudphysics");
  ASSERT_EQ(trace->requests.size(), 3U);
  EXPECT_TRUE(trace->requests[0].write && trace->requests[0].offset == 51200 &&
              trace->requests[0].bytes == 6656);
  EXPECT_FALSE(trace->requests[1].write);
  EXPECT_EQ(trace->requests[1].time_us, 2'000'000U);
  EXPECT_TRUE(trace->requests[2].write);
}

// A flush, UNMAP, INQUIRY: a trace of a real disk has them, and they are no reason to refuse it.
TEST(Trace, LeavesOutWhatNeitherReadsNorWrites) {
  const auto trace = parse_trace("t",
                                 "version,time,op,size,lbn\n1,10,35,0,0\n1,10,2a,512,8\n1,11,42,24,"
                                 "0\n1,11,12,36,-\n1,12,89,512,8\n",
                                 false);
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_EQ(trace->others, 3U);
  EXPECT_EQ(trace->malformed, 0U);
  ASSERT_EQ(trace->requests.size(), 2U);
  EXPECT_TRUE(trace->requests[1].write) << "COMPARE AND WRITE";
  EXPECT_THAT(parse_trace("t", "version,time,op,size,lbn\n1,10,35,0,0\n", false).error().what,
              HasSubstr("holds no request"));
}

TEST(Trace, ReadsNfsRecords) {
  const auto trace =
      parse_trace("t",
                  "1034524800.000100 31.03f2 30.0801 U C3 a1 7 write fh aa01 off 4000 count 2000 "
                  "stable U con = 1 len = 2\n"
                  "1034524800.000300 30.0801 31.03f2 U R3 a1 7 write OK ftype 1 count 2000\n"
                  "1034524800.000500 31.03f2 30.0801 U C3 a2 1 getattr fh aa01\n"
                  "1034524800.001100 31.03f2 30.0801 T C2 a3 6 read fh bb offset 10 count 1f\n",
                  false);
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_EQ(trace->format, "nfs");
  EXPECT_EQ(trace->objects, (std::vector<std::string>{"aa01", "bb"}));
  EXPECT_EQ(trace->others, 1U) << "the getattr; answers are not operations";
  ASSERT_EQ(trace->requests.size(), 2U);
  EXPECT_TRUE(trace->requests[0].write && trace->requests[0].offset == 0x4000 &&
              trace->requests[0].bytes == 0x2000);
  EXPECT_TRUE(!trace->requests[1].write && trace->requests[1].offset == 0x10 &&
              trace->requests[1].bytes == 0x1f && trace->requests[1].object == 1);
  EXPECT_NEAR(static_cast<double>(trace->requests[1].time_us), 1000, 2);
}

// Files are named where they are made: by the call, and the handle in its answer.
TEST(Trace, ReadsWhichFilesAreMadeAndRemoved) {
  const auto trace =
      parse_trace("t",
                  "1.1 c s U C3 a1 3 lookup fh root name \"logs\" con = 1 len = 2\n"
                  "1.1 s c U R3 a1 3 lookup OK fh d1 ftype 2\n"
                  "1.2 c s U C3 a2 8 create fh d1 name \"run.log\" how U size 1f con = 1 len = 2\n"
                  "1.2 other s U C3 a2 8 create fh d1 name \"refused\" how U\n"
                  "1.2 s other U R3 a2 8 create 2\n"
                  "1.3 s c U R3 a2 8 create OK fh f1 ftype 1\n"
                  "1.4 c s U C3 a3 7 write fh f1 off 0 count 1000\n"
                  "1.5 c s U C2 a4 4 create fh d9 fn \"x\"\n"
                  "1.5 s c U R2 a4 4 create OK fh f2\n"
                  "1.5 s c U R2 a4 4 create OK fh f2\n"
                  "1.6 c s U C3 a5 c remove fh d1 name \"run.log\"\n"
                  "1.6 s c U R3 a5 c remove OK\n"
                  "1.7 c s U C3 a6 c remove fh d1 name \"never seen\"\n"
                  "1.7 s c U R3 a6 c remove OK\n",
                  false);
  ASSERT_TRUE(trace) << trace.error().message();
  EXPECT_EQ(trace->objects, (std::vector<std::string>{"f1", "f2"}));
  ASSERT_EQ(trace->events.size(), 3U);
  const FileEvent& log = trace->events[0];
  EXPECT_TRUE(log.made && log.before == 0 && log.object == 0 && log.bytes == 0x1f);
  EXPECT_EQ(log.path, "logs/run.log");
  EXPECT_EQ(trace->events[1].path, "x") << "of a folder that was never looked up";
  EXPECT_NE(trace->events[1].folder, log.folder);
  EXPECT_TRUE(!trace->events[2].made && trace->events[2].object == 0 &&
              trace->events[2].before == 1 && trace->events[2].folder == log.folder);
  EXPECT_EQ(trace->others, 0U);
}

TEST(Trace, MalformedLinesAreCountedAndNamed) {
  const std::string text =
      "100,hm,1,Write,8192,4096,5\n"
      "100,hm,1,Write,8192,4096\n"
      "100,hm,1,Erase,8192,4096,5\n"
      "x,hm,1,Write,8192,4096,5\n"
      "100,hm,1,Write,-1,4096,5\n"
      "100,hm,1,Write,0,0,5\n"
      "100,hm,1,Write,0,99999999999,5\n"
      "100,hm,1,Write,99999999999999999,1,5\n";
  const auto strict = parse_trace("name.csv", text, false);
  ASSERT_FALSE(strict);
  EXPECT_EQ(strict.error().code, Code::invalid_argument);
  EXPECT_THAT(strict.error().what, HasSubstr("name.csv: 7 malformed lines"));
  EXPECT_THAT(strict.error().what, HasSubstr("line 2: it has 6 fields, not 7"));
  EXPECT_THAT(strict.error().what, HasSubstr("--lenient"));
  const auto lenient = parse_trace("name.csv", text, true);
  ASSERT_TRUE(lenient);
  EXPECT_EQ(lenient->malformed, 7U);
  EXPECT_EQ(lenient->requests.size(), 1U);
  ASSERT_EQ(lenient->complaints.size(), 5U);
  EXPECT_EQ(lenient->complaints[1], "line 3: `Erase` is neither Read nor Write");
  EXPECT_EQ(lenient->complaints[4], "line 6: the size is 0");

  EXPECT_THAT(parse_trace("t", "version,time,op,size,lbn\n1,10,77,0,0\n", false).error().what,
              HasSubstr("there is no operation `77` of a disk"));
  EXPECT_THAT(parse_trace("t", "version,time,op,size,lbn\n1,10,2a,512,x\n", false).error().what,
              HasSubstr("the block is not a number"));
  EXPECT_THAT(parse_trace("t", "1.5 a b U C3 1 7 write off 0 count 1\n", false).error().what,
              HasSubstr("names no file handle"));
  EXPECT_THAT(parse_trace("t", "1.5 a b U X3 1 7 write fh 1 off 0 count 1\n", false).error().what,
              HasSubstr("neither a call nor an answer"));
}

TEST(Trace, AFileWithoutRequestsIsAnError) {
  EXPECT_THAT(parse_trace("t", "", false).error().what, HasSubstr("holds no request"));
  EXPECT_THAT(parse_trace("t", "what is this\n", true).error().what, HasSubstr("holds no request"));
  EXPECT_EQ(read_trace("no/such/file", false).error().code, Code::not_found);
  EXPECT_THAT(read_trace(".", false).error().what, HasSubstr("is a folder"));
}

TEST(Generator, GivesTheSameTraceForTheSameSeedAndReadsItsOwnText) {
  const Trace one = generate(*find_profile("hm"), 7), again = generate(*find_profile("hm"), 7),
              other = generate(*find_profile("hm"), 8);
  EXPECT_EQ(msr_text(one), msr_text(again));
  EXPECT_NE(msr_text(one), msr_text(other));
  const auto read = parse_trace("x", msr_text(one), false);
  ASSERT_TRUE(read) << read.error().message();
  ASSERT_EQ(read->requests.size(), one.requests.size());
  EXPECT_EQ(read->requests.back().offset, one.requests.back().offset);
  EXPECT_EQ(find_profile("none"), nullptr);
}

TEST(Generator, FilesAreTheSameForTheSameSeedAndReadFromTheirText) {
  const Trace one = generate_files(7, 3000), other = generate_files(8, 3000);
  EXPECT_EQ(nfs_text(one), nfs_text(generate_files(7, 3000)));
  EXPECT_NE(nfs_text(one), nfs_text(other));
  const auto read = parse_trace("x", nfs_text(one), false);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->format, "nfs");
  ASSERT_EQ(read->requests.size(), one.requests.size());
  ASSERT_EQ(read->events.size(), one.events.size());
  EXPECT_GT(std::count_if(one.events.begin(), one.events.end(),
                          [](const FileEvent& event) { return !event.made; }),
            20);
  for (size_t i = 0; i < one.events.size(); ++i) {
    const FileEvent &here = one.events[i], &there = read->events[i];
    EXPECT_EQ(there.path, here.path);
    EXPECT_EQ(read->objects[there.object], one.objects[here.object]);
    EXPECT_TRUE(there.made == here.made && there.before == here.before &&
                there.bytes == here.bytes);
  }
  for (size_t i = 0; i < one.requests.size(); ++i) {
    const Request &here = one.requests[i], &there = read->requests[i];
    EXPECT_EQ(read->objects[there.object], one.objects[here.object]);
    EXPECT_TRUE(there.write == here.write && there.offset == here.offset &&
                there.bytes == here.bytes);
  }
}

// What it was fitted to: of writes, the share that goes somewhere new within 64 MiB of writes, by
// bytes; of all, the blocks' mean rewrites.
TEST(Generator, IsFittedToTheStatistics) {
  struct Fit {
    std::string_view name;
    double writes, median_kib, fresh_64, rewritten;
  };
  for (const Fit& fit : {Fit{"rsrch", 0.997, 4, 0.73, 1.5},
                         {"hm", 1, 8, 0.72, 3.1},
                         {"wdev", 0.984, 4, 0.095, 10.5},
                         {"mds", 1, 4, 0.29, 3.5},
                         {"vm", 0.587, 40, 0.877, 3.1}}) {
    const Trace trace = generate(*find_profile(fit.name), 1);
    std::vector<uint64_t> sizes;
    std::set<uint64_t> window, ever;
    uint64_t fresh = 0, blocks = 0, logged = 0;
    for (const Request& request : trace.requests) {
      if (!request.write) continue;
      sizes.push_back(request.bytes);
      for (uint64_t block = request.offset / 4096;
           block <= (request.offset + request.bytes - 1) / 4096; ++block) {
        fresh += window.insert(block).second ? 1 : 0;
        ever.insert(block);
        ++blocks;
      }
      if ((logged += request.bytes) >= 64 << 20) {
        logged = 0;
        window.clear();
      }
    }
    std::sort(sizes.begin(), sizes.end());
    EXPECT_NEAR(static_cast<double>(sizes.size()) / static_cast<double>(trace.requests.size()),
                fit.writes, 0.02)
        << fit.name;
    EXPECT_NEAR(static_cast<double>(sizes[sizes.size() / 2]) / 1024, fit.median_kib,
                fit.median_kib * 0.6)
        << fit.name;
    EXPECT_NEAR(static_cast<double>(fresh) / static_cast<double>(blocks), fit.fresh_64, 0.1)
        << fit.name;
    EXPECT_NEAR(static_cast<double>(blocks) / static_cast<double>(ever.size()), fit.rewritten,
                fit.rewritten * 0.25)
        << fit.name;
  }
}

}  // namespace
}  // namespace stoker::curm
