// What the tests of update schemes do, on any cluster that crashes on order: random overlapping
// updates and folds, the power that goes at any durable step, lost nodes, recovery through further
// crashes; and what the bytes must be then.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>

#include "curm/memory_cluster.h"
#include "curm/pl.h"
#include "curm/scheme_switch.h"

namespace stoker::curm {

using Bytes = std::vector<std::byte>;

using Made = std::function<std::unique_ptr<Scheme>(const Setup&)>;
inline Made by_name(std::string_view name) {
  return [name](const Setup& setup) { return make_scheme_or_switch(name, setup); };
}

// Where it runs.
using Ground = std::function<std::unique_ptr<CrashCluster>(const Geometry&, uint64_t seed)>;
inline std::unique_ptr<CrashCluster> in_memory(const Geometry& geometry, uint64_t seed) {
  return std::make_unique<MemoryCluster>(geometry, seed);
}

// A cluster, a scheme on it, and what its bytes must be.
class Lab {
 public:
  Lab(Made made, Form form, int k, int m, uint64_t seed, std::function<void(Round&)> bug = {},
      const Ground& ground = in_memory)
      : geometry_{k, m, k + m + static_cast<int>(seed % 2), 8192, 3},
        made_(std::move(made)),
        form_(form),
        ground_(ground(geometry_, seed)),
        cluster_(*ground_),
        random_(seed ^ 0x5eed) {
    cluster_.mutate([this, bug = std::move(bug)](Round& round) {
      ++rounds_;
      if (bug) bug(round);
    });
    start();
  }

  void start() {
    scheme_ = made_(
        {&cluster_, geometry_, *codec::ErasureCode::make(geometry_.k, geometry_.m), form_, 4096});
  }
  Scheme& scheme() { return *scheme_; }
  // null: it is one scheme, or changes what stripes go by itself
  SchemeSwitch* switching() {
    Scheme& scheme = *scheme_;
    return typeid(scheme) == typeid(SchemeSwitch) ? static_cast<SchemeSwitch*>(&scheme) : nullptr;
  }
  CrashCluster& cluster() { return cluster_; }
  std::mt19937_64& random() { return random_; }
  const Geometry& geometry() const { return geometry_; }

  Bytes random_bytes(uint64_t n) {
    Bytes bytes(n);
    for (std::byte& each : bytes) each = static_cast<std::byte>(random_());
    return bytes;
  }
  Update random_update() {
    const uint64_t at = random_() % geometry_.chunk_bytes;
    // Few places, so that updates overlap; now and then a long one.
    const uint64_t n = std::min(geometry_.chunk_bytes - at,
                                random_() % 8 == 0 ? 1 + random_() % 8000 : 1 + random_() % 1500);
    return {{random_() % geometry_.stripes,
             static_cast<int>(random_() % static_cast<uint64_t>(geometry_.k))},
            at,
            Value::of(random_bytes(n))};
  }
  std::vector<Update> random_row() {
    const uint64_t at = random_() % 4000, n = 1 + random_() % 3000,
                   stripe = random_() % geometry_.stripes;
    std::vector<Update> pieces;
    for (int position = 0; position < geometry_.k; ++position) {
      if (random_() % 8 != 0)
        pieces.push_back({{stripe, position}, at, Value::of(random_bytes(n))});
    }
    if (pieces.empty()) pieces.push_back({{stripe, 0}, at, Value::of(random_bytes(n))});
    return pieces;
  }

  // One random operation. What it writes may or may not be there after a crash.
  Status act() {
    in_flight_.clear();
    const uint64_t what = random_() % 16;
    if (what == 0) return scheme_->fold(random_() % geometry_.stripes);
    if (what == 1) return scheme_->fold_all();
    if (what == 2) {
      for (const uint64_t stripe : scheme_->make_room(scheme_->logged_bytes()))
        STOKER_TRY(scheme_->fold(stripe));
      return {};
    }
    in_flight_ = what <= 4 ? random_row() : std::vector<Update>{random_update()};
    STOKER_TRY(turn(in_flight_[0].chunk.stripe));
    STOKER_TRY(what <= 4 ? scheme_->update_together(in_flight_) : scheme_->update(in_flight_[0]));
    for (const Update& each : in_flight_) lay(each);
    in_flight_.clear();
    return {};
  }
  Status act(const Update& update) {
    in_flight_ = {update};
    STOKER_TRY(turn(update.chunk.stripe));
    STOKER_TRY(scheme_->update(update));
    lay(update);
    in_flight_.clear();
    return {};
  }
  // Where schemes are changed in use: now and then, before an update, its stripe is given another
  // one.
  Status turn(uint64_t stripe) {
    if (switching() == nullptr || random_() % 3 != 0) return {};
    changing_ = {stripe, kSchemes[random_() % std::size(kSchemes)]};
    STOKER_TRY(switching()->change(stripe, changing_->second));
    said_[stripe] = changing_->second;
    changing_.reset();
    return {};
  }
  void lay(const Update& update) {
    Bytes& data = model(update.chunk);
    std::copy(update.value.bytes().begin(), update.value.bytes().end(),
              data.begin() + static_cast<ptrdiff_t>(update.offset));
  }
  Bytes& model(const Chunk& chunk) {
    Bytes& data = model_[chunk];
    data.resize(geometry_.chunk_bytes);
    return data;
  }

  std::set<NodeId> random_losses() {
    std::set<NodeId> lost;
    for (uint64_t n = random_() % static_cast<uint64_t>(geometry_.m + 1); n > 0; --n)
      lost.insert(static_cast<NodeId>(random_() % static_cast<uint64_t>(geometry_.nodes)));
    return lost;
  }
  // After a crash: recovers, through further crashes inside the recovery, each with further losses
  // while the code bears them. Empty, or what is wrong.
  std::string recover() {
    std::vector<uint64_t> points(random_() % 3);
    for (uint64_t& point : points) point = random_() % 60;
    return recover(random_losses(), points);
  }
  // With crashes after so many steps.
  std::string recover(std::set<NodeId> lost, const std::vector<uint64_t>& points) {
    recovery_crashed_ = false;
    for (size_t again = 0;; ++again) {
      cluster_.restart(lost);
      start();
      if (again < points.size()) cluster_.crash_after(points[again]);
      rounds_ = 0;
      Status done = scheme_->recover(lost);
      if (done) done = cluster_.recovered();
      if (done) break;
      if (!cluster_.crashed()) return done.error().message();
      if (again >= points.size()) return "recovery crashed by itself";
      recovery_crashed_ = true;
      if (rounds_ > 1) ++late_crashes_;
      if (lost.size() < static_cast<size_t>(geometry_.m) && random_() % 2 == 0)
        lost.insert(static_cast<NodeId>(random_() % static_cast<uint64_t>(geometry_.nodes)));
    }
    cluster_.restart({});  // what recovery did not flush may be lost once more
    start();
    if (const Status done = scheme_->recover({}); !done) return done.error().message();
    if (const Status done = cluster_.recovered(); !done) return done.error().message();
    return after_recovery();
  }
  // Of recoveries, when the first round, which settles what counts, was over.
  uint64_t late_crashes() const { return late_crashes_; }
  bool recovery_crashed() const { return recovery_crashed_; }  // the last one
  // Empty, or what is wrong.
  std::string after_recovery() {
    if (std::string wrong = schemes_kept(); !wrong.empty()) return wrong;
    for (const Update& each : in_flight_) {
      // What was under way is there whole or not at all; PLR cuts it where its reserve ends.
      const bool cut = switching() != nullptr
                           ? switching()->scheme_of(each.chunk.stripe) == "plr"
                           : dynamic_cast<ReservedParityLogging*>(scheme_.get()) != nullptr;
      const uint64_t whole = cut ? 4096 : geometry_.chunk_bytes;
      const Bytes now = cluster_.base(each.chunk);
      for (uint64_t at = 0; at < each.value.size(); at += whole) {
        const Update part{each.chunk, each.offset + at,
                          each.value.slice(at, std::min(whole, each.value.size() - at))};
        if (std::equal(part.value.bytes().begin(), part.value.bytes().end(),
                       now.begin() + static_cast<ptrdiff_t>(part.offset)))
          lay(part);
      }
    }
    in_flight_.clear();
    if (cluster_.records() != 0) return "recovery left records in the logs";
    return at_rest();
  }

  // Stripes go by what they were given last; a change that was under way was made, or not. Empty,
  // or what is wrong.
  std::string schemes_kept() {
    for (uint64_t stripe = 0; stripe < geometry_.stripes && switching() != nullptr; ++stripe) {
      const std::string_view now = switching()->scheme_of(stripe);
      if (changing_ && *changing_ == std::pair(stripe, now)) said_[stripe] = now;
      const auto said = said_.try_emplace(stripe, "vdl").first->second;
      if (now != said)
        return "stripe " + std::to_string(stripe) + " goes by " + std::string(now) +
               ", and was given " + std::string(said);
    }
    changing_.reset();
    return {};
  }

  // Everything is folded: bases are the newest data and their parities. Empty, or what is wrong.
  std::string at_rest() {
    const auto code = *codec::ErasureCode::make(geometry_.k, geometry_.m);
    for (uint64_t stripe = 0; stripe < geometry_.stripes; ++stripe) {
      std::vector<Value> columns;
      for (int position = 0; position < geometry_.k; ++position) {
        if (cluster_.base({stripe, position}) != model({stripe, position}))
          return "data chunk " + std::to_string(position) + " of stripe " + std::to_string(stripe) +
                 " is not the newest";
        columns.push_back(Value::of(model({stripe, position})));
      }
      columns.resize(static_cast<size_t>(geometry_.k + geometry_.m));
      for (int j = 0; j < geometry_.m; ++j) {
        const Value expected = decoded(code, columns, geometry_.k + j);
        const Bytes parity = cluster_.base(geometry_.parity(stripe, j));
        if (!std::equal(parity.begin(), parity.end(), expected.bytes().begin()))
          return "parity " + std::to_string(j) + " of stripe " + std::to_string(stripe) +
                 " is not that of its data";
      }
    }
    return {};
  }
  // The first so many of these are there, perhaps the next one whole, and nothing else. Empty, or
  // what is wrong.
  std::string at_rest(const std::vector<Update>& updates, size_t acknowledged) {
    for (size_t i = 0; i < acknowledged; ++i) lay(updates[i]);
    const std::string wrong = at_rest();
    if (wrong.empty() || acknowledged == updates.size()) return wrong;
    lay(updates[acknowledged]);
    return at_rest();
  }

 private:
  const Geometry geometry_;
  const Made made_;
  const Form form_;
  const std::unique_ptr<CrashCluster> ground_;
  CrashCluster& cluster_;
  std::mt19937_64 random_;
  std::unique_ptr<Scheme> scheme_;
  std::map<Chunk, Bytes> model_;
  std::vector<Update> in_flight_;
  // the scheme that a stripe was given
  std::map<uint64_t, std::string_view> said_;
  std::optional<std::pair<uint64_t, std::string_view>> changing_;  // that it is being given
  uint64_t rounds_ = 0, late_crashes_ = 0;
  bool recovery_crashed_ = false;
};

inline constexpr std::array<std::pair<int, int>, 3> kCodes = {{{4, 2}, {6, 3}, {2, 1}}};

// Random overlapping updates and folds; newest bytes are read back on the way. Empty, or what is
// wrong.
inline std::string calm_run(const Made& made, Form form, uint64_t seed,
                            const std::function<void(Round&)>& bug = {},
                            const Ground& ground = in_memory) {
  const auto [k, m] = kCodes[seed % kCodes.size()];
  Lab lab(made, form, k, m, seed, bug, ground);
  for (int i = 0; i < 60; ++i) {
    if (const Status done = lab.act(); !done) return done.error().message();
    const Update where = lab.random_update();
    const auto read = lab.scheme().read(where.chunk, where.offset, where.value.size());
    if (!read) return read.error().message();
    if (!std::equal(read->bytes().begin(), read->bytes().end(),
                    lab.model(where.chunk).begin() + static_cast<ptrdiff_t>(where.offset)))
      return "a read did not see the newest bytes";
  }
  if (const Status done = lab.scheme().fold_all(); !done) return done.error().message();
  if (lab.cluster().records() != 0)
    return std::to_string(lab.cluster().records()) + " records were never released";
  if (lab.scheme().logged_bytes() != 0) return "bytes count as logged that are folded";
  return lab.at_rest();
}

// A node is lost, and its chunks are rebuilt while the scheme goes on. Empty, or what is wrong.
inline std::string rebuild_in_service(const Made& made, Form form, uint64_t seed) {
  const auto [k, m] = kCodes[seed % kCodes.size()];
  Lab lab(made, form, k, m, seed);
  for (int i = 0; i < 30; ++i) {
    if (const Status done = lab.act(); !done) return done.error().message();
  }
  const auto lost = static_cast<NodeId>(lab.random()() % static_cast<uint64_t>(k + m));
  lab.cluster().wipe(lost);
  for (uint64_t stripe = 0; stripe < 3; ++stripe) {
    for (int position = 0; position < k + m; ++position) {
      if (lab.geometry().node({stripe, position}) != lost) continue;
      if (const auto rebuilt = lab.scheme().rebuild({stripe, position}); !rebuilt)
        return rebuilt.error().message();
    }
  }
  if (const Status done = lab.scheme().fold_all(); !done) return done.error().message();
  return lab.at_rest();
}

// Two overlapping updates, a fold, an update after it, another fold; the crash that `order` orders
// comes somewhere in it, and these nodes are lost then. Empty, or what is wrong; `finished`: the
// crash was ordered for later.
inline std::string crash_point(const Made& made, const Ground& ground, uint64_t seed,
                               const std::function<void(CrashCluster&)>& order,
                               const std::set<NodeId>& lost, bool& finished,
                               const std::function<void(Round&)>& bug = {}) {
  Lab lab(made, Form::safe, 4, 2, 2 * seed, bug, ground);
  const auto update = [&](uint64_t offset, uint64_t n) {
    return Update{{1, 2}, offset, Value::of(lab.random_bytes(n))};
  };
  const std::vector<Update> updates = {update(100, 3000), update(1000, 4096), update(600, 700)};
  order(lab.cluster());
  size_t acknowledged = 0;
  const auto scenario = [&]() -> Status {
    for (const Update& each : updates) {
      if (acknowledged == 2) STOKER_TRY(lab.scheme().fold(1));
      STOKER_TRY(lab.scheme().update(each));
      ++acknowledged;
    }
    return lab.scheme().fold(1);
  };
  finished = scenario().has_value();
  lab.cluster().restart(lost);
  lab.start();
  if (const Status done = lab.scheme().recover(lost); !done) return done.error().message();
  if (const Status done = lab.cluster().recovered(); !done) return done.error().message();
  return lab.at_rest(updates, acknowledged);
}

// One update, with a crash in it. What the recovery makes of it stays so when the power goes once
// more. Empty, or what is wrong.
inline std::string lone_update(const Made& made, uint64_t seed,
                               const std::function<void(Round&)>& bug = {}) {
  Lab lab(made, Form::safe, 2, 2, 2 * seed, bug);
  const Update update{{1, 1}, 100, Value::of(lab.random_bytes(3000))};
  lab.cluster().crash_after(seed % 8);
  static_cast<void>(lab.scheme().update(update));
  for (int again = 0; again < 2; ++again) {
    lab.cluster().restart({});
    lab.start();
    if (const Status done = lab.scheme().recover({}); !done) return done.error().message();
    const Bytes now = lab.cluster().base(update.chunk);
    if (again == 0 &&
        std::equal(update.value.bytes().begin(), update.value.bytes().end(), now.begin() + 100))
      lab.lay(update);
  }
  return lab.at_rest();
}

// `late`: grows by the crashes behind the first round of a recovery.
inline std::string crash_run(const Made& made, uint64_t seed,
                             const std::function<void(Round&)>& bug = {},
                             const Ground& ground = in_memory, uint64_t* late = nullptr) {
  const auto [k, m] = kCodes[seed % kCodes.size()];
  Lab lab(made, Form::safe, k, m, seed, bug, ground);
  for (int life = 0; life < 4; ++life) {
    lab.cluster().crash_after(lab.random()() % 400);
    while (lab.act()) {
    }
    if (!lab.cluster().crashed()) return "an operation failed by itself";
    if (std::string wrong = lab.recover(); !wrong.empty()) return wrong;
  }
  if (late != nullptr) *late += lab.late_crashes();
  return {};
}

// Crashes in what is done at `point`, then in the recovery at each `step`th point of it; a node is
// lost with the first crash, or with the second, or with both. Empty, or what is wrong; `late` as
// above.
inline std::string recovery_sweep(const Made& made, const Ground& ground, uint64_t point,
                                  uint64_t first, uint64_t step, uint64_t& late) {
  for (uint64_t at = first;; at += step) {
    Lab lab(made, Form::safe, 4, 2, 2 * (point + at), {}, ground);
    const auto update = [&](int position, uint64_t offset, uint64_t n) {
      return Update{{1, position}, offset, Value::of(lab.random_bytes(n))};
    };
    lab.cluster().crash_after(point);
    const auto scenario = [&]() -> Status {
      for (const Update& each : {update(2, 100, 3000), update(0, 1000, 4096)})
        STOKER_TRY(lab.act(each));
      return lab.scheme().fold(1);
    };
    static_cast<void>(scenario());
    std::set<NodeId> lost;
    if (at % 3 == 0) lost.insert(static_cast<NodeId>(at / 3 % 6));
    const uint64_t before = lab.late_crashes();
    if (std::string wrong = lab.recover(lost, {at}); !wrong.empty())
      return wrong + ", point " + std::to_string(point) + ", of recovery " + std::to_string(at);
    late += lab.late_crashes() - before;
    if (!lab.recovery_crashed()) return {};
  }
}

}  // namespace stoker::curm
