// Repair and scrub of a coded store that nobody else has open: started, watched, and told.
#include <chrono>

#include "stoker/store/coded/coded_store.h"

namespace stoker::coded {
namespace {

// "'a', 'b' and 7 more"
std::string some_of(const std::vector<std::string>& keys) {
  constexpr size_t kShown = 5;
  std::string text;
  for (size_t i = 0; i < keys.size() && i < kShown; ++i)
    text += (i == 0 ? "'" : ", '") + keys[i] + "'";
  return keys.size() > kShown ? text + " and " + std::to_string(keys.size() - kShown) + " more"
                              : text;
}

void tell_losses(const CodedStore& store, RepairReport& report) {
  const Health health = store.health();
  for (const std::string& trouble : health.troubles)
    report.problems.push_back("a shard does not count: " + trouble);
  report.problems.insert(report.problems.end(), health.gone.begin(), health.gone.end());
  if (health.lost_chunks > 0)
    report.problems.push_back(std::to_string(health.lost_chunks) +
                              " chunks could not be rebuilt in full: " + health.lost_why);
  if (health.stuck_stripes > 0)
    report.problems.push_back(
        std::to_string(health.stuck_stripes) +
        " stripes with updates in the log cannot be folded: " + health.lost_why);
  if (const auto keys = store.affected(); !keys.empty())
    report.problems.push_back(
        std::to_string(keys.size()) +
        " objects cannot be read in full without the missing shards: " + some_of(keys));
}

}  // namespace

Result<RepairReport> repair(const CodedPlan& plan, const Runtime& runtime,
                            const RepairOptions& options, const CodedOptions& coded) {
  StoreOptions open;
  open.holder = options.scrub ? "stoker scrub" : "stoker repair";
  open.replace = options.replace;
  open.same_disk = options.same_disk;
  CodedOptions own = coded;
  own.background = false;  // nothing begins before it was told what will be done
  own.repair_rate = own.fold_rate = options.rate;
  STOKER_ASSIGN(const auto store, CodedStore::open(plan, runtime, open, own));
  RepairReport report;
  report.committed = store->info().committed;
  if (const std::string refused = store->info().read_only; !refused.empty()) {
    report.problems.push_back(refused);
    tell_losses(*store, report);
    report.advice.emplace_back(
        "bring missing disks back: with so few nothing can be repaired; what can be read can be "
        "exported");
    return report;
  }
  if (options.plan) {
    for (const std::string& sentence : store->repair_plan()) options.plan(sentence);
  }
  const auto scrubbed = std::make_shared<ScrubReport>();
  const Future<void> done = options.scrub ? store->scrub(scrubbed) : store->repair();
  while (!done.wait_for(std::chrono::milliseconds(200))) {
    if (options.progress) options.progress(store->health().doing);
  }
  if (const Status& ended = done.wait(); !ended) return ended.error();
  STOKER_TRY(store->drain().wait());
  report.scrub = *scrubbed;
  report.rebuilt_bytes = store->health().rebuilt_bytes;
  report.problems = scrubbed->lost;
  if (scrubbed->unlisted > 0)
    report.problems.push_back("and " + std::to_string(scrubbed->unlisted) + " more like these");
  tell_losses(*store, report);
  if (!store->health().troubles.empty())
    report.advice.emplace_back(
        "bring a missing disk back; or put a new one in its place, and name it with --replace: "
        "what was on the old one is rebuilt from the others");
  if (!scrubbed->lost.empty() || store->health().lost_chunks + store->health().stuck_stripes > 0)
    report.advice.emplace_back(
        "bring missing disks back and scrub again, or restore these objects from a copy");
  return report;
}

}  // namespace stoker::coded

namespace stoker {

Result<RepairReport> repair_coded_store(const CodedPlan& plan, const Runtime& runtime,
                                        const RepairOptions& options, const CodedOptions& coded) {
  return coded::repair(plan, runtime, options, coded);
}

}  // namespace stoker
