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

std::string composition_of(const CodedPlan& plan) {
  std::string text = "coded(" + std::to_string(plan.k) + "+" + std::to_string(plan.m);
  if (plan.scrub_rate) text += " scrub=" + std::to_string(*plan.scrub_rate);
  if (plan.busy_repair_rate) text += " repair=" + std::to_string(*plan.busy_repair_rate);
  if (plan.busy_fold_rate) text += " fold=" + std::to_string(*plan.busy_fold_rate);
  text += ", ";
  for (size_t i = 0; i < plan.paths.size(); ++i) text += (i == 0 ? "" : ",") + plan.paths[i];
  return text + ")";
}

Error no_object(std::string_view key) {
  return make_error(Code::not_found, "there is no object '" + std::string(key) + "'",
                    "store/coded/read");
}

Error no_snapshot(std::string_view name) {
  return make_error(Code::not_found,
                    "there is no snapshot '" + std::string(name) + "': a coded store has none",
                    "store/coded/read");
}

}  // namespace

CodedStore::CodedStore(std::unique_ptr<Shards> shards, codec::ErasureCode code,
                       const Runtime& runtime, std::string composition, const CodedOptions& coded)
    : runtime_(runtime),
      coded_(coded),
      shards_(std::move(shards)),
      shape_(shards_->shape()),
      code_(std::move(code)),
      map_(shape_, coded.tree != nullptr ? *coded.tree : ClassTree::shipped(),
           std::move(composition)),
      reader_(map_, *shards_, code_, runtime.budget),
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
      new CodedStore(std::move(shards), std::move(code), runtime, composition_of(plan), coded));
  if (store->shards_->fresh()) {
    store->map_.lock()->live = store->shards_->present();
    // an empty table; nothing is served before the first epoch is confirmed
    STOKER_TRY(store->checkpoint());
  }
  STOKER_TRY(Recovery(*store).run(options.read_only));
  store->shards_->keep_files();
  if (!options.replace.empty()) STOKER_TRY(store->replace(options));
  for (size_t shard = 0; shard < store->shape_.shards; ++shard) {
    const Shard& each = (*store->shards_)[shard];
    const auto map = store->map_.lock();
    if (map->is_live(shard) && each.super.scrubbed.ended_at > map->counts.scrubbed.ended_at)
      map->counts.scrubbed = each.super.scrubbed;
    if (!map->is_live(shard))
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
  if (const auto refused = map_.refused()) return refused->with("no shard can be replaced");
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
  if (const auto refused = map_.refused()) return *refused;
  return make_error(Code::unsupported, "a coded store has no snapshots", kWhere);
}

Future<void> CodedStore::drop(std::string_view name, Durability) { return snapshot(name); }

StoreInfo CodedStore::info() const {
  const auto map = map_.lock();
  StoreInfo info;
  info.composition = map_.name();
  info.committed = info.durable = map->version;
  info.capacity_bytes = shape_.capacity_bytes();
  info.used_bytes = map_.slots().used() / shape_.n() * shape_.stripe_bytes();
  info.map_bytes = map->table.memory_bytes(shape_) + map->classes.memory_bytes();
  if (map->refused) info.read_only = map->refused->what;
  return info;
}

Health CodedStore::health() const {
  const auto map = map_.lock();
  Health health = map->counts;
  health.epoch = map->epoch;
  for (size_t shard = 0; shard < shape_.shards; ++shard) {
    const Shard& each = (*shards_)[shard];
    if (map->is_live(shard)) {
      health.live.push_back(each.path);
    } else {
      health.troubles.push_back(each.trouble.empty() ? "'" + each.path + "' is not up to date"
                                                     : each.trouble);
    }
  }
  for (const auto& [at, loss] : map->lost) {
    if (loss.stripe.expired()) continue;
    if (health.lost_chunks++ == 0) health.lost_why = loss.why;
  }
  for (const auto& [id, weak] : map->dirty) {
    const auto stuck = map->stuck.find(id);
    if (stuck == map->stuck.end() || weak.expired()) continue;
    if (health.stuck_stripes++ == 0 && health.lost_chunks == 0) health.lost_why = stuck->second;
  }
  for (const auto& [id, weak] : map->dirty) {
    if (const StripePtr stripe = weak.lock()) health.newer_blocks += stripe->overlay.size();
  }
  return health;
}

Result<ObjectInfo> CodedStore::stat(std::string_view key, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  const auto map = map_.lock();
  const ObjectPtr object = map->table.find(key);
  if (!object) return no_object(key);
  return map->info_of(key, *object);
}

Result<std::vector<ObjectInfo>> CodedStore::list(std::string_view prefix,
                                                 std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  const auto map = map_.lock();
  std::vector<ObjectInfo> found;
  for (auto at = map->table.objects().lower_bound(prefix);
       at != map->table.objects().end() && at->first.starts_with(prefix); ++at) {
    found.push_back(map->info_of(at->first, *at->second));
  }
  return found;
}

Future<void> CodedStore::read(std::string_view key, uint64_t offset, Slice into,
                              ReadOptions options) {
  if (!options.snapshot.empty()) return no_snapshot(options.snapshot);
  if (options.priority != Priority::scrub) {
    used();
    const auto map = map_.lock();
    if (map->table.find(key))
      map->classes.see(class_id(key), {class_volume(key), false, offset, into.size});
  }
  auto promise = std::make_shared<Promise<void>>();
  Future<void> future = promise->future();
  readers_->run([this, promise, key = std::string(key), offset, into, priority = options.priority] {
    promise->complete(reader_.read(key, nullptr, offset, into, priority));
  });
  return future;
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
