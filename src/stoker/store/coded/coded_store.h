// CodedStore: the Store over the shards. docs/formats/coded_store.md is the protocol; the members
// are its owners, and each sees only those before it (tests/tidy_test.py holds that).
//
// Threads: the writer thread alone commits, folds, resyncs and changes the epoch, one after the
// other. Reads run on threads of their own and wait for I/O there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/codec/erasure.h"
#include "stoker/store/coded/commit/committer.h"
#include "stoker/store/coded/fold/folder.h"
#include "stoker/store/coded/fold/joining.h"
#include "stoker/store/coded/logs/log_set.h"
#include "stoker/store/coded/map/committed_map.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/rebuild/rebuilder.h"
#include "stoker/store/coded/shards/health.h"
#include "stoker/store/coded/shards/pace.h"
#include "stoker/store/coded/shards/shards.h"
#include "stoker/store/coded/shards/spare_memory.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/coded/upkeep/background.h"
#include "stoker/store/coded/upkeep/resync.h"
#include "stoker/store/coded/upkeep/scrubber.h"
#include "stoker/store/coded/write/writer.h"

namespace stoker {
struct FsckReport;
struct FsckOptions;
}  // namespace stoker

namespace stoker::coded {

class CodedStore final : public Store {
 public:
  static Result<std::unique_ptr<CodedStore>> open(const CodedPlan& plan, const Runtime& runtime,
                                                  const StoreOptions& options,
                                                  const CodedOptions& coded);
  ~CodedStore() override;

  Features features() const override { return kFeatures; }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix, std::string_view snapshot) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  StoreInfo info() const override;

  const Shape& shape() const { return shards_->shape(); }
  Health health() const;
  // Folds all that is in the log. Nothing else is done meanwhile.
  Future<void> fold_all();
  // Folds what is in the log by now, in steps between commits, as the rate of folds allows: the
  // next opening finds nothing to do.
  Future<void> drain();
  // Looks at everything that is on the live shards, once, and mends what differs from what the
  // others say; then as repair(). `report` is the writer's until it is done.
  Future<void> scrub(std::shared_ptr<ScrubReport> report);
  // What repair() will do, a sentence for each shard that does not count.
  std::vector<std::string> repair_plan() const;
  // The objects of which something is on no live shard, and cannot be decoded, as long as shards
  // are missing.
  std::vector<std::string> affected() const { return map_.affected(); }
  // Resyncs all shards that came back or were made anew, and mends blocks that were found bad,
  // between commits. Done when there is nothing left to do; a shard that could not be brought up to
  // date is told in Health.
  Future<void> repair();
  // Compares all that is there with what it should be; of a store that was opened read-only.
  void check(const FsckOptions& options, FsckReport& report);

 private:
  static constexpr Features kFeatures{.atomic = AtomicUnit::transaction,
                                      .update = true,
                                      .conditional = true,
                                      .verified = true,
                                      .versions = true};
  CodedStore(std::unique_ptr<Shards> shards, codec::ErasureCode code, const Runtime& runtime,
             std::string composition, const CodedOptions& coded);
  Status recover(bool read_only);
  Status replace(const StoreOptions& options, bool files);
  void tell_shards();
  void start(bool background);
  FoldParts fold_parts();

  SpareMemory spare_;  // outlives reads that are left behind
  const std::unique_ptr<Shards> shards_;
  const codec::ErasureCode code_;
  Budget& budget_;
  Pool& pool_;
  Paces paces_;
  CommittedMap map_;
  Reader reader_;
  LogSet logs_;
  Rebuilder rebuilder_;
  Joining joining_;
  Folder folder_;
  Committer committer_;
  Resync resync_;
  Scrubber scrubber_;
  Background background_;
  std::unique_ptr<Pool> readers_;   // threads of reads; null until the store is open
  std::unique_ptr<Writer> writer_;  // likewise
};

}  // namespace stoker::coded
