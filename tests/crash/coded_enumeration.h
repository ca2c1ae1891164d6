// Enumeration of crashes of a coded store. A named state is a short play on a store; its I/O is
// recorded, and every set of disks that a power cut at any of its durable steps and the loss of
// shards could have left behind is recovered and checked: what was acknowledged is there, nothing
// is mixed, what was chosen once stays, parity fits the data.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "stoker/testing/coded_world.h"
#include "stoker/testing/recording.h"

namespace stoker {

// A code: data and parity chunks of a stripe.
struct KM {
  size_t k, m;
  std::string text() const { return std::to_string(k) + "+" + std::to_string(m); }
};

// Where a play is on: the store, opened as often as the play wants, and the timeline of what was
// committed.
class Stage {
 public:
  Stage(coded::CodedWorld& world, Timeline& timeline) : world_(world), timeline_(timeline) {}
  Status open();
  void close();
  coded::CodedStore& store() { return *store_; }
  Recorder& recorder() { return *recorder_; }

  Status commit(const std::vector<Recorder::Change>& changes) {
    return recorder_->commit(changes, Durability::durable);
  }
  Status fold() { return store_->fold_all().wait(); }
  Status repair() { return store_->repair().wait(); }
  // These commits wait while a fold is under way, and follow it as one batch.
  Status commit_during_a_fold(const std::vector<std::vector<Recorder::Change>>& commits);
  // The store must be closed. What is away, or is back and not resynced yet, counts among the lost.
  void take_away(size_t shard);
  void bring_back(size_t shard);
  void troubled(coded::ShardSet shards);

 private:
  coded::CodedWorld& world_;
  Timeline& timeline_;
  std::unique_ptr<coded::CodedStore> store_;
  std::optional<Recorder> recorder_;
  std::map<size_t, SimImage> away_;
};

// The store of all plays, small.
Result<std::unique_ptr<coded::CodedStore>> open_store(coded::CodedWorld& world);
// What is there before a play begins.
Status prepare(Stage& on);

struct NamedState {
  std::string name;
  std::function<Status(Stage&)> play;
  enum class Kind : uint8_t {
    steps,
    torn_apply,
    lost_stage,
    in_recovery,
    rotten_pages,
    gone_records
  } kind = Kind::steps;
};
const std::vector<NamedState>& named_states();

struct Enumerated {
  uint64_t states = 0;  // what a crash can leave on the disks
  uint64_t cases = 0;   // of them recovered, each without a set of shards
  // lost at once in some case, and there are that can be beside what is in trouble
  uint64_t failure_sets = 0, failure_sets_all = 0;
  uint64_t lived_on = 0;  // written to afterwards, the lost ones back and resynced, others lost
  uint64_t violations = 0;
  std::string first;  // violation
};

struct EnumerationEffort {
  uint64_t cases = 100;              // about as many, spread evenly over all there are
  uint64_t stop_after = UINT64_MAX;  // violations
  // and as many more as it takes until each set of lost shards was there, of those that can be with
  // what is in trouble
  bool every_set = false;
};
// The same cases for the same seed. Every case takes the set of lost shards that was there least
// often.
Enumerated enumerate(const KM& code, const NamedState& state, uint64_t seed,
                     const EnumerationEffort& effort);

}  // namespace stoker
