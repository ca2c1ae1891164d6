// kill -9 of a process that updates stripes on nine folders, by each scheme three times; each time
// any three folders are then deleted, and every acknowledged byte is there when they are rebuilt,
// with the parity that belongs to it. By `switch` stripes are given another scheme all the time,
// and go on by what they were given last.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>

#include "curm/scheme_switch.h"
#include "curm/shard_cluster.h"
#include "kill.h"
#include "lab.h"

namespace stoker::curm {
namespace {

const Geometry kGeometry{6, 3, 9, 64 << 10, 4};

ShardOptions options() {
  ShardOptions shards;
  shards.segment_bytes = 256 << 10;
  shards.reserved_bytes = 32 << 10;
  return shards;
}

std::vector<std::string> paths_in(const std::string& folder) {
  std::vector<std::string> paths;
  for (int i = 0; i < kGeometry.nodes; ++i) paths.push_back(folder + "/node" + std::to_string(i));
  return paths;
}

// The n-th update, the same in every run.
Update update_of(uint64_t n) {
  std::mt19937_64 random(n);
  const uint64_t at = random() % (kGeometry.chunk_bytes - 1),
                 bytes = std::min(kGeometry.chunk_bytes - at, 1 + random() % 9000);
  std::vector<std::byte> content(bytes);
  for (std::byte& each : content) each = static_cast<std::byte>(random());
  return {{random() % kGeometry.stripes, static_cast<int>(random() % 6)},
          at,
          Value::of(std::move(content))};
}

// Of scheme `switch`: before it the stripe is given this one.
std::optional<std::string_view> change_at(uint64_t n) {
  return n % 5 != 0 ? std::nullopt : std::optional(kSchemes[n / 5 % std::size(kSchemes)]);
}

struct Serving {
  std::unique_ptr<Loop> loop;
  std::unique_ptr<ShardCluster> cluster;
  std::unique_ptr<Scheme> scheme;
};

Result<Serving> serve(const std::string& folder, std::string_view name) {
  Serving serving;
  STOKER_ASSIGN(auto engine, make_engine());
  STOKER_ASSIGN(serving.loop, Loop::make(std::move(engine)));
  STOKER_ASSIGN(const auto code, codec::ErasureCode::make(kGeometry.k, kGeometry.m));
  const bool fresh = !std::filesystem::exists(folder);
  if (fresh) {
    STOKER_ASSIGN(serving.cluster,
                  ShardCluster::make(*serving.loop, paths_in(folder), kGeometry, options()));
  } else {
    STOKER_ASSIGN(serving.cluster, ShardCluster::open(*serving.loop, paths_in(folder), options()));
  }
  serving.scheme = make_scheme_or_switch(
      name, {serving.cluster.get(), kGeometry, code, Form::safe, options().reserved_bytes});
  STOKER_TRY(serving.scheme->recover(serving.cluster->replaced()));
  STOKER_TRY(serving.cluster->admit());
  return serving;
}

// In the child: updates until it is killed, and tells of each by a record in the pipe.
Status write_on(const std::string& folder, std::string_view name, uint64_t n, int out) {
  STOKER_ASSIGN(const Serving serving, serve(folder, name));
  for (;; ++n) {
    if (!tell(out, false, n)) return {};
    const Update update = update_of(n);
    auto* schemes = dynamic_cast<SchemeSwitch*>(serving.scheme.get());
    if (const auto next = change_at(n); schemes != nullptr && next)
      STOKER_TRY(schemes->change(update.chunk.stripe, *next));
    STOKER_TRY(serving.scheme->update(update));
    if (!tell(out, true, n)) return {};
    if (n % 12 == 0) STOKER_TRY(serving.scheme->fold(n / 12 % kGeometry.stripes));
    if (n % 30 == 0) STOKER_TRY(serving.scheme->fold_all());
  }
}

class CurmKill : public testing::TestWithParam<std::string_view> {
 protected:
  CurmKill()
      : folder_(testing::TempDir() + "curm_kill." + std::string(GetParam()) +
                std::to_string(getpid())) {
    std::filesystem::remove_all(folder_);
  }
  ~CurmKill() override { std::filesystem::remove_all(folder_); }

  void lay(uint64_t n) {
    const Update update = update_of(n);
    std::vector<std::byte>& chunk = chunk_of(update.chunk);
    std::copy(update.value.bytes().begin(), update.value.bytes().end(),
              chunk.begin() + static_cast<ptrdiff_t>(update.offset));
    if (const auto next = change_at(n)) said_[update.chunk.stripe] = *next;
  }
  std::vector<std::byte>& chunk_of(const Chunk& chunk) {
    auto& bytes = model_[chunk];
    bytes.resize(kGeometry.chunk_bytes);
    return bytes;
  }

  // All that was acknowledged, perhaps what was begun, and nothing else; in data and parity.
  void check(Substrate& cluster) {
    for (; laid_ < told_.acknowledged; ++laid_) lay(laid_ + 1);
    const auto bases = [&](uint64_t stripe) {
      Round round;
      std::vector<Slot> slots;
      for (int position = 0; position < 9; ++position)
        slots.push_back(round.to(kGeometry.node({stripe, position}))
                            .read({stripe, position}, 0, kGeometry.chunk_bytes));
      const Status done = cluster.run(round);
      EXPECT_TRUE(done) << done.error().message();
      std::vector<Value> values;
      for (const Slot& slot : slots) values.push_back(*slot);
      return values;
    };
    if (told_.begun > told_.acknowledged) {
      const Update update = update_of(told_.begun);
      const Value now =
          bases(update.chunk.stripe)[static_cast<size_t>(update.chunk.position)].slice(
              update.offset, update.value.size());
      if (std::equal(now.bytes().begin(), now.bytes().end(), update.value.bytes().begin())) {
        lay(told_.begun);
        told_.acknowledged = laid_ = told_.begun;
      }
    }
    const auto code = *codec::ErasureCode::make(6, 3);
    for (uint64_t stripe = 0; stripe < kGeometry.stripes; ++stripe) {
      const std::vector<Value> values = bases(stripe);
      std::vector<Value> data(values.begin(), values.begin() + 6);
      data.resize(9);
      for (int position = 0; position < 6; ++position) {
        ASSERT_TRUE(std::equal(chunk_of({stripe, position}).begin(),
                               chunk_of({stripe, position}).end(),
                               values[static_cast<size_t>(position)].bytes().begin()))
            << "data " << position << " of stripe " << stripe;
      }
      for (int position = 6; position < 9; ++position) {
        const Value expected = decoded(code, data, position);
        ASSERT_TRUE(std::equal(expected.bytes().begin(), expected.bytes().end(),
                               values[static_cast<size_t>(position)].bytes().begin()))
            << "parity " << position << " of stripe " << stripe;
      }
    }
  }

  // Behind check().
  void check_schemes(const SchemeSwitch& schemes) {
    for (uint64_t stripe = 0; stripe < kGeometry.stripes; ++stripe) {
      const auto now = schemes.scheme_of(stripe);
      std::string_view& said = said_.try_emplace(stripe, "vdl").first->second;
      if (told_.begun > told_.acknowledged && update_of(told_.begun).chunk.stripe == stripe &&
          change_at(told_.begun) == now)
        said = now;
      EXPECT_EQ(now, said) << "stripe " << stripe;
    }
  }

  const std::string folder_;
  std::mt19937_64 random_{printed_seed()};
  std::map<Chunk, std::vector<std::byte>> model_;
  std::map<uint64_t, std::string_view> said_;  // of `switch`: the scheme that a stripe was given
  Told told_;
  uint64_t laid_ = 0;
};
INSTANTIATE_TEST_SUITE_P(All, CurmKill, testing::ValuesIn(kProtocols),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(CurmKill, AnyThreeOfNineFoldersMayGo) {
  for (uint64_t kills = 0; kills < 3 * soak_factor; ++kills) {
    const auto writer = [this](int out) {
      return write_on(folder_, GetParam(), told_.acknowledged + 1, out);
    };
    ASSERT_NO_FATAL_FAILURE(run_and_kill(writer, 5 + random_() % 30, random_, told_));
    std::vector<std::string> gone = paths_in(folder_);
    std::shuffle(gone.begin(), gone.end(), random_);
    gone.resize(3);
    for (const std::string& path : gone) std::filesystem::remove_all(path);
    const auto serving = serve(folder_, GetParam());
    ASSERT_TRUE(serving) << serving.error().message();
    ASSERT_NO_FATAL_FAILURE(check(*serving->cluster));
    if (const auto* schemes = dynamic_cast<SchemeSwitch*>(serving->scheme.get()))
      check_schemes(*schemes);
    ++cases_checked;
  }
}

INSTANTIATE_TEST_SUITE_P(InUse, CurmKill, testing::Values(kSwitch),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace stoker::curm
