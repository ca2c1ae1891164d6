// Scrub: everything on the live shards is looked at once, in steps between commits, and mended from the others where it is damaged.
#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

#include "stoker/base/log.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/recovery.h"

namespace stoker::coded {

class Scrubbing {
 public:
  Scrubbing(CodedStore& store, std::shared_ptr<ScrubReport> report) : store_(store), shape_(store.shape_), shards_(store.shards()), report_(std::move(report)) {}

  // False: all was looked at.
  Result<bool> step() {
    if (const std::lock_guard lock(store_.mutex_); store_.refused_) return *store_.refused_;
    if (!begun_) return begin();
    if (segment_ < shape_.segments) return read_segments();
    if (!logs_done_) return judge_logs();
    if (next_ < stripes_.size()) return check_chunk();
    if (unreadable_ != 0) return renew_log();
    const std::lock_guard lock(store_.mutex_);
    store_.counts_.doing = {};
    return false;
  }

 private:
  using ValKey = std::tuple<Stamp, uint64_t, size_t, size_t>;  // stamp, stripe, chunk, first row
  struct Log {
    std::set<ValKey> wanted;             // when the scrub began
    std::map<ValKey, bool> seen;         // whether it needs its COMMIT
    std::set<Stamp> commits;
  };
  static ValKey key_of(const Val& val) { return {val.stamp, val.stripe, val.chunk, val.first}; }
  template <typename Each>
  void each_live(Each each) const {
    const ShardSet set = store_.live();
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((set & shard_bit(shard)) != 0) each(shard);
    }
  }

  Result<bool> begin() {
    begun_ = true;
    STOKER_TRY(superblocks());
    STOKER_TRY(tables());
    each_live([&](size_t shard) {
      Log& log = logs_[shard];
      for (const auto& [stripe, val] : store_.vals_of(shard)) log.wanted.insert(key_of(*val));
    });
    std::lock_guard lock(store_.mutex_);
    begun_at_ = make_stamp(store_.epoch_, store_.version_);
    for (const auto& [key, object] : store_.table_.objects()) {
      for (const StripePtr& stripe : object->stripes) {
        if (stripe) stripes_.emplace_back(key, stripe);
      }
    }
    store_.counts_.doing = {"scrubbing", 0, stripes_.size() * shape_.n(), 0};
    return true;
  }

  // Both copies as they were written last. The bad one is written first.
  Status superblocks() {
    ShardSet failed = 0;
    std::string why;
    each_live([&](size_t shard) {
      Shard& each = shards_[shard];
      const std::string expected = encode_superblock(each.super);
      std::optional<size_t> bad;
      for (const size_t copy : {0, 1}) {
        AlignedBytes block(kBlock);
        ShardBatch batch(shards_, Priority::scrub);
        batch.read(shard, kSuperblockAt[copy], block.slice());
        const bool right = batch.run() == 0 && std::memcmp(block.data(), expected.data(), kSuperblockBytes) == 0;
        if (!right) bad = copy;
        report_->superblocks += right ? 0 : 1;
      }
      if (!bad) return;
      if (((each.super.counter + 1) & 1) != *bad) ++each.super.counter;
      failed |= shards_.write_superblocks(shard_bit(shard), why);
    });
    return failed == 0 ? Status() : store_.drop_shards(failed, why);
  }

  // Every shard has the newest image whole; and can be read, or the next opening would leave it out.
  Status tables() {
    each_live([&](size_t shard) {
      Stamp newest = 0;
      for (size_t area = 0; area < 2; ++area) {
        AlignedBytes bytes(shape_.area_bytes);
        ShardBatch batch(shards_, Priority::scrub);
        batch.read(shard, shape_.area_at(area), bytes.slice());
        if (batch.run() != 0) unreadable_ |= shard_bit(shard);
        store_.pace_.spend(bytes.size());
        if (const auto image = read_table_image(shards_.store(), bytes.span()); image && batch.ok(0)) newest = std::max(newest, image->stamp);
      }
      report_->tables += newest == store_.image_stamp_ ? 0 : 1;
    });
    return report_->tables == 0 ? Status() : store_.checkpoint();
  }

  // One segment of every shard.
  Result<bool> read_segments() {
    each_live([&](size_t shard) {
      AlignedBytes bytes(shape_.segment_bytes);
      ShardBatch batch(shards_, Priority::scrub);
      batch.read(shard, shape_.segment_at(segment_), bytes.slice());
      store_.pace_.spend(bytes.size());
      if (batch.run() != 0) {
        unreadable_ |= shard_bit(shard);
        return;
      }
      Log& log = logs_[shard];
      read_segment(shape_, shards_.store(), shard, segment_, shards_[shard].super.log_floor, bytes.span(), [&](uint64_t, const FrameContent& content) {
        for (const Item& item : content.items) {
          if (const auto* val = std::get_if<ValItem>(&item)) {
            auto [at, added] = log.seen.emplace(ValKey{val->stamp, val->stripe, val->chunk, val->first}, val->needs_commit);
            at->second = at->second && val->needs_commit;
          }
          if (const auto* commit = std::get_if<CommitItem>(&item)) log.commits.insert(commit->stamp);
        }
      });
    });
    ++segment_;
    return true;
  }

  // What is needed of the logs and was needed when the scrub began; the segments that hold it were not begun anew since.
  Result<bool> judge_logs() {
    logs_done_ = true;
    std::set<Stamp> commits;
    for (const auto& [shard, log] : logs_) {
      for (const Stamp stamp : log.commits) {
        if (stamp > store_.image_stamp_ && stamp <= begun_at_) commits.insert(stamp);
      }
    }
    uint64_t commits_lost = 0;
    ShardSet touched = 0;
    Status status;
    each_live([&](size_t shard) {
      const Log& log = logs_[shard];
      if ((unreadable_ & shard_bit(shard)) != 0 || !status) return;
      for (const Stamp stamp : commits) commits_lost += log.commits.contains(stamp) ? 0 : 1;
      auto lacking = store_.vals_of(shard);
      std::erase_if(lacking, [&](const auto& each) {
        const ValKey key = key_of(*each.second);
        const auto seen = log.seen.find(key);
        const bool intact = seen != log.seen.end() && (!seen->second || log.commits.contains(std::get<0>(key)));
        return intact || !log.wanted.contains(key);
      });
      if (lacking.empty()) return;
      report_->records += lacking.size();
      touched |= shard_bit(shard);
      status = store_.append_settled(shard, lacking);
    });
    report_->records += commits_lost;
    if (!status && status.error().code != Code::out_of_space) return status.error();
    STOKER_TRY(store_.flush(touched));
    if (!status) {
      // The log has no room for a second copy: what is newer there goes into the bases of all.
      size_t folded = 0, all = 0;
      do {
        STOKER_ASSIGN(folded, store_.fold_step(SIZE_MAX));
        all += folded;
      } while (folded > 0);
      if (all == 0) report_->lost.push_back(status.error().what);
    }
    if (commits_lost > 0 || !status) STOKER_TRY(store_.checkpoint());
    return true;
  }

  // A shard whose log or table cannot be read is left out and brought back, which makes them readable; after all chunks were looked at, and one after
  // the other, so that nothing is left to fewer shards than it must be.
  Result<bool> renew_log() {
    STOKER_ASSIGN(const bool more, store_.repair_step());
    if (more) return true;
    const auto shard = static_cast<size_t>(std::countr_zero(unreadable_));
    const ShardSet rest = store_.live() & ~shard_bit(shard);
    unreadable_ &= ~shard_bit(shard);
    if (rest == store_.live()) return true;  // it failed meanwhile
    if (!shape_.writable(rest) || !report_->lost.empty() || (left_out_ & ~rest) != 0) {
      report_->lost.push_back("the log or table of '" + shards_[shard].path + "' has sectors that cannot be read, and too little is left without it to leave it out: bring missing disks back first");
      return true;
    }
    ++report_->records;
    left_out_ |= shard_bit(shard);
    STOKER_TRY(store_.drop_shards(shard_bit(shard), "its log or table has sectors that cannot be read"));
    return true;
  }

  Result<bool> check_chunk() {
    const auto& [key, weak] = stripes_[next_];
    const StripePtr stripe = weak.lock();
    if (stripe && (store_.live_positions(*stripe) >> position_ & 1) != 0) {
      const size_t shard = stripe->shards[position_];
      const Status loaded = store_.load_headers(stripe, Priority::scrub);
      const auto rebuilt = loaded ? store_.rebuild(stripe, position_) : Result<CodedStore::Rebuilt>(loaded.error());
      if (!loaded) {
        report_->lost.push_back("'" + key + "': " + loaded.error().what);
      } else if (!rebuilt) {
        STOKER_TRY(store_.drop_shards(shard_bit(shard), rebuilt.error().what));  // it cannot be written
      } else {
        report_->blocks += rebuilt->blocks;
        report_->pages += rebuilt->pages;
        if (rebuilt->lost > 0) report_->lost.push_back(std::to_string(rebuilt->lost) + " blocks of '" + key + "' on '" + shards_[shard].path + "' cannot be decoded: " + rebuilt->why);
      }
      ++report_->chunks;
      report_->bytes += shape_.chunk_bytes;
    }
    if (++position_ == shape_.n()) {
      position_ = 0;
      ++next_;
    }
    std::lock_guard lock(store_.mutex_);
    store_.counts_.doing.done = next_ * shape_.n() + position_;
    store_.counts_.doing.bytes = report_->bytes;
    return true;
  }

  CodedStore& store_;
  const Shape& shape_;
  Shards& shards_;
  const std::shared_ptr<ScrubReport> report_;
  bool begun_ = false, logs_done_ = false;
  Stamp begun_at_ = 0;
  size_t segment_ = 0;                   // read next
  std::map<size_t, Log> logs_;           // by shard
  ShardSet unreadable_ = 0;              // log or table, in part
  ShardSet left_out_ = 0;                // and brought back for that
  std::vector<std::pair<std::string, std::weak_ptr<Stripe>>> stripes_;
  size_t next_ = 0, position_ = 0;       // looked at next
};

Future<void> CodedStore::scrub(std::shared_ptr<ScrubReport> report) {
  const auto scrubbing = std::make_shared<Scrubbing>(*this, std::move(report));
  return add_job([this, scrubbing, scrubbed = false]() mutable -> Result<bool> {
    if (scrubbed) return repair_step();
    STOKER_ASSIGN(const bool more, scrubbing->step());
    scrubbed = !more;
    return true;
  });
}

std::vector<std::string> CodedStore::affected() const {
  std::vector<std::string> keys;
  std::lock_guard lock(mutex_);
  const auto is_live = [&](size_t shard) { return (live_ & shard_bit(shard)) != 0; };
  for (const auto& [key, object] : table_.objects()) {
    uint64_t left = object->bytes;
    bool lost = false;
    for (const StripePtr& stripe : object->stripes) {
      const uint64_t bytes = std::min<uint64_t>(left, shape_.stripe_bytes());
      left -= bytes;
      if (!stripe) continue;
      const auto end_of_data = stripe->shards.begin() + static_cast<ptrdiff_t>((bytes + shape_.chunk_bytes - 1) / shape_.chunk_bytes);
      const bool decodes = static_cast<size_t>(std::count_if(stripe->shards.begin(), stripe->shards.end(), is_live)) >= shape_.k;
      lost = lost || (!decodes && !std::all_of(stripe->shards.begin(), end_of_data, is_live));
    }
    if (lost) keys.push_back(key);
  }
  return keys;
}

}  // namespace stoker::coded
