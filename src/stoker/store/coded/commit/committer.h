// Committer: a batch of commits is written in two rounds at most, and the map flips.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/codec/erasure.h"
#include "stoker/memory/budget.h"
#include "stoker/store/coded/commit/staged.h"
#include "stoker/store/coded/fold/folder.h"

namespace stoker::coded {

struct CommitRequest {
  std::shared_ptr<TransactionState> state;
  Promise<Version> committed;
};

// Writer thread.
class Committer {
 public:
  // Sees what folds see, and folds where a log has no room.
  Committer(const FoldParts& parts, Folder& folder)
      : map_(parts.map),
        shards_(parts.shards),
        shape_(parts.shards.shape()),
        reader_(parts.reader),
        logs_(parts.logs),
        joining_(parts.joining),
        code_(parts.code),
        budget_(parts.budget),
        folder_(folder) {}

  // Only the first of them may have conditions: they are of what the commits before it left. Each
  // is answered.
  void commit(std::vector<CommitRequest> batch);
  // What a commit may add to a shard's log at most: VALs, and the record that names its stripes.
  uint64_t log_bytes(const TransactionState& state) const;

 private:
  // Blocks of one chunk on their way into the logs.
  struct NewVal {
    ValRef val;
    StripePtr stripe;
    std::span<const std::byte> blocks;
  };
  // What a commit does to an object, beside its bytes.
  struct Touched {
    std::string key;
    bool made = false;       // anew
    uint64_t announced = 0;  // if so, its first size
    std::optional<Class> stated;
    std::vector<std::pair<uint64_t, size_t>> writes;
  };
  // What one commit of a batch is about to do.
  struct Prepared {
    CommitRequest* request = nullptr;
    Stamp stamp = 0;
    bool needs_commit = false;
    std::string items;
    std::vector<NewVal> vals;
    std::map<uint64_t, StripePtr> fresh;
    std::vector<LogSet::Beside> pages;  // of those, that go with the VALs
    std::vector<Touched> touched;
    Status status;
  };
  // Header pages of fresh stripes.
  struct PagesUnderWay {
    PagesUnderWay(Shards& shards, std::vector<LogSet::Beside> all)
        : pages(std::move(all)), batch(shards, Priority::write_back) {}
    const std::vector<LogSet::Beside> pages;
    ShardBatch batch;  // waits before they go
  };
  Status make_room(size_t bytes);
  Status check_requirements(const TransactionState& state) const;
  void prepare(Prepared& commit, uint64_t& table_bytes);
  std::vector<StagedStripe*> write_better(Prepared& commit, TransactionState& state);
  Status name_stripes(Prepared& commit, const TransactionState& state, uint64_t& table_bytes) const;
  Result<Grant> take_frames(const std::vector<CommitRequest>& batch) const;
  Status write_fresh(const Prepared& commit, StagedStripe& staged,
                     std::vector<LogSet::Beside>* later);
  void bound_pages(Prepared& commit, size_t& waiting);
  void start_pages(std::vector<LogSet::Beside> pages);
  void finish_pages();
  Status write_pages(const std::vector<LogSet::Beside>& pages, ShardSet& failed);
  Headers plan_fresh(const Prepared& commit, const StagedStripe& staged) const;
  Status write_fresh_rows(const StagedStripe& staged, size_t first, const Scratch& memory,
                          uint32_t positions, Headers& headers, ShardSet& failed);
  Status append_vals(std::vector<Prepared>& commits, ShardSet& touched);
  Status append_commits(std::vector<Prepared>& commits);
  void flip(std::vector<Prepared>& commits);

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  LogSet& logs_;
  Joining& joining_;
  const codec::ErasureCode& code_;
  Budget& budget_;
  Folder& folder_;
  // Between commits there are none.
  std::deque<std::unique_ptr<PagesUnderWay>> pages_;  // the oldest first
  Status pages_failed_;                               // what became of the others
};

}  // namespace stoker::coded
