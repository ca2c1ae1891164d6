#include "coded_cases.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "stoker/store/coded/format/log.h"

namespace stoker {
namespace {

using coded::kBlock;
using coded::shard_bit;

Error none(const std::string& what) { return fail(Code::not_found, "the play has no {}", what); }

std::optional<coded::Superblock> superblock_of(const SimImage& image) {
  Bytes sector(coded::kSuperblockBytes);
  image.read(0, sector);
  const auto superblock = coded::decode_superblock(sector);
  return superblock ? *superblock : std::nullopt;
}

size_t shard_at(const std::vector<std::string>& paths, const std::string& path) {
  return static_cast<size_t>(std::find(paths.begin(), paths.end(), path) - paths.begin());
}

bool in_place(const coded::Shape& shape, const SimEvent& write) {
  if (write.offset < shape.slot_at(0)) return false;
  return (write.offset - shape.slot_at(0)) % (shape.slot_at(1) - shape.slot_at(0)) >=
         2 * shape.pages() * kBlock;
}

// The moments at which a fold is decided and its blocks are all under way, in place, on D and all
// P.
Result<std::vector<CrashCase>> applying(const Recorded& run,
                                        const std::vector<std::string>& paths) {
  const auto superblock = superblock_of(run.before.at(paths[0]));
  if (!superblock) return none("superblock before it");
  std::vector<CrashCase> moments;
  CrashEffort one_each;
  one_each.all_subsets_up_to = 0;
  one_each.samples = 1;
  CrashWalk(run.events, run.before, run.admissible, 1, one_each).run([&](CrashCase& crash) {
    std::set<std::string> disks;
    for (const SimEvent* write : crash.pending) {
      if (in_place(superblock->shape, *write)) disks.insert(write->path);
    }
    if (disks.size() == superblock->shape.m + 1 && disks.size() == crash.pending.size())
      moments.push_back(crash);
    return true;
  });
  if (moments.empty()) return none("fold whose blocks are all under way at once");
  for (CrashCase& moment : moments) moment.images = moment.durable;
  return moments;
}

struct Staged {
  uint64_t fold = 0, at = 0;  // at: of the frame, on its shard
  bool operator<(const Staged& other) const { return fold < other.fold; }
};

// What was staged last on a shard. Fold 0: nothing was.
Staged staged_on(const SimImage& image) {
  Staged newest;
  const auto super = superblock_of(image);
  for (size_t segment = 0; super && segment < super->shape.segments; ++segment) {
    const uint64_t begin = super->shape.segment_at(segment);
    Bytes bytes(super->shape.segment_bytes);
    image.read(begin, bytes);
    coded::read_segment(super->shape, super->store, super->shard, segment, super->log_floor, bytes,
                        [&](uint64_t at, const coded::FrameContent& frame) {
                          for (const coded::Item& item : frame.items) {
                            if (const auto* stage = std::get_if<coded::StageItem>(&item))
                              newest = std::max(newest, Staged{stage->fold, begin + at});
                          }
                        });
  }
  return newest;
}

}  // namespace

Result<MadeCases> rotten_pages(const Recorded& run, const std::vector<std::string>& paths) {
  std::vector<std::pair<size_t, uint64_t>> pages;  // shard, offset
  for (size_t shard = 0; shard < paths.size(); ++shard) {
    const SimImage& image = run.after.at(paths[shard]);
    const auto superblock = superblock_of(image);
    if (!superblock) return none("superblock on '" + paths[shard] + "'");
    const coded::Shape& shape = superblock->shape;
    for (size_t pair = 0; pair < shape.slots * shape.pages(); ++pair) {
      std::array<uint64_t, 2> counters{};
      for (uint64_t copy = 0; copy < 2; ++copy) {
        Bytes head(24);  // the write counter is its end
        image.read(shape.page_at(pair / shape.pages(), pair % shape.pages(), copy), head);
        std::memcpy(&counters[copy], head.data() + 16, 8);
      }
      if (counters[0] != counters[1])
        pages.emplace_back(shard, shape.page_at(pair / shape.pages(), pair % shape.pages(),
                                                counters[0] > counters[1] ? 0 : 1));
    }
  }
  if (pages.empty()) return none("header pages");
  const auto make = [&run, paths, pages](uint64_t i, std::mt19937_64& random) {
    const auto& [shard, offset] = pages[i % pages.size()];
    CrashCase rotten{run.after,
                     {run.timeline.size() - 1, run.timeline.size() - 1},
                     "page " + std::to_string(offset) + " of shard " + std::to_string(shard),
                     {},
                     {},
                     shard_bit(shard)};
    rotten.images.at(paths[shard])
        .flip(offset + random() % kBlock, static_cast<unsigned>(random() % 8));
    return rotten;
  };
  return MadeCases{pages.size(), make};
}

Result<MadeCases> gone_records(const Recorded& run, const std::vector<std::string>& paths) {
  using Key = std::tuple<coded::Stamp, uint64_t, size_t, size_t>;
  std::map<Key, std::vector<std::pair<size_t, uint64_t>>> frames;  // shard, offset
  std::set<Key> told;
  for (size_t shard = 0; shard < paths.size(); ++shard) {
    const SimImage& image = run.after.at(paths[shard]);
    const auto super = superblock_of(image);
    if (!super) return none("superblock on '" + paths[shard] + "'");
    for (size_t segment = 0; segment < super->shape.segments; ++segment) {
      const uint64_t begin = super->shape.segment_at(segment);
      Bytes bytes(super->shape.segment_bytes);
      image.read(begin, bytes);
      coded::read_segment(
          super->shape, super->store, shard, segment, super->log_floor, bytes,
          [&](uint64_t at, const coded::FrameContent& frame) {
            for (const coded::Item& item : frame.items) {
              if (const auto* val = std::get_if<coded::ValItem>(&item))
                frames[{val->stamp, val->stripe, val->chunk, val->first}].emplace_back(shard,
                                                                                       begin + at);
              const auto* round = std::get_if<coded::RoundItem>(&item);
              for (size_t i = 0; round != nullptr && i < round->vals.size(); ++i) {
                const coded::ValItem& val = round->vals[i];
                told.emplace(val.stamp, val.stripe, val.chunk, val.first);
              }
            }
          });
    }
  }
  std::vector<std::vector<std::pair<size_t, uint64_t>>> records;
  for (const auto& [key, at] : frames) {
    if (told.contains(key)) records.push_back(at);
  }
  if (records.empty()) return none("record that a later frame tells of");
  const auto make = [&run, paths, records](uint64_t i, std::mt19937_64& random) {
    CrashCase gone{run.after,
                   {run.timeline.size() - 1, run.timeline.size() - 1},
                   "record " + std::to_string(i % records.size()) + " gone",
                   {},
                   {},
                   0};
    for (const auto& [shard, offset] : records[i % records.size()]) {
      gone.images.at(paths[shard])
          .flip(offset + random() % kBlock, static_cast<unsigned>(random() % 8));
      gone.troubled |= shard_bit(shard);
    }
    return gone;
  };
  return MadeCases{records.size(), make};
}

Result<MadeCases> torn_applies(const Recorded& run, const std::vector<std::string>& paths) {
  STOKER_ASSIGN(const auto moments, applying(run, paths));
  constexpr size_t kSectors = kBlock / kSector, kWays = 2 * (kSectors + 1) * 2;
  const auto make = [moments](uint64_t i, std::mt19937_64&) {
    const size_t way = i % kWays;
    const size_t cut = way % (kSectors + 1);
    const bool front = way / (kSectors + 1) % 2 == 0;
    // of the writes the first, of D or P, is whole
    const bool other = way / (kSectors + 1) / 2 == 0;
    CrashCase crash = moments[i / kWays % moments.size()];
    crash.what = "torn at sector " + std::to_string(cut);
    for (const SimEvent* write : crash.pending) {
      SimImage& image = crash.images[write->path];
      if (other && write == crash.pending.front()) {
        image.write(write->offset, *write->bytes);
      } else {
        image.write_torn(write->offset, *write->bytes,
                         [&](size_t sector) { return front == (sector % kSectors < cut); });
      }
    }
    return crash;
  };
  return MadeCases{moments.size() * kWays, make};
}

Result<MadeCases> lost_stages(const Recorded& run, const std::vector<std::string>& paths) {
  STOKER_ASSIGN(const auto moments, applying(run, paths));
  struct Loser {
    size_t moment;
    const SimEvent* own;  // write in place
    uint64_t staged_at;
  };
  std::vector<Loser> all;
  for (size_t i = 0; i < moments.size(); ++i) {
    Staged newest;
    for (const SimEvent* write : moments[i].pending)
      newest = std::max(newest, staged_on(moments[i].durable.at(write->path)));
    for (const SimEvent* write : moments[i].pending) {
      const Staged staged = staged_on(moments[i].durable.at(write->path));
      if (staged.fold != 0 && staged.fold == newest.fold) all.push_back({i, write, staged.at});
    }
  }
  if (all.empty()) return none("fold whose parities have staged anything");
  const auto make = [moments, all, paths](uint64_t i, std::mt19937_64& random) {
    const Loser& loser = all[i / 2 % all.size()];
    CrashCase crash = moments[loser.moment];
    for (const SimEvent* write : crash.pending) {
      if (i % 2 == 0 && write != loser.own)
        crash.images[write->path].write(write->offset, *write->bytes);
    }
    crash.images.at(loser.own->path)
        .flip(loser.staged_at + random() % kBlock, static_cast<unsigned>(random() % 8));
    crash.troubled |= shard_bit(shard_at(paths, loser.own->path));
    crash.what = "with what '" + loser.own->path + "' had staged damaged" +
                 (i % 2 == 0 ? ", the others in place" : "");
    return crash;
  };
  return MadeCases{2 * all.size(), make};
}

}  // namespace stoker
