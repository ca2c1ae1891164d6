#include "stoker/store/coded/store.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/recovery.h"

namespace stoker::coded {
namespace {

constexpr const char* kWhere = "store/coded/store";
constexpr size_t kReaders = 4;  // threads

}  // namespace

CodedStore::CodedStore(std::unique_ptr<Shards> shards, codec::ErasureCode code,
                       const Runtime& runtime, const StoreOptions&, const CodedOptions& coded)
    : runtime_(runtime),
      coded_(coded),
      shards_(std::move(shards)),
      shape_(shards_->shape()),
      code_(std::move(code)),
      slots_(shape_),
      classes_(coded.tree != nullptr ? *coded.tree : ClassTree::shipped()),
      patrol_pace_(coded.scrub_rate, 0, *coded.clock),
      pace_(coded.repair_rate, coded.busy_repair_rate, *coded.clock),
      fold_pace_(coded.fold_rate, coded.busy_fold_rate, *coded.clock) {}

Result<std::unique_ptr<CodedStore>> CodedStore::open(const CodedPlan& plan, const Runtime& runtime,
                                                     const StoreOptions& options,
                                                     const CodedOptions& given) {
  CodedOptions coded = given;
  coded.scrub_rate = plan.scrub_rate.value_or(given.scrub_rate);
  coded.busy_repair_rate = plan.busy_repair_rate.value_or(given.busy_repair_rate);
  coded.busy_fold_rate = plan.busy_fold_rate.value_or(given.busy_fold_rate);
  if (coded.clock == nullptr) coded.clock = &runtime.loop.clock();
  STOKER_ASSIGN(auto shards, Shards::open(plan, runtime.loop, options, coded));
  STOKER_ASSIGN(auto code,
                codec::ErasureCode::make(static_cast<int>(plan.k), static_cast<int>(plan.m)));
  std::unique_ptr<CodedStore> store(
      new CodedStore(std::move(shards), std::move(code), runtime, options, coded));
  store->composition_ = "coded(" + std::to_string(plan.k) + "+" + std::to_string(plan.m);
  if (plan.scrub_rate) store->composition_ += " scrub=" + std::to_string(*plan.scrub_rate);
  if (plan.busy_repair_rate)
    store->composition_ += " repair=" + std::to_string(*plan.busy_repair_rate);
  if (plan.busy_fold_rate) store->composition_ += " fold=" + std::to_string(*plan.busy_fold_rate);
  store->composition_ += ", ";
  for (size_t i = 0; i < plan.paths.size(); ++i)
    store->composition_ += (i == 0 ? "" : ",") + plan.paths[i];
  store->composition_ += ")";
  if (store->shards_->fresh()) {
    store->live_ = store->shards_->present();
    // an empty table; nothing is served before the first epoch is confirmed
    STOKER_TRY(store->checkpoint());
  }
  STOKER_TRY(Recovery(*store).run(options.read_only));
  store->shards_->keep_files();
  if (!options.replace.empty()) STOKER_TRY(store->replace(options));
  for (size_t shard = 0; shard < store->shape_.shards; ++shard) {
    const Shard& each = (*store->shards_)[shard];
    if ((store->live() & shard_bit(shard)) != 0 &&
        each.super.scrubbed.ended_at > store->counts_.scrubbed.ended_at)
      store->counts_.scrubbed = each.super.scrubbed;
    if ((store->live() & shard_bit(shard)) == 0)
      log().warn("a coded store works without a shard: {}",
                 each.trouble.empty() ? "'" + each.path + "' missed what was written meanwhile"
                                      : each.trouble);
  }
  store->readers_ = std::make_unique<Pool>(kReaders);
  store->writer_ = std::thread([raw = store.get()] { raw->run(); });
  return store;
}

// New shards for lost ones: they have no part in any epoch until they are rebuilt.
Status CodedStore::replace(const StoreOptions& options) {
  if (refused_) return refused_->with("no shard can be replaced");
  for (const std::string& path : options.replace)
    STOKER_TRY(shards_->replace(path, options, coded_.files));
  return {};
}

CodedStore::~CodedStore() {
  {
    std::lock_guard lock(queue_mutex_);
    stopping_ = true;
    queued_.notify_all();
  }
  readers_.reset();
  if (writer_.joinable()) writer_.join();
}

Future<void> CodedStore::snapshot(std::string_view) {
  std::lock_guard lock(mutex_);
  if (refused_) return *refused_;
  return make_error(Code::unsupported, "a coded store has no snapshots", kWhere);
}

Future<void> CodedStore::drop(std::string_view name, Durability) { return snapshot(name); }

StoreInfo CodedStore::info() const {
  std::lock_guard lock(mutex_);
  StoreInfo info;
  info.composition = composition_;
  info.committed = info.durable = version_;
  // Slots of all shards, as data: of each stripe's k + m chunks k count.
  info.capacity_bytes = uint64_t{shape_.slots} * shape_.shards / shape_.n() * shape_.stripe_bytes();
  info.used_bytes = slots_.used() / shape_.n() * shape_.stripe_bytes();
  info.map_bytes = table_.memory_bytes(shape_) + classes_.memory_bytes();
  if (refused_) info.read_only = refused_->what;
  return info;
}

Health CodedStore::health() const {
  std::lock_guard lock(mutex_);
  Health health = counts_;
  health.epoch = epoch_;
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    const Shard& each = (*shards_)[shard];
    if ((live_ & shard_bit(shard)) != 0) {
      health.live.push_back(each.path);
    } else {
      health.troubles.push_back(each.trouble.empty() ? "'" + each.path + "' is not up to date"
                                                     : each.trouble);
    }
  }
  for (const auto& [at, loss] : lost_) {
    if (loss.stripe.expired()) continue;
    if (health.lost_chunks++ == 0) health.lost_why = loss.why;
  }
  for (const auto& [id, weak] : dirty_) {
    const auto stuck = stuck_.find(id);
    if (stuck == stuck_.end() || weak.expired()) continue;
    if (health.stuck_stripes++ == 0 && health.lost_chunks == 0) health.lost_why = stuck->second;
  }
  for (const auto& [id, weak] : dirty_) {
    if (const StripePtr stripe = weak.lock()) health.newer_blocks += stripe->overlay.size();
  }
  return health;
}

}  // namespace stoker::coded

namespace stoker {

Result<std::unique_ptr<Store>> open_coded_store(const CodedPlan& plan, const Runtime& runtime,
                                                const StoreOptions& options,
                                                const CodedOptions& coded) {
  STOKER_ASSIGN(std::unique_ptr<Store> store,
                coded::CodedStore::open(plan, runtime, options, coded));
  return store;
}

}  // namespace stoker
