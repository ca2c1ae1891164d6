// LocalStore: opening, closing and telling about itself.
#include "stoker/store/local/store.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/io/nvme/command.h"
#include "stoker/io/spdk/engine.h"
#include "stoker/store/local/local_store.h"

namespace stoker::local {
namespace {

constexpr uint64_t kGrantStep = 64 * kKiB;

// A store that is not finished gets its first generation between "making" and "ready": whatever a
// crash leaves, one of the two is true of it.
Status finish_making(VolumeSet& volumes, Journal& journal, const Map& map) {
  const uint32_t opened = journal.next_number();
  STOKER_TRY(volumes.write_headers(VolumeState::making, opened, 0));
  STOKER_TRY(journal.begin(map));
  STOKER_TRY(volumes.write_headers(VolumeState::ready, opened, 0));
  volumes.keep_files();
  return {};
}

// The engine follows from the volumes: drives named by their PCI addresses need one that drives
// them. Null: the Loop that there is.
Result<std::unique_ptr<Loop>> make_own_loop(const std::vector<std::string>& paths,
                                            const Runtime& runtime) {
  const auto driven = std::count_if(paths.begin(), paths.end(), [](const std::string& path) {
    return nvme::is_pci_target(path);
  });
  if (driven == 0) return std::unique_ptr<Loop>();
  if (static_cast<size_t>(driven) != paths.size())
    return fail(Code::invalid_argument,
                "the volumes of a store are all drives named by their PCI addresses, or none is: "
                "'{}' and the others do not share an engine",
                paths[0]);
  LoopOptions options;
  options.trace = runtime.trace;
  options.follows = &runtime.loop;
  STOKER_ASSIGN(auto engine, make_pci_engine(paths, options.depth));
  return Loop::make(std::move(engine), options, runtime.loop.clock());
}

}  // namespace

Result<std::unique_ptr<Store>> LocalStore::open(std::vector<std::string> paths,
                                                const Runtime& process, const StoreOptions& options,
                                                const LocalOptions& local) {
  STOKER_ASSIGN(auto own_loop, make_own_loop(paths, process));
  const Runtime runtime{own_loop ? *own_loop : process.loop, process.pool, process.budget,
                        process.trace};
  STOKER_ASSIGN(VolumeSet volumes, VolumeSet::open(paths, runtime.loop, options, local));
  Journal journal(runtime.loop, volumes);
  std::unique_ptr<Map> map;
  if (volumes.fresh()) {
    map = std::make_unique<Map>(volumes.limits());
    STOKER_TRY(finish_making(volumes, journal, *map));
  } else {
    auto recovered = journal.recover(volumes.limits());
    if (!recovered) return opening_error(recovered.error(), paths[0]);
    map = std::move(*recovered);
    if (const Status same = volumes.check_same_time(journal.number()); !same) {
      if (!options.read_only) return same.error();
      // what of it is not of then differs from its checksum
      log().warn("{}", same.error().message());
    }
    for (const std::string& note : journal.mended())
      log().info("the store '{}': {}", paths[0], note);
  }
  Allocator allocator(map->limits());
  if (const Status status = allocator.take_all(*map); !status)
    return opening_error(status.error(), paths[0]);
  if (!options.read_only && !volumes.fresh()) {
    STOKER_TRY(volumes.restore_sizes());
    STOKER_TRY(journal.sync());
    STOKER_TRY(volumes.write_headers(VolumeState::ready, journal.next_number(), journal.number()));
    // From here on no bytes of an older generation can come back, whatever the crash before left in
    // the areas.
    STOKER_TRY(journal.begin(*map));
  }
  std::unique_ptr<LocalStore> store(new LocalStore(std::move(own_loop), runtime, std::move(volumes),
                                                   std::move(map), std::move(allocator),
                                                   std::move(journal), options));
  {
    MutexLock lock(store->mutex_);
    STOKER_TRY(store->charge_map(0));  // what was recovered
  }
  return std::unique_ptr<Store>(std::move(store));
}

LocalStore::LocalStore(std::unique_ptr<Loop> own_loop, const Runtime& runtime, VolumeSet volumes,
                       std::unique_ptr<Map> map, Allocator allocator, Journal journal,
                       const StoreOptions& options)
    : own_loop_(std::move(own_loop)),
      runtime_(runtime),
      volumes_(std::move(volumes)),
      read_only_option_(options.read_only),
      chunk_bytes_(volumes_[0].header.chunk_bytes),
      loads_(volumes_.size()),
      map_(std::move(map)),
      allocator_(std::move(allocator)),
      map_charged_(map_->memory_bytes()),
      next_version_(map_->version()),
      durable_(map_->version()),
      committer_(runtime_.loop, volumes_, std::move(journal)) {}

// Nothing is made durable that was not: closing is no commit.
LocalStore::~LocalStore() {
  MutexLock lock(mutex_);
  idle_.wait(lock, [this]() REQUIRES(mutex_) { return in_flight_ == 0; });
  STOKER_CHECK(readers_.empty() && limbo_.empty());
  STOKER_CHECK(!committer_.claimed() && committer_.waiting() == 0);
}

// Draws on the budget in steps; `bytes` more of map are about to come.
Status LocalStore::charge_map(uint64_t bytes) {
  map_charged_ += bytes;
  if (map_charged_ <= map_granted_) return {};
  map_charged_ = map_->memory_bytes() + bytes;  // what was removed meanwhile counts no more
  if (map_charged_ <= map_granted_) return {};
  const uint64_t more = align_up(map_charged_ - map_granted_, kGrantStep);
  STOKER_ASSIGN(Grant grant, runtime_.budget.take(more, "the map of the store"));
  map_grants_.push_back(std::move(grant));
  map_granted_ += more;
  return {};
}

std::string LocalStore::composition() const {
  std::string text = "local:";
  for (const Volume& volume : volumes_.all())
    text += (volume.header.index == 0 ? "" : ",") + volume.path;
  return text;
}

StoreInfo LocalStore::info() const {
  MutexLock lock(mutex_);
  StoreInfo info;
  info.composition = composition();
  info.committed = map_->version();
  info.durable = durable_;
  info.capacity_bytes = allocator_.capacity_bytes();
  STOKER_CHECK(limbo_blocks_ * kBlock <= info.capacity_bytes);
  info.used_bytes = info.capacity_bytes - limbo_blocks_ * kBlock;
  info.map_bytes = map_->memory_bytes();
  if (read_only_option_) info.read_only = "it was opened read-only";
  if (poisoned_) info.read_only = poisoned_->what;
  for (const Snapshot& snapshot : map_->snapshots())
    info.snapshots.push_back({snapshot.name, snapshot.version});
  for (size_t volume = 0; volume < volumes_.size(); ++volume) {
    const VolumeLoad& load = loads_[volume];
    const uint64_t free_bytes = free_blocks(volume) * kBlock;
    STOKER_CHECK(free_bytes <= info.used_bytes);
    info.used_bytes -= free_bytes;
    info.volumes.push_back({volumes_[volume].path, load.read_bytes(), load.written_bytes(),
                            load.bytes_per_second(), volumes_[volume].header.data_bytes, free_bytes,
                            load.refused_bytes()});
  }
  return info;
}

}  // namespace stoker::local

namespace stoker {

Result<std::unique_ptr<Store>> open_local_store(std::vector<std::string> volumes,
                                                const Runtime& runtime, const StoreOptions& options,
                                                const LocalOptions& local) {
  return local::LocalStore::open(std::move(volumes), runtime, options, local);
}

}  // namespace stoker
