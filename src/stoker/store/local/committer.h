// Committer: commits on their way into the journal: the queue of them, the journal, and what
// deferred commits leave to the next record. It knows nothing of what they do to the map.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/io/loop.h"
#include "stoker/store/local/journal.h"
#include "stoker/store/local/map.h"
#include "stoker/store/local/staged.h"
#include "stoker/store/local/volume.h"
#include "stoker/store/store.h"

namespace stoker::local {

using StatePtr = std::shared_ptr<TransactionState>;

// A commit, snapshot or drop on its way into the journal; or a flush, which makes durable what was
// deferred before it.
struct CommitEntry {
  enum class Kind : uint8_t { commit, snapshot, drop, flush } kind = Kind::commit;
  Durability durability = Durability::durable;
  StatePtr state;
  Promise<Version> promise;
  std::string name;
  Promise<void> named;  // of all but commits
  std::string items;    // what it does to the map
  Version version = 0;

  // Whether it can be depends on what the commits before it leave: it is the first of its group.
  bool depends() const {
    return kind == Kind::snapshot || kind == Kind::drop ||
           (state && (!state->required.empty() || !state->name.empty()));
  }
};
using CommitGroup = std::vector<std::unique_ptr<CommitEntry>>;

class Committer {
 public:
  Committer(Loop& loop, const VolumeSet& volumes, Journal journal)
      : loop_(loop), volumes_(volumes), journal_(std::move(journal)) {}

  // The queue, in order of the commit() calls. With the store's mutex.
  void push(std::unique_ptr<CommitEntry> entry);
  size_t waiting() const { return queue_.size(); }
  // What is ready at its head and may share a record: commits that wait together, or one snapshot
  // or drop. Deferred ones at the head go alone, since nothing need be written for them.
  CommitGroup next_group();
  // One thread at a time takes entries out of it: the worker, or the caller of a deferred commit.
  // False: another one does.
  bool claim();
  void release();
  bool claimed() const { return claimed_; }

  // All that follow are for who has claimed it.
  uint64_t payload_max() const { return journal_.payload_max(); }  // bytes of a record or an image
  // Carried by the next record.
  void defer(const CommitEntry& entry);
  // Flushes these volumes (a bit each) and writes the record, or an image of the map if no record
  // has room. Nobody else changes `map`, which `mutex` guards, meanwhile.
  Status make_durable(const std::string& items, uint64_t touched, const Map& map, Mutex& mutex)
      EXCLUDES(mutex);

 private:
  Status append(const std::string& record);
  Status write_image(const Map& map);

  Loop& loop_;
  const VolumeSet& volumes_;
  std::deque<std::unique_ptr<CommitEntry>> queue_;
  bool claimed_ = false;
  Journal journal_;
  // of deferred commits that no record carries; none: too many for one
  std::optional<std::string> deferred_items_ = std::string();
  uint64_t deferred_touched_ = 0;
};

}  // namespace stoker::local
