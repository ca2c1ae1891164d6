// fsck of a coded store: what is there is compared with what it should be; nothing is written.
#include "stoker/store/local/fsck.h"

#include "stoker/store/coded/coded_store.h"

namespace stoker::coded {

class Checking {
 public:
  Checking(CodedStore& store, const FsckOptions& options, FsckReport& report) : store_(store), options_(options), report_(report) {}

  void run() {
    const StoreInfo info = store_.info();
    const Health health = store_.health();
    report_.committed = info.committed;
    report_.generation = health.epoch;
    report_.records = health.newer_blocks;
    for (const std::string& trouble : health.troubles) report_.problems.push_back("a shard does not count: " + trouble);
    if (!health.troubles.empty()) report_.advice.emplace_back("bring missing disks back; a shard that is there and not up to date is resynced by `stoker repair`, or when the store is opened for writing; a disk that is lost for good is replaced by `stoker repair --replace`");
    if (const auto keys = store_.affected(); !keys.empty()) {
      std::string names;
      for (const std::string& key : keys) names += " '" + key + "'";
      report_.problems.push_back("without the missing shards these objects cannot be read in full:" + names);
    }
    if (health.newer_blocks > 0) report_.notes.push_back(std::to_string(health.newer_blocks) + " blocks are newer in the logs than in the bases, as after a crash or while it is in use");
    std::vector<std::pair<std::string, ObjectPtr>> objects;
    {
      std::lock_guard lock(store_.mutex_);
      for (const auto& [key, object] : store_.table_.objects()) objects.emplace_back(key, object);
    }
    uint64_t total = 0;
    for (const auto& [key, object] : objects) total += object->bytes;
    for (const auto& [key, object] : objects) {
      ++report_.objects;
      if (!options_.quick) check(key, *object);
      report_.data_bytes += object->bytes;
      if (options_.progress && !options_.quick) options_.progress(report_.data_bytes, total);
    }
    if (single_copies_ > 0) report_.notes.push_back(std::to_string(single_copies_) + " header pages have one intact copy instead of two, as after a crash: `stoker scrub` writes the other");
  }

 private:
  // The bytes as a reader gets them, then every chunk by itself: a bad one that can be decoded is a problem too.
  void check(const std::string& key, const Object& object) {
    std::vector<std::byte> memory(std::min<uint64_t>(object.bytes, 8 * kMiB));
    for (uint64_t at = 0; at < object.bytes; at += memory.size()) {
      const size_t piece = std::min<uint64_t>(memory.size(), object.bytes - at);
      const Status read = store_.read_now(key, nullptr, at, {memory.data(), piece, -1}, Priority::scrub);
      if (!read) report_.problems.push_back("bytes " + std::to_string(at) + " to " + std::to_string(at + piece) + " of '" + key + "' are lost: " + read.error().what);
    }
    for (const StripePtr& stripe : object.stripes) {
      if (!stripe) continue;
      const uint32_t live = store_.live_positions(*stripe);
      for (size_t position = 0; position < store_.shape_.n(); ++position) {
        if ((live >> position & 1) == 0) continue;
        ++report_.chunks;
        auto compared = store_.compare(stripe, position);
        if (compared) {
          single_copies_ += compared->bad_copies.size();
          compared->wrong_pages.insert(compared->lost_pages.begin(), compared->lost_pages.end());
        }
        if (compared && compared->wrong_rows.empty() && compared->wrong_pages.empty()) continue;
        // What a committed fold is about to overwrite is no damage.
        if (!stripe->overrides.empty()) continue;
        const std::string& path = store_.shards()[stripe->shards[position]].path;
        std::string what = "chunk ";
        what.append(std::to_string(position)).append(" of a stripe of '").append(key).append("' on '").append(path).append("' ");
        if (compared) {
          what += "has " + std::to_string(compared->wrong_rows.size()) + " bad blocks and " + std::to_string(compared->wrong_pages.size()) + " bad header pages";
        } else {
          what += compared.error().what;
        }
        report_.problems.push_back(std::move(what));
      }
    }
  }

  CodedStore& store_;
  const FsckOptions& options_;
  FsckReport& report_;
  size_t single_copies_ = 0;
};

}  // namespace stoker::coded

namespace stoker {

Result<FsckReport> fsck_coded_store(const CodedPlan& plan, const Runtime& runtime, const FsckOptions& options, const CodedOptions& coded) {
  if (options.repair_map) return make_error(Code::unsupported, "a coded store is mended by `stoker scrub`; --repair-map is for local stores", "store/coded/fsck");
  StoreOptions open;
  open.read_only = true;
  open.holder = "stoker fsck";
  STOKER_ASSIGN(const auto store, coded::CodedStore::open(plan, runtime, open, coded));
  FsckReport report;
  coded::Checking(*store, options, report).run();
  return report;
}

}  // namespace stoker
