// fsck of a coded store: what is there is compared with what it should be; nothing is written.
#include "stoker/store/local/fsck.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <set>

#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/recovery/look.h"

namespace stoker::coded {

class Checking {
 public:
  Checking(CommittedMap& map, Shards& shards, Reader& reader, Rebuilder& rebuilder,
           Stamp image_stamp, const FsckOptions& options, FsckReport& report)
      : map_(map),
        shards_(shards),
        shape_(shards.shape()),
        reader_(reader),
        rebuilder_(rebuilder),
        image_stamp_(image_stamp),
        options_(options),
        report_(report) {}

  void run(const Health& health) {
    report_.committed = map_.lock()->version;
    report_.generation = health.epoch;
    report_.records = health.newer_blocks;
    for (const std::string& trouble : health.troubles)
      report_.problems.push_back("a shard does not count: " + trouble);
    if (!health.troubles.empty())
      report_.advice.emplace_back(
          "bring missing disks back; a shard that is there and not up to date is resynced by "
          "`stoker repair`, or when the store is opened for writing; a disk that is lost for good "
          "is replaced by `stoker repair --replace`");
    if (const auto keys = map_.affected(); !keys.empty()) {
      std::string names;
      for (const std::string& key : keys) names += " '" + key + "'";
      report_.problems.push_back(
          "without the missing shards these objects cannot be read in full:" + names);
    }
    report_.problems.insert(report_.problems.end(), health.gone.begin(), health.gone.end());
    scrubbed(health.scrubbed);
    if (health.newer_blocks > 0)
      report_.notes.push_back(std::to_string(health.newer_blocks) +
                              " blocks are newer in the logs than in the bases, as after a crash "
                              "or while it is in use");
    const ShardSet live = map_.live();
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((shards_.present() & shard_bit(shard)) != 0) superblocks(shard);
      if ((live & shard_bit(shard)) != 0) table(shard);
    }
    logs();
    std::vector<std::pair<std::string, ObjectPtr>> objects;
    {
      const auto map = map_.lock();
      for (const auto& [key, object] : map->table.objects()) objects.emplace_back(key, object);
    }
    uint64_t total = 0;
    for (const auto& [key, object] : objects) total += object->bytes;
    for (const auto& [key, object] : objects) {
      ++report_.objects;
      if (!options_.quick) check(key, *object);
      report_.data_bytes += object->bytes;
      if (options_.progress && !options_.quick) options_.progress(report_.data_bytes, total);
    }
    // With too few shards left to write to it nothing can be mended, and what is lost is lost with
    // the others.
    if (report_.problems.size() > health.troubles.size() && shape_.writable(live))
      report_.advice.emplace_back(
          "`stoker scrub` mends from the others what is damaged on one disk");
    if (single_copies_ > 0)
      report_.notes.push_back(std::to_string(single_copies_) +
                              " header pages have one intact copy instead of two, as after a "
                              "crash: `stoker scrub` writes the other");
  }

 private:
  const std::string& path(size_t shard) const { return shards_[shard].path; }

  void scrubbed(const LastScrub& last) {
    if (last.ended_at == 0) return;
    report_.scrubbed_at = last.ended_at;
    const auto seconds = static_cast<std::time_t>(last.ended_at);
    std::tm utc{};
    char when[40] = "";
    if (gmtime_r(&seconds, &utc) != nullptr)
      std::strftime(when, sizeof when, "%Y-%m-%d %H:%M UTC", &utc);
    report_.notes.push_back("the last scrub ended " + std::string(when) +
                            "; damages found: " + std::to_string(last.found) +
                            ", not mended: " + std::to_string(last.lost));
  }

  // Of a crash between the two writes both copies are intact, and one is older.
  void superblocks(size_t shard) {
    const auto copies = superblock_copies(shards_, shard);
    const auto bad = std::count(copies.begin(), copies.end(), std::nullopt);
    if (bad > 0)
      report_.problems.push_back((bad == 1 ? "one copy" : "both copies") +
                                 std::string(" of the superblock of '") + path(shard) +
                                 "' cannot be read or is damaged");
    if (bad == 0 && copies[0]->counter != copies[1]->counter)
      report_.notes.push_back(
          "the copies of the superblock of '" + path(shard) +
          "' are not of one write, as after a crash: the next opening for writing makes them so");
  }

  // The newest image, byte for byte the same on all shards, from one that has it whole; as long as
  // it may be.
  const std::vector<std::byte>& newest_image() {
    if (newest_image_) return *newest_image_;
    newest_image_.emplace();
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((map_.live() & shard_bit(shard)) == 0) continue;
      for (size_t area = 0; area < 2; ++area) {
        PiecewiseRead read(shards_, shard, shape_.area_at(area), shape_.area_bytes, {});
        while (!read.done()) read.step(PiecewiseRead::kAtOnce);
        const auto image = read_table_image(shards_.store(), read.bytes());
        if (!image || image->stamp != image_stamp_) continue;
        uint64_t bytes = framed_bytes(16);  // the record behind its pieces
        for (const std::string& piece : image->pieces)
          bytes += framed_bytes(sizeof(uint32_t) + piece.size());
        const auto whole = read.bytes().first(std::min<uint64_t>(bytes, read.bytes().size()));
        newest_image_->assign(whole.begin(), whole.end());
        return *newest_image_;
      }
    }
    return *newest_image_;
  }

  // Of a crash in its write each sector is the old one or the new one: none of them differs from
  // the new one by a few bytes only, but by accident.
  bool nearly_whole(std::span<const std::byte> area) {
    constexpr size_t kSector = 512, kFew = 4;
    const std::vector<std::byte>& image = newest_image();
    size_t few = 0, many = 0;
    for (size_t at = 0; at < image.size(); at += kSector) {
      size_t differ = 0;
      for (size_t i = at; i < std::min(at + kSector, image.size()); ++i)
        differ += area[i] != image[i] ? 1 : 0;
      few += differ > 0 && differ <= kFew ? 1 : 0;
      many += differ > kFew ? 1 : 0;
    }
    return few > 0 && many == 0;
  }

  // The newest image is on every live shard before anything is written that is newer.
  void table(size_t shard) {
    Stamp newest = 0;
    bool flipped = false;
    for (size_t area = 0; area < 2; ++area) {
      const auto bytes = all_of(shard, shape_.area_at(area), shape_.area_bytes, "object table");
      if (const auto image = read_table_image(shards_.store(), bytes.bytes()))
        newest = std::max(newest, image->stamp);
      flipped = flipped || nearly_whole(bytes.bytes());
    }
    if (newest == image_stamp_) return;
    std::string what = "the newest object table is not whole on '" + path(shard) + "'";
    if (flipped) {
      report_.problems.push_back("the newest object table is damaged on '" + path(shard) +
                                 "', not as a crash does it");
    } else if (newest != 0 && number_of(image_stamp_) == report_.committed) {
      report_.notes.push_back(
          std::move(what) +
          ", as after a crash: it is written again when the store is opened for writing");
    } else {
      report_.problems.push_back(std::move(what));
    }
  }

  LogContent log_of(size_t shard) {
    LogContent content;
    for (size_t segment = 0; segment < shape_.segments; ++segment) {
      const auto bytes = all_of(shard, shape_.segment_at(segment), shape_.segment_bytes, "log");
      read_segment(shape_, shards_.store(), shard, segment, shards_[shard].super.log_floor,
                   bytes.bytes(), [&](uint64_t at, const FrameContent& frame) {
                     content.take(frame, bytes.bytes().subspan(at));
                   });
    }
    return content;
  }

  // Every VAL that counts must be in every log that it belongs in, and every COMMIT that is needed
  // in all. One that is missing although the log has something of a later batch was damaged; else a
  // crash may have come before it was written. (What an opening writes once more is flushed before
  // that.)
  void logs() {
    std::map<size_t, LogContent> contents;
    std::set<Stamp> commits;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((map_.live() & shard_bit(shard)) == 0) continue;
      const LogContent& content = contents.emplace(shard, log_of(shard)).first->second;
      for (const Stamp stamp : content.commits) {
        if (stamp > image_stamp_) commits.insert(stamp);
      }
    }
    size_t lacking = 0;
    for (const auto& [shard, content] : contents) {
      std::set<Stamp> needed = commits;
      size_t damaged = 0;
      for (const auto& [stripe, val] : map_.vals_of(shard)) {
        const auto found = content.vals.find(key_of(*val));
        if (found == content.vals.end()) {
          ++(val->stamp < content.newest ? damaged : lacking);
        } else if (found->second) {
          needed.insert(val->stamp);
        }
      }
      for (const Stamp stamp : needed) {
        if (!content.commits.contains(stamp))
          ++(!content.commits.empty() && stamp < *content.commits.rbegin() ? damaged : lacking);
      }
      if (damaged > 0)
        report_.problems.push_back(std::to_string(damaged) +
                                   " records that are still needed are damaged in the log of '" +
                                   path(shard) + "'");
    }
    if (lacking > 0)
      report_.notes.push_back(std::to_string(lacking) +
                              " records are not in all the logs that they belong in, as after a "
                              "crash: they are written there when the store is opened for writing");
  }

  PiecewiseRead all_of(size_t shard, uint64_t offset, size_t bytes, const char* what) {
    PiecewiseRead read(shards_, shard, offset, bytes, {});
    while (!read.done()) read.step(PiecewiseRead::kAtOnce);
    if (!read.readable())
      report_.problems.push_back(std::string("the ") + what + " of '" + path(shard) +
                                 "' has sectors that cannot be read");
    return read;
  }

  // The bytes as a reader gets them, then every chunk by itself: a bad one that can be decoded is a
  // problem too.
  void check(const std::string& key, const Object& object) {
    std::vector<std::byte> memory(std::min<uint64_t>(object.bytes, 8 * kMiB));
    for (uint64_t at = 0; at < object.bytes; at += memory.size()) {
      const size_t piece = std::min<uint64_t>(memory.size(), object.bytes - at);
      const Status read =
          reader_.read(key, nullptr, at, {memory.data(), piece, -1}, Priority::scrub);
      if (!read)
        report_.problems.push_back("bytes " + std::to_string(at) + " to " +
                                   std::to_string(at + piece) + " of '" + key +
                                   "' are lost: " + read.error().what);
    }
    for (const StripePtr& stripe : object.stripes) {
      if (!stripe) continue;
      const uint32_t live = map_.live_positions(*stripe);
      for (size_t position = 0; position < shape_.n(); ++position) {
        if ((live >> position & 1) == 0) continue;
        ++report_.chunks;
        auto compared = rebuilder_.compare(stripe, position, {0, shape_.pages(), 0, shape_.rows()});
        if (compared) {
          single_copies_ += compared->bad_copies.size();
          compared->wrong_pages.insert(compared->lost_pages.begin(), compared->lost_pages.end());
        }
        if (compared && compared->wrong_rows.empty() && compared->wrong_pages.empty()) continue;
        // What a committed fold is about to overwrite is no damage.
        if (!stripe->overrides.empty()) continue;
        std::string what = "chunk ";
        what.append(std::to_string(position))
            .append(" of a stripe of '")
            .append(key)
            .append("' on '")
            .append(path(stripe->shards[position]))
            .append("' ");
        if (compared) {
          what += "has " + std::to_string(compared->wrong_rows.size()) + " bad blocks and " +
                  std::to_string(compared->wrong_pages.size()) + " bad header pages";
        } else {
          what += compared.error().what;
        }
        report_.problems.push_back(std::move(what));
      }
    }
  }

  CommittedMap& map_;
  Shards& shards_;
  const Shape& shape_;
  Reader& reader_;
  Rebuilder& rebuilder_;
  const Stamp image_stamp_;  // of the newest table image
  const FsckOptions& options_;
  FsckReport& report_;
  size_t single_copies_ = 0;
  std::optional<std::vector<std::byte>> newest_image_;
};

void CodedStore::check(const FsckOptions& options, FsckReport& report) {
  Checking(map_, *shards_, reader_, rebuilder_, logs_.image_stamp(), options, report).run(health());
}

}  // namespace stoker::coded

namespace stoker {

Result<FsckReport> fsck_coded_store(const CodedPlan& plan, const Runtime& runtime,
                                    const FsckOptions& options, const CodedOptions& coded) {
  if (options.repair_map)
    return fail(
        Code::unsupported,
        "--repair-map works on local stores only; repair a coded store with `stoker scrub`");
  StoreOptions open;
  open.read_only = true;
  open.holder = "stoker fsck";
  STOKER_ASSIGN(const auto store, coded::CodedStore::open(plan, runtime, open, coded));
  FsckReport report;
  store->check(options, report);
  return report;
}

}  // namespace stoker
