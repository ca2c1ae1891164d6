// Recovery: from what lies on the shards to a store that serves: steps 2 to 10 of *Open* in
// docs/formats/coded_store.md. What it finds it leaves with the owners that it is given.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "stoker/store/coded/folder.h"
#include "stoker/store/coded/headers.h"
#include "stoker/store/coded/look.h"
#include "stoker/store/coded/rounds.h"

namespace stoker::coded {

// Used once, before the store has threads.
class Recovery {
 public:
  Recovery(const FoldParts& parts, Folder& folder)
      : map_(parts.map),
        shards_(parts.shards),
        shape_(parts.shards.shape()),
        reader_(parts.reader),
        logs_(parts.logs),
        rebuilder_(parts.rebuilder),
        joining_(parts.joining),
        folder_(folder) {}
  Status run(bool read_only);

 private:
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
    bool undone = false;
    std::vector<SegmentRef> held;
  };
  // fold, stripe, chunk, row
  using StageKey = std::tuple<uint64_t, uint64_t, size_t, size_t>;

  // Everything that is read, in memory. A block that cannot be read is damaged, and takes no other
  // one with it. Shards of which nothing can be read:
  ShardSet read_all(ShardSet current);
  void read_images(size_t shard);
  void read_log(size_t shard);
  AlignedBytes read_area(size_t shard, uint64_t offset, size_t bytes);
  void take(size_t shard, const SegmentRef& segment, uint64_t frame_at, FrameContent content);
  void take_round(const SegmentRef& segment, const RoundItem& round);
  FoundVal& found_val(const ValItem& item);
  Status load_table();
  Status load_raw();
  void choose_folds();
  void choose_vals();
  void find_gone();
  void let_go();
  // Everything that is written.
  Status settle();
  Status restore_reserve();
  Status make_readable();
  Status append(std::map<size_t, FrameBuilder>& frames, std::map<size_t, LogFrame>& written);
  Status append_commits();
  Status append_vals();
  Status append_folds();
  Status roll_forward();
  Status catch_up();
  Status roll_forward(const StripePtr& stripe);
  bool lags(const Stripe& stripe, const RawHeaders& raw, size_t position) const;
  StripePtr find_stripe(uint64_t id) const;
  bool counts(const FoundVal& found) const {
    return !found.item.needs_commit || commits_.contains(found.item.stamp) ||
           commits_told_.contains(found.item.stamp);
  }

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  LogSet& logs_;
  Rebuilder& rebuilder_;
  Joining& joining_;
  Folder& folder_;
  Stamp image_stamp_ = 0;
  bool image_found_ = false;
  std::map<size_t, std::vector<uint64_t>> unreadable_;  // blocks of logs and table areas, by shard
  ShardSet readable_ = 0;                               // shards with one that is not
  std::vector<std::string> image_;
  std::map<ValKey, FoundVal> vals_;
  std::map<Stamp, FoundCommit> commits_;
  std::map<StageKey, FoundStage> stages_;
  std::map<std::pair<uint64_t, uint64_t>, FoundFold> folds_;  // by fold, stripe
  FoundRounds rounds_;
  std::set<Stamp> commits_told_;  // durable once, whether they are seen or not
  Stamp image_told_ = 0;
  std::string hidden_;  // what is lost, where nobody knows what it changed
  std::map<uint64_t, std::weak_ptr<Stripe>> stripes_;
  std::map<uint64_t, std::string> object_of_;  // the key, by stripe
  std::map<uint64_t, RawHeaders> raw_;
  ShardSet full_ = 0;  // live shards whose logs have no room for what they lack
};

}  // namespace stoker::coded
