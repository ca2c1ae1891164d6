#include "cache_traces.h"

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <unordered_map>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/order.h"
#include "stoker/store/cached/followers.h"
#include "stoker/store/cached/format.h"
#include "stoker/store/cached/policy.h"

namespace stoker::cli {
namespace {

using cached::BlockId;

constexpr uint64_t kSeed = 7;

// A run for each object, of all of its items.
void put_objects(CacheTrace& trace, const TraceShape& shape) {
  STOKER_CHECK(shape.blocks % shape.objects == 0);
  for (uint64_t object = 0; object < shape.objects; ++object) {
    trace.plan.keys.push_back("set/" + std::to_string(object));
    trace.plan.runs.push_back({.object = object,
                               .bytes = trace.item_bytes(),
                               .items = shape.blocks / shape.objects * trace.items_a_block,
                               .stride = trace.item_bytes()});
  }
}

CacheTrace empty_trace(std::string regime, const TraceShape& shape, uint64_t items_a_block) {
  CacheTrace trace{.regime = std::move(regime),
                   .blocks = shape.blocks,
                   .items_a_block = items_a_block,
                   .block_bytes = shape.block_bytes};
  put_objects(trace, shape);
  return trace;
}

// What the production code decides, with a plan or without.
class Production {
 public:
  Production(const CacheTrace& trace, bool follows, uint64_t places) : policy_(places) {
    const Plan& plan = trace.plan;
    const uint64_t blocks_each = trace.blocks / plan.keys.size();
    std::vector<ObjectInfo> objects;
    for (const std::string& key : plan.keys) {
      objects.push_back({.key = key, .bytes = blocks_each * trace.block_bytes, .tag = "t"});
      for (uint64_t block = 0; block < blocks_each; ++block)
        ids_.push_back(cached::block_id(key, "t", block));
    }
    if (!follows) return;
    auto follower = cached::Follower::make(plan, objects, trace.block_bytes, budget_);
    STOKER_CHECK(follower);
    followers_.follow("", std::move(*follower));
  }
  // Whether it was held.
  bool read(uint64_t block) {
    const BlockId& id = ids_[block];
    followers_.read(id, {&policy_});
    if (!policy_.holds(id)) return false;
    policy_.hit(id);
    return true;
  }
  // Whether it was worth a place, and whether another left for it.
  std::pair<bool, bool> admit(uint64_t block) {
    const auto next = followers_.next(ids_[block]);
    if (!policy_.admits(next)) return {false, false};
    return {true, policy_.add(ids_[block], next).has_value()};
  }

 private:
  std::vector<BlockId> ids_;
  Budget budget_{UINT64_MAX};
  cached::Followers followers_;
  cached::Policy policy_;
};

class Lru {
 public:
  explicit Lru(uint64_t places) : places_(places) {}
  bool read(uint64_t block) {
    const auto held = held_.find(block);
    if (held == held_.end()) return false;
    order_.splice(order_.begin(), order_, held->second);
    return true;
  }
  std::pair<bool, bool> admit(uint64_t block) {
    order_.push_front(block);
    held_[block] = order_.begin();
    if (held_.size() <= places_) return {true, false};
    held_.erase(order_.back());
    order_.pop_back();
    return {true, true};
  }

 private:
  const uint64_t places_;
  std::list<uint64_t> order_;
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> held_;
};

template <typename Cache>
CacheRun play(const CacheTrace& trace, Cache&& cache) {
  CacheRun run;
  const uint64_t epochs = std::max<uint64_t>(1, trace.epochs);
  run.fetched.resize(epochs);
  for (size_t at = 0; at < trace.reads.size(); ++at) {
    const uint64_t block = trace.reads[at] / trace.items_a_block;
    if (cache.read(block)) continue;
    uint64_t& fetched = run.fetched[at / (trace.reads.size() / epochs)];
    const auto [admitted, evicted] = cache.admit(block);
    fetched += admitted ? trace.block_bytes : trace.item_bytes();
    if (!admitted) continue;
    run.admitted += trace.block_bytes;
    run.written += trace.block_bytes + (evicted ? 2 : 1) * cached::kRecordBytes;
  }
  return run;
}

// Belady, which may also keep nothing of what it fetches.
uint64_t belady_misses(const CacheTrace& trace, uint64_t places) {
  STOKER_CHECK(trace.items_a_block == 1);
  const auto& reads = trace.reads;
  std::vector<uint64_t> next(reads.size()), last(trace.blocks, reads.size());
  for (size_t at = reads.size(); at-- > 0;) next[at] = std::exchange(last[reads[at]], at);
  std::multimap<uint64_t, uint64_t> held;  // by next use
  uint64_t misses = 0;
  for (uint64_t at = 0; at < reads.size(); ++at) {
    if (held.erase(at) == 0) ++misses;
    if (next[at] == reads.size()) continue;
    held.emplace(next[at], reads[at]);
    if (held.size() > places) held.erase(std::prev(held.end()));
  }
  return misses;
}

}  // namespace

CacheTrace epochs_trace(const TraceShape& shape, uint64_t items_a_block) {
  CacheTrace trace = empty_trace(
      items_a_block == 1 ? "epochs" : "epochs, " + std::to_string(items_a_block) + " items a block",
      shape, items_a_block);
  trace.plan.order = Plan::Shuffled{kSeed};
  trace.epochs = shape.epochs;
  const uint64_t items = shape.blocks * items_a_block;
  for (uint64_t epoch = 0; epoch < shape.epochs; ++epoch) {
    const Permutation order(items, kSeed, epoch);
    for (uint64_t at = 0; at < items; ++at) trace.reads.push_back(order.sample(at));
  }
  return trace;
}

CacheTrace windows_trace(const TraceShape& shape) {
  CacheTrace trace = empty_trace("windows", shape, 1);
  const uint64_t window = shape.blocks / 4, step = window / 4;
  for (uint64_t pass = 0; pass < shape.epochs; ++pass) {
    for (uint64_t begin = 0; begin + window <= shape.blocks; begin += step) {
      const Permutation order(window, kSeed + pass, begin);
      for (uint64_t at = 0; at < window; ++at) trace.reads.push_back(begin + order.sample(at));
    }
  }
  const uint64_t blocks_each = shape.blocks / shape.objects;
  trace.plan.runs.clear();
  for (const uint64_t block : trace.reads)
    trace.plan.runs.push_back({.object = block / blocks_each,
                               .offset = block % blocks_each * shape.block_bytes,
                               .bytes = shape.block_bytes});
  return trace;
}

CacheTrace mixture_trace(const TraceShape& shape) {
  CacheTrace trace = empty_trace("mixture", shape, 1);
  const uint64_t small = shape.blocks / 20, middle = shape.blocks / 4;
  const Plan::Mixed mixed{{small, middle, shape.blocks - small - middle}, {3, 3, 4}, kSeed};
  const Mixture mixture = *Mixture::make(mixed.weights, mixed.seed);
  for (uint64_t at = 0; at < 3 * shape.epochs * shape.blocks; ++at) {
    const Draw draw = mixture.draw(at);
    const uint64_t count = mixed.items[draw.source];
    const uint64_t begin =
        std::accumulate(mixed.items.begin(), mixed.items.begin() + draw.source, uint64_t{0});
    const Permutation order(count, mixed.seed + 1 + draw.source, draw.number / count);
    trace.reads.push_back(begin + order.sample(draw.number % count));
  }
  trace.plan.order = mixed;
  return trace;
}

CacheTrace out_of_order(CacheTrace trace, uint64_t places) {
  trace.regime += ", out of order";
  std::mt19937_64 random(kSeed);
  for (size_t at = 0; at < trace.reads.size(); at += places)
    std::shuffle(
        trace.reads.begin() + static_cast<ptrdiff_t>(at),
        trace.reads.begin() + static_cast<ptrdiff_t>(std::min(trace.reads.size(), at + places)),
        random);
  return trace;
}

CacheRun simulate(const CacheTrace& trace, CachePolicy policy, uint64_t places) {
  if (policy == CachePolicy::lru) return play(trace, Lru(places));
  return play(trace, Production(trace, policy == CachePolicy::plan, places));
}

uint64_t bound_bytes(const CacheTrace& trace, uint64_t places) {
  if (trace.epochs == 0) return belady_misses(trace, places) * trace.block_bytes;
  return (trace.blocks - std::min(trace.blocks, places)) * trace.block_bytes;
}

double over_bound(const CacheTrace& trace, const CacheRun& run, uint64_t places) {
  const auto first = run.fetched.begin() + (trace.epochs == 0 ? 0 : 1);
  return static_cast<double>(*std::max_element(first, run.fetched.end())) /
         static_cast<double>(bound_bytes(trace, places));
}

}  // namespace stoker::cli
