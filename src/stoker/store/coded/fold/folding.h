// Folding: one step of it, from the logs into the bases.
#pragma once

#include <bit>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "stoker/store/coded/fold/folder.h"

namespace stoker::coded {

// Rows that stand together and are newer in the same chunks.
struct Group {
  StripePtr stripe;
  size_t first = 0, count = 0;
  uint32_t dirty = 0;
  std::vector<Stripe::Newer> newer;  // by row, then by chunk of `dirty`
  // chunk c at c * count blocks: what the base holds, then what it will hold
  AlignedBytes blocks;
  // the newest of each dirty chunk, one behind the other; gone once they are in `blocks`
  AlignedBytes fresh;
  Grant grant;  // for these, and for the parity in the frames of the logs
  bool by_delta = false;
  std::vector<std::vector<uint32_t>> parity_crcs;

  size_t dirty_count() const { return static_cast<size_t>(std::popcount(dirty)); }
  std::span<std::byte> chunk(size_t c) const {
    return blocks.span().subspan(c * count * kBlock, count * kBlock);
  }
};

// One step of folding: some stripes from reading to durable headers. Writer thread.
class Folding {
 public:
  // `stand_ins` grows by the segments that stand for the bases of a fold that cannot be finished.
  Folding(const FoldParts& parts, std::vector<SegmentRef>& stand_ins)
      : parts_(parts), shape_(parts.shards.shape()), stand_ins_(stand_ins) {}
  // How many stripes were folded.
  Result<size_t> run(const FoldBounds& bounds);
  bool left_some() const { return !left_.empty(); }

 private:
  Status choose(const FoldBounds& bounds);
  using Overlay = std::map<size_t, Stripe::Newer>;
  void bound_by_age(Version oldest);
  size_t rows_of_a_frame() const;
  bool waited(Version number) const { return number <= until_; }
  size_t waiting_rows(const Stripe& stripe) const;
  void add_groups(const StripePtr& stripe, size_t from_row, size_t& rows_left);
  void add_rows(const StripePtr& stripe, Overlay::const_iterator at, Overlay::const_iterator end,
                size_t& rows_left);
  Status take_memory();
  void compute_all();
  void fetch_newest();
  Status fetch_newest(std::span<Group> groups);
  void plan_newest(Group& group, std::vector<Run>& runs);
  void fetch_bases();
  uint32_t choose_way(Group& group) const;
  Status compute(Group& group);
  void leave(uint64_t stripe, const Error& why);
  void drop_left();
  Status stage();
  Status decide();
  Status append(std::map<size_t, FrameBuilder>& frames, std::map<size_t, LogFrame>& written);
  Status apply();
  void finish();
  void rejoin();
  void stand_in();
  Headers& next_headers(const StripePtr& stripe) { return next_.at(stripe->id); }
  void set_folding(bool folding);

  const FoldParts& parts_;
  const Shape& shape_;
  std::vector<SegmentRef>& stand_ins_;
  Version until_ = UINT64_MAX;  // rows of which all is newer stay in the log
  std::vector<StripePtr> stripes_;
  std::vector<Group> groups_;
  std::map<uint64_t, uint64_t> ids_;      // of the folds, by stripe
  std::map<uint64_t, Headers> next_;      // by stripe: as they will be
  std::map<uint64_t, std::string> left_;  // stripes that cannot be folded, and why
  struct Staged {
    size_t row, position;
    Place place;
    size_t at;  // of the block, in its frame
  };
  std::map<uint64_t, std::vector<Staged>> staged_;  // by stripe
  std::vector<SegmentRef> held_;                    // what a crash would need to roll forward
};

}  // namespace stoker::coded
