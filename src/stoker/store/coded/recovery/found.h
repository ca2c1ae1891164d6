// Found: what lies in the logs and table areas of the shards when a store is opened. It is read as
// it stands; nothing is judged here, and nothing is written.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "stoker/store/coded/format/rounds.h"
#include "stoker/store/coded/recovery/look.h"
#include "stoker/store/coded/shards/shards.h"

namespace stoker::coded {

struct FoundVal {
  ValItem item;
  ValRef val;
  ShardSet seen = 0;           // shards that have it
  std::shared_ptr<Told> told;  // by frames of later rounds; none: by none
};
struct FoundCommit {
  std::string items;
  std::shared_ptr<CommitRecord> record;
  ShardSet seen = 0;
};
struct FoundStage {
  ParityEntry entry;
  Place place;
  SegmentRef held;
};
struct FoundFold {
  FoldItem item;
  ShardSet seen = 0;
  bool undone = false;  // not done everywhere
  std::vector<SegmentRef> held;
};

struct Found {
  // fold, stripe, chunk, row
  using StageKey = std::tuple<uint64_t, uint64_t, size_t, size_t>;

  ShardSet dark = 0;                                   // shards of which nothing can be read
  std::map<size_t, std::vector<uint64_t>> unreadable;  // blocks of the others, by shard
  bool has_image = false;                              // of the table; the newest is
  Stamp image_stamp = 0;                               // of this commit, and
  std::vector<std::string> image;                      // has these pieces
  std::map<ValKey, FoundVal> vals;
  std::map<Stamp, FoundCommit> commits;
  std::map<StageKey, FoundStage> stages;
  std::map<std::pair<uint64_t, uint64_t>, FoundFold> folds;  // by fold, stripe
  FoundRounds rounds;
  std::set<Stamp> commits_told;  // durable once, whether they are seen or not
  Stamp image_told = 0;          // likewise

  // With its COMMIT, if it needs one.
  bool counts(const FoundVal& val) const {
    return !val.item.needs_commit || commits.contains(val.item.stamp) ||
           commits_told.contains(val.item.stamp);
  }
};

// All of it in memory. A block that cannot be read is damaged, and takes no other one with it. The
// logs and image areas of these shards go on where they end.
Found read_shards(Shards& shards, ShardSet current);

}  // namespace stoker::coded
