#include "stoker/store/coded/store.h"

#include <utility>

#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/recovery/recovery.h"
#include "stoker/store/coded/write/transaction.h"

namespace stoker::coded {
namespace {

constexpr size_t kReaders = 8;        // threads
constexpr size_t kFoldedAtOnce = 16;  // stripes

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
  return fail(Code::not_found, "there is no object '{}'", key);
}

Error no_snapshot(std::string_view name) {
  return fail(Code::not_found, "there is no snapshot '{}': a coded store has none", name);
}

}  // namespace

CodedStore::CodedStore(std::unique_ptr<Shards> shards, codec::ErasureCode code,
                       const Runtime& runtime, std::string composition, const CodedOptions& coded)
    : spare_(runtime.budget),
      shards_(std::move(shards)),
      code_(std::move(code)),
      budget_(runtime.budget),
      pool_(runtime.pool),
      paces_{{coded.repair_rate, coded.busy_repair_rate, *coded.clock},
             {coded.fold_rate, coded.busy_fold_rate, *coded.clock},
             {coded.scrub_rate, 0, *coded.clock}},
      map_(shards_->shape(), coded.tree != nullptr ? *coded.tree : ClassTree::shipped(), budget_,
           std::move(composition)),
      reader_(map_, *shards_, code_, budget_, spare_),
      logs_(map_, *shards_, reader_),
      rebuilder_(map_, *shards_, reader_, logs_, paces_.repair),
      joining_(map_, *shards_, logs_, rebuilder_),
      folder_(fold_parts()),
      committer_(fold_parts(), folder_),
      resync_(fold_parts(), folder_, paces_.repair),
      scrubber_(fold_parts(), folder_, resync_, paces_.repair, paces_.patrol,
                coded.scrub_rate != 0),
      background_(fold_parts(), folder_, resync_, scrubber_, paces_) {}

FoldParts CodedStore::fold_parts() {
  return {map_, *shards_, reader_, logs_, rebuilder_, joining_, code_, budget_};
}

Result<std::unique_ptr<CodedStore>> CodedStore::open(const CodedPlan& plan, const Runtime& runtime,
                                                     const StoreOptions& options,
                                                     const CodedOptions& given) {
  CodedOptions coded = given;
  coded.scrub_rate = plan.scrub_rate.value_or(given.scrub_rate);
  coded.busy_repair_rate = plan.busy_repair_rate.value_or(given.busy_repair_rate);
  coded.busy_fold_rate = plan.busy_fold_rate.value_or(given.busy_fold_rate);
  if (coded.clock == nullptr) coded.clock = &runtime.loop.clock();
  STOKER_ASSIGN(auto shards, Shards::open(plan, runtime, options, coded));
  STOKER_ASSIGN(auto code,
                codec::ErasureCode::make(static_cast<int>(plan.k), static_cast<int>(plan.m)));
  std::unique_ptr<CodedStore> store(
      new CodedStore(std::move(shards), std::move(code), runtime, composition_of(plan), coded));
  STOKER_TRY(store->recover(options.read_only));
  if (!options.replace.empty()) STOKER_TRY(store->replace(options, coded.files));
  store->tell_shards();
  store->start(coded.background);
  return store;
}

Status CodedStore::recover(bool read_only) {
  if (shards_->fresh()) {
    map_.lock()->live = shards_->present();
    // an empty table; nothing is served before the first epoch is confirmed
    STOKER_TRY(joining_.checkpoint());
  }
  STOKER_TRY(Recovery(fold_parts(), folder_).run(read_only));
  shards_->keep_files();
  return {};
}

// New shards for lost ones: they have no part in any epoch until they are rebuilt.
Status CodedStore::replace(const StoreOptions& options, bool files) {
  if (const auto refused = map_.refused()) return refused->with("no shard can be replaced");
  for (const std::string& path : options.replace)
    STOKER_TRY(shards_->replace(path, options, files));
  return {};
}

void CodedStore::start(bool background) {
  readers_ = std::make_unique<Pool>(kReaders);
  writer_ = std::make_unique<Writer>(shape(), committer_, background_, background);
}

// Readers may wait for the writer thread, which goes on until they have ended.
CodedStore::~CodedStore() {
  if (writer_) writer_->stop();
  readers_.reset();
}

Future<void> CodedStore::snapshot(std::string_view) {
  if (const auto refused = map_.refused()) return *refused;
  return fail(Code::unsupported, "a coded store has no snapshots; use local: for them");
}

Future<void> CodedStore::drop(std::string_view name, Durability) { return snapshot(name); }

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
    paces_.used();
    const auto map = map_.lock();
    if (map->table.find(key))
      map->classes.see(class_id(key), {class_volume(key), false, offset, into.size});
  }
  auto promise = std::make_shared<Promise<void>>();
  Future<void> future = promise->future();
  if (auto ahead = reader_.needed_ahead(key, offset, into.size); !ahead.empty()) {
    readers_->run([this, ahead = std::move(ahead), priority = options.priority] {
      reader_.load_ahead(ahead, priority);
    });
  }
  readers_->run([this, promise, key = std::string(key), offset, into, priority = options.priority] {
    promise->complete(reader_.read(key, nullptr, offset, into, priority));
  });
  return future;
}

Result<std::unique_ptr<Transaction>> CodedStore::begin() {
  if (const auto refused = map_.refused()) return *refused;
  return std::unique_ptr<Transaction>(
      new StagedTransaction({*this, map_, *shards_, reader_, code_, budget_, spare_, pool_, paces_,
                             *readers_, *writer_}));
}

Future<void> CodedStore::fold_all() {
  return writer_->work([this]() -> Status {
    for (;;) {
      STOKER_ASSIGN(const size_t folded, folder_.step({kFoldedAtOnce}));
      if (folded == 0) return joining_.checkpoint();
    }
  });
}

// What comes meanwhile is not waited for, or it might never end.
Future<void> CodedStore::drain() {
  Stamp until = 0;
  {
    const auto map = map_.lock();
    until = make_stamp(map->epoch, map->version);
  }
  return writer_->add_job(
      [this, until]() -> Result<bool> {
        STOKER_ASSIGN(const size_t folded, folder_.paced({kFoldedAtOnce, kRowsAStep}, paces_.fold));
        if (folded > 0 && !map_.folded_up_to(until))
          return true;  // 0: all that is left cannot be folded
        STOKER_TRY(joining_.checkpoint());
        return false;
      },
      paces_.fold);
}

Future<void> CodedStore::scrub(std::shared_ptr<ScrubReport> report) {
  return writer_->add_job(
      [this, pass = scrubber_.begin(std::move(report))]() mutable -> Result<bool> {
        if (!pass) return resync_.step();
        STOKER_ASSIGN(const bool more, scrubber_.step(*pass));
        if (!more) pass.reset();
        return true;
      },
      paces_.repair);
}

Future<void> CodedStore::repair() {
  return writer_->add_job(
      [this, begun = false]() mutable -> Result<bool> {
        if (!begun) resync_.retry();
        begun = true;
        return resync_.step();
      },
      paces_.repair);
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
