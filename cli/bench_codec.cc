// stoker bench codec: our erasure codes beside plain ISA-L calls on the same memory, and beside a
// memory copy, taking turns.
//
// All memory is far larger than the caches and was touched before, so every run finds its data
// cold. A row's GB/s count the data bytes of the operation: encode and decode the k chunks read,
// delta the new bytes of the one chunk that changes.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "command.h"
#include "isal.h"
#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/codec/erasure.h"

namespace stoker::cli {
namespace {

using codec::ErasureCode;
using codec::kCrcBlock;
using codec::Source;
using codec::Target;

struct BenchArguments {
  std::string code = "6+3";
  std::string chunk = "1MiB";
  std::string memory = "900MiB";
  int repetitions = 7;
  bool json = false;
};

// A stripe after the other in one arena, k + m chunks each, with room for the CRCs of all blocks.
class Stripes {
 public:
  Stripes(const ErasureCode& code, size_t chunk_bytes, Slice memory)
      : code_(code),
        chunk_bytes_(chunk_bytes),
        memory_(memory),
        count_(memory.size / (chunk_bytes * chunks())),
        crcs_(chunks() * codec::crc_blocks(chunk_bytes)) {
    std::mt19937_64 random(1);
    for (size_t at = 0; at + sizeof(uint64_t) <= memory.size; at += sizeof(uint64_t)) {
      const uint64_t value = random();
      std::memcpy(memory.data + at, &value, sizeof(value));
    }
  }

  const ErasureCode& code() const { return code_; }
  size_t count() const { return count_; }
  size_t chunks() const { return static_cast<size_t>(code_.k()) + static_cast<size_t>(code_.m()); }
  size_t chunk_bytes() const { return chunk_bytes_; }
  // All chunks of a stripe.
  std::vector<std::byte*> all(size_t stripe) const {
    std::vector<std::byte*> result;
    for (size_t i = 0; i < chunks(); ++i) result.push_back(chunk(stripe, i));
    return result;
  }
  std::byte* chunk(size_t stripe, size_t i) const {
    return memory_.data + (stripe * chunks() + i) * chunk_bytes_;
  }

  // The CRCs are of one stripe: nobody reads them, and writing them is part of the work.
  std::span<uint32_t> crcs(size_t i) {
    return std::span(crcs_).subspan(i * codec::crc_blocks(chunk_bytes_),
                                    codec::crc_blocks(chunk_bytes_));
  }
  Source source(size_t stripe, size_t i, bool crc) {
    return {{chunk(stripe, i), chunk_bytes_}, crc ? crcs(i) : std::span<uint32_t>()};
  }
  Target target(size_t stripe, size_t i, bool crc) {
    return {{chunk(stripe, i), chunk_bytes_}, crc ? crcs(i) : std::span<uint32_t>()};
  }
  // The pass of its own that a caller of plain ISA-L needs.
  void sum(size_t stripe, size_t i) {
    for (size_t at = 0; at < chunk_bytes_; at += kCrcBlock)
      crcs(i)[at / kCrcBlock] =
          crc32c(chunk(stripe, i) + at, std::min(kCrcBlock, chunk_bytes_ - at));
  }

 private:
  const ErasureCode& code_;
  const size_t chunk_bytes_;
  const Slice memory_;
  const size_t count_;
  std::vector<uint32_t> crcs_;
};

// One thing that is timed: works on one stripe. Whoever it is, it goes over all stripes in the same
// order.
struct Contender {
  const char* key;
  std::function<Status(size_t stripe)> work;
  std::vector<double> gbps = {};
};

class Bench {
 public:
  Bench(const BenchArguments& arguments, Stripes& stripes)
      : arguments_(arguments),
        stripes_(stripes),
        code_(stripes.code()),
        isal_(code_.k(), code_.m()) {}

  // Ours and ISA-L's give the same bytes, and our CRCs are those of a second pass: else there is
  // nothing to compare.
  Status agree() {
    STOKER_TRY(encode(0, true));
    const std::vector<std::byte> coded = stripe_bytes();
    const std::vector<uint32_t> fused = all_crcs();
    isal_encode(0);
    STOKER_TRY(sum(0, 0, stripes_.chunks()));
    bool same = stripe_bytes() == coded && all_crcs() == fused;
    const size_t lost_bytes = isal_.lost() * stripes_.chunk_bytes();
    std::memset(stripes_.chunk(0, 0), 0, lost_bytes);
    STOKER_TRY(decode(0, false));
    same = same && stripe_bytes() == coded;
    std::memset(stripes_.chunk(0, 0), 0, lost_bytes);
    isal_decode(0);
    same = same && stripe_bytes() == coded;
    // The same difference twice is none.
    STOKER_TRY(delta(0, false));
    same = same && stripe_bytes() != coded;
    isal_delta(0);
    if (same && stripe_bytes() == coded) return {};
    return fail(
        Code::mismatch,
        "our results differ from those of plain ISA-L calls: this build is broken, run the tests");
  }

  // What encoding with checksums cannot pass while one follows the other: both alone, on one block
  // of each chunk, which stays near.
  Json near_cache() {
    std::vector<double> multiplied;
    std::vector<double> summed;
    const size_t bytes = std::min(kCrcBlock, stripes_.chunk_bytes());
    const auto chunks = stripes_.all(0);
    for (int round = 0; round <= arguments_.repetitions; ++round) {
      const double encode_seconds = seconds_of([&] { isal_.encode(chunks, bytes); });
      const double sum_seconds = seconds_of([&] {
        for (size_t i = 0; i < chunks.size(); ++i) stripes_.crcs(i)[0] = crc32c(chunks[i], bytes);
      });
      if (round == 0) continue;
      multiplied.push_back(static_cast<double>(k() * bytes) / encode_seconds / 1e9);
      summed.push_back(static_cast<double>(k() * bytes) / sum_seconds / 1e9);
    }
    const double isal = median(multiplied);
    const double crc = median(summed);
    return {{"isal_encode_gbps", isal},
            {"crc_of_all_chunks_gbps", crc},
            {"one_after_the_other_gbps", 1 / (1 / isal + 1 / crc)}};
  }

  Result<Json> encode_row() {
    return compare("encode", "data and parity", k(),
                   {{"ours_gbps", [this](size_t s) { return encode(s, false); }},
                    {"ours_with_crc_gbps", [this](size_t s) { return encode(s, true); }},
                    {"isal_gbps", [this](size_t s) { return isal_encode(s), Status(); }},
                    {"isal_then_crc_gbps",
                     [this](size_t s) { return isal_encode(s), sum(s, 0, stripes_.chunks()); }}});
  }
  Result<Json> delta_row() {
    return compare("delta", "new data and parity", 1,
                   {{"ours_gbps", [this](size_t s) { return delta(s, false); }},
                    {"ours_with_crc_gbps", [this](size_t s) { return delta(s, true); }},
                    {"isal_gbps", [this](size_t s) { return isal_delta(s), Status(); }},
                    {"isal_then_crc_gbps", [this](size_t s) {
                       isal_delta(s);
                       stripes_.sum(s, (changed(s) + 1) % k());
                       return sum(s, k(), stripes_.chunks());
                     }}});
  }
  Result<Json> decode_row() {
    const size_t lost = isal_.lost();
    auto row = compare("decode", "rebuilt chunks", k(),
                       {{"ours_gbps", [this](size_t s) { return decode(s, false); }},
                        {"ours_with_crc_gbps", [this](size_t s) { return decode(s, true); }},
                        {"isal_gbps", [this](size_t s) { return isal_decode(s), Status(); }},
                        {"isal_then_crc_gbps",
                         [this, lost](size_t s) { return isal_decode(s), sum(s, 0, lost); }}});
    if (row) (*row)["lost_chunks"] = lost;
    return row;
  }

 private:
  // Of one call, out of many.
  template <typename Work>
  static double seconds_of(Work&& work) {
    constexpr int calls = 2000;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
  }

  size_t k() const { return static_cast<size_t>(code_.k()); }
  // Another chunk of a stripe changes each time; its neighbour in the stripe stands for the new
  // bytes.
  size_t changed(size_t stripe) const { return stripe % k(); }
  // With one data chunk only, the next stripe's.
  const std::byte* newer(size_t stripe) const {
    return k() > 1 ? stripes_.chunk(stripe, (changed(stripe) + 1) % k())
                   : stripes_.chunk((stripe + 1) % stripes_.count(), 0);
  }

  std::vector<std::byte> stripe_bytes() const {
    return {stripes_.chunk(0, 0), stripes_.chunk(0, stripes_.chunks())};
  }
  std::vector<uint32_t> all_crcs() {
    std::vector<uint32_t> result;
    for (size_t i = 0; i < stripes_.chunks(); ++i)
      result.insert(result.end(), stripes_.crcs(i).begin(), stripes_.crcs(i).end());
    return result;
  }
  void isal_encode(size_t stripe) { isal_.encode(stripes_.all(stripe), stripes_.chunk_bytes()); }
  void isal_decode(size_t stripe) { isal_.decode(stripes_.all(stripe), stripes_.chunk_bytes()); }
  void isal_delta(size_t stripe) {
    isal_.delta(stripes_.all(stripe), stripes_.chunk_bytes(), changed(stripe), newer(stripe));
  }

  Status sum(size_t stripe, size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) stripes_.sum(stripe, i);
    return {};
  }
  Status encode(size_t stripe, bool crc) {
    std::vector<Source> data;
    std::vector<Target> parity;
    for (size_t i = 0; i < k(); ++i) data.push_back(stripes_.source(stripe, i, crc));
    for (size_t i = k(); i < stripes_.chunks(); ++i)
      parity.push_back(stripes_.target(stripe, i, crc));
    return code_.encode(data, parity);
  }
  Status decode(size_t stripe, bool crc) {
    std::vector<Source> present(stripes_.chunks());
    std::vector<Target> wanted(stripes_.chunks());
    const size_t lost = isal_.lost();
    for (size_t i = 0; i < lost; ++i) wanted[i] = stripes_.target(stripe, i, crc);
    for (size_t i = lost; i < stripes_.chunks(); ++i)
      present[i] = stripes_.source(stripe, i, false);
    return code_.decode(present, wanted);
  }
  Status delta(size_t stripe, bool crc) {
    std::vector<Target> parity;
    for (size_t i = k(); i < stripes_.chunks(); ++i)
      parity.push_back(stripes_.target(stripe, i, crc));
    const Source now{{newer(stripe), stripes_.chunk_bytes()},
                     crc ? stripes_.crcs((changed(stripe) + 1) % k()) : std::span<uint32_t>()};
    return code_.delta(static_cast<int>(changed(stripe)),
                       {stripes_.chunk(stripe, changed(stripe)), stripes_.chunk_bytes()}, now,
                       parity);
  }
  Status copy(size_t stripe, size_t chunks) {
    std::memcpy(stripes_.chunk((stripe + stripes_.count() / 2) % stripes_.count(), 0),
                stripes_.chunk(stripe, 0), chunks * stripes_.chunk_bytes());
    return {};
  }

  // All contenders and the copy, one after the other, the first round for warming up only; each
  // round another one begins.
  Result<Json> compare(const char* op, const char* crc_of, size_t data_chunks,
                       std::vector<Contender> contenders) {
    contenders.push_back(
        {"copy_gbps", [this, data_chunks](size_t s) { return copy(s, data_chunks); }});
    for (int round = 0; round <= arguments_.repetitions; ++round) {
      for (size_t turn = 0; turn < contenders.size(); ++turn) {
        Contender& contender = contenders[(turn + static_cast<size_t>(round)) % contenders.size()];
        const auto start = std::chrono::steady_clock::now();
        for (size_t stripe = 0; stripe < stripes_.count(); ++stripe)
          STOKER_TRY(contender.work(stripe));
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        if (round > 0)
          contender.gbps.push_back(
              static_cast<double>(stripes_.count() * data_chunks * stripes_.chunk_bytes()) /
              took.count() / 1e9);
      }
    }
    Json row = {{"op", op},
                {"code", arguments_.code},
                {"chunk_bytes", stripes_.chunk_bytes()},
                {"crc_of", crc_of}};
    for (const Contender& contender : contenders) row[contender.key] = median(contender.gbps);
    row["ratio_to_isal"] = row["ours_gbps"].get<double>() / row["isal_gbps"].get<double>();
    row["ratio_with_crc_to_isal"] =
        row["ours_with_crc_gbps"].get<double>() / row["isal_gbps"].get<double>();
    row["repetitions"] = arguments_.repetitions;
    for (const Contender& contender : contenders)
      row[contender.key + std::string("_all")] = contender.gbps;
    return row;
  }

  const BenchArguments& arguments_;
  Stripes& stripes_;
  const ErasureCode& code_;
  PlainIsal isal_;
};

Result<Json> run_bench(const BenchArguments& arguments) {
  STOKER_ASSIGN(const ErasureCode code, parse_code(arguments.code));
  STOKER_ASSIGN(const uint64_t chunk_bytes, parse_bytes(arguments.chunk));
  STOKER_ASSIGN(const uint64_t bytes, parse_bytes(arguments.memory));
  const uint64_t stripe_bytes = chunk_bytes * static_cast<uint64_t>(code.k() + code.m());
  if (chunk_bytes < 64 || chunk_bytes > kGiB || bytes / 2 < stripe_bytes) {
    return fail(Code::invalid_argument,
                "chunks of {} in {} of memory: a chunk has 64 bytes to 1 GiB, and there must be "
                "room for two stripes",
                human_bytes(chunk_bytes), human_bytes(bytes));
  }
  // Touching more than there is would end this process, or another.
  const uint64_t machine_bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                                 static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  if (bytes > machine_bytes / 2) {
    return fail(Code::over_budget,
                "{} is more than half of this machine's memory ({}): give a smaller --memory",
                human_bytes(bytes), human_bytes(machine_bytes));
  }
  Budget budget(align_up(bytes, 2 * kMiB));
  STOKER_ASSIGN(const auto arena, Arena::make(bytes, budget));
  STOKER_ASSIGN(const Buffer buffer, arena->take(bytes));
  const std::string load_before = load_average();
  Stripes stripes(code, chunk_bytes, buffer.slice());
  Bench bench(arguments, stripes);
  STOKER_TRY(bench.agree());
  const Json near_cache = bench.near_cache();
  Json results = Json::array();
  for (const auto row_of : {&Bench::encode_row, &Bench::delta_row, &Bench::decode_row}) {
    STOKER_ASSIGN(Json row, (bench.*row_of)());
    results.push_back(std::move(row));
  }
  return Json{{"machine", bench_machine()},
              {"isal", isal_version()},
              {"target", isal_target()},
              {"memory_bytes", bytes},
              {"pages", pages_text(arena->pages())},
              {"load_average_before", load_before},
              {"load_average_after", load_average()},
              {"near_cache", near_cache},
              {"results", results}};
}

std::string range(const Json& row, const std::string& key) {
  const auto all = row[key + "_all"].get<std::vector<double>>();
  const auto [low, high] = std::minmax_element(all.begin(), all.end());
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2f (%.1f-%.1f)", row[key].get<double>(), *low, *high);
  return text.data();
}

void print_table(const Json& json) {
  std::printf("ISA-L %s (%s); %s in pages of %s; GB/s of data: median (range)\n",
              json["isal"].get<std::string>().c_str(), json["target"].get<std::string>().c_str(),
              human_bytes(json["memory_bytes"].get<uint64_t>()).c_str(),
              json["pages"].get<std::string>().c_str());
  const Json& near_cache = json["near_cache"];
  std::printf(
      "in the nearest cache ISA-L encodes %.1f, the checksums of all chunks take as long as %.1f: "
      "one after the other %.1f\n",
      near_cache["isal_encode_gbps"].get<double>(),
      near_cache["crc_of_all_chunks_gbps"].get<double>(),
      near_cache["one_after_the_other_gbps"].get<double>());
  std::printf("%-7s %-6s %18s %18s %18s %18s %18s\n", "op", "code", "ours", "ours with CRC",
              "ISA-L", "ISA-L then CRC", "memory copy");
  for (const Json& row : json["results"]) {
    std::printf("%-7s %-6s", row["op"].get<std::string>().c_str(),
                row["code"].get<std::string>().c_str());
    for (const char* key :
         {"ours_gbps", "ours_with_crc_gbps", "isal_gbps", "isal_then_crc_gbps", "copy_gbps"})
      std::printf(" %18s", range(row, key).c_str());
    std::printf("\n");
  }
}

}  // namespace

void add_bench_codec(CLI::App& bench, ExitStatus& status) {
  const auto arguments = std::make_shared<BenchArguments>();
  CLI::App* command = bench.add_subcommand(
      "codec",
      "Measure our erasure codes beside plain ISA-L calls and a memory copy (about 15 seconds)");
  command->add_option("--code", arguments->code, "Data and parity chunks")->capture_default_str();
  command->add_option("--chunk", arguments->chunk, "Size of a chunk")->capture_default_str();
  command->add_option("--memory", arguments->memory, "Memory to work on: far more than the caches")
      ->capture_default_str();
  command
      ->add_option("--repetitions", arguments->repetitions, "Rounds that count; one more warms up")
      ->capture_default_str()
      ->check(whole(1, 1000));
  command->add_flag("--json", arguments->json, "Print the results as JSON");
  command->callback([arguments, &status] {
    const auto json = run_bench(*arguments);
    if (!json)
      tell(status, json.error());
    else if (arguments->json)
      std::printf("%s\n", json->dump(2).c_str());
    else
      print_table(*json);
  });
}

}  // namespace stoker::cli
