#include "curm/choosing.h"

#include <algorithm>
#include <utility>

namespace stoker::curm {
namespace {

constexpr uint64_t kBlock = 4096;
constexpr double kPrior = 32;          // blocks that a stripe is taken to have behaved like all
constexpr double kStripeMemory = 512;  // blocks
constexpr double kMemory = 16'384;     // of all stripes together
// Updates whose cost is remembered, and how many of each kind have to be known.
constexpr double kWorkMemory = 4096, kKnown = 64;
// A stripe is given to the log where that costs less than so much of overwriting, and taken from it
// where it costs more than that.
constexpr double kToLog = 0.85, kFromLog = 1;
// The same where costs are not known, by the share of rewritten blocks.
constexpr double kSharesToLog = 0.4, kSharesFromLog = 0.25;
constexpr std::string_view kLogged = "curm", kOverwritten = "fo";

}  // namespace

void Choosing::Rewrites::add(double written, double rewritten, double memory) {
  blocks += written;
  again += rewritten;
  if (blocks > memory) {
    again *= memory / blocks;
    blocks = memory;
  }
}

void Choosing::Work::add(const Cost& before, const Cost& after, double done) {
  cost.busy_ns += after.busy_ns - before.busy_ns;
  cost.path_ns += after.path_ns - before.path_ns;
  updates += done;
  if (updates <= kWorkMemory) return;
  cost.busy_ns /= 2;
  cost.path_ns /= 2;
  updates /= 2;
}

std::unique_ptr<Choosing> Choosing::make(const Setup& setup) {
  Setup own = setup;
  if (!own.numbers) own.numbers = std::make_shared<Numbers>();
  return std::unique_ptr<Choosing>(new Choosing(own));
}

// What is measured goes by the reserve, as in ReservedCurm: 256 KiB make a window of 256 MiB.
Choosing::Choosing(const Setup& setup)
    : SchemeSwitch(setup, kLogged), window_bytes_(1024 * setup.reserved_bytes) {}

// The share of the update that overtakes nothing in the log.
double Choosing::measure(const Update& update) {
  const uint64_t begin = update.offset, end = begin + update.value.size();
  const uint64_t base = static_cast<uint64_t>(update.chunk.position) * geometry().chunk_bytes;
  Seen& seen = seen_[update.chunk.stripe];
  double written = 0, again = 0, fresh = 0;
  for (uint64_t block = (base + begin) / kBlock; block * kBlock < base + end; ++block) {
    const auto [found, first] = seen.blocks.try_emplace(block, updated_bytes_);
    ++written;
    if (!first && updated_bytes_ - found->second <= window_bytes_) ++again;
    if (first || found->second < seen.folded_at) ++fresh;
    found->second = updated_bytes_;
  }
  updated_bytes_ += end - begin;
  seen.rewrites.add(written, again, kStripeMemory);
  all_.add(written, again, kMemory);
  seen.run_bytes = (base + begin == seen.run_end ? seen.run_bytes : 0) + end - begin;
  seen.run_end = base + end;
  return written == 0 ? 0 : fresh / written;
}

bool Choosing::wants_log(const Seen& seen) const {
  if (all_.blocks * kBlock * 128 < static_cast<double>(window_bytes_) ||
      seen.run_bytes >= geometry().chunk_bytes)
    return true;
  const double prior = all_.again / all_.blocks;
  const double share = (seen.rewrites.again + kPrior * prior) / (seen.rewrites.blocks + kPrior);
  if (!setup().cost || std::min({logged_.updates, folded_.updates, overwritten_.updates}) < kKnown)
    return share > (seen.logs ? kSharesFromLog : kSharesToLog);
  // What is not overtaken in the log is folded.
  const Cost log = logged_.mean(), fold = folded_.mean(), over = overwritten_.mean();
  const double logged =
      std::max(log.busy_ns + (1 - share) * fold.busy_ns, log.path_ns + (1 - share) * fold.path_ns);
  return logged < std::max(over.busy_ns, over.path_ns) * (seen.logs ? kFromLog : kToLog);
}

Status Choosing::choose(uint64_t stripe) {
  Seen& seen = seen_[stripe];
  seen.logs = wants_log(seen);
  if (seen.logs) return turn(stripe, kLogged);
  return pending_bytes(stripe) == 0 ? turn(stripe, kOverwritten) : Status();
}

void Choosing::updated(uint64_t stripe, const Cost& before, double updates, double fresh) {
  const bool logged = scheme_of(stripe) == kLogged;
  if (logged) seen_[stripe].fresh += fresh;
  (logged ? logged_ : overwritten_).add(before, cost(), updates);
}

Status Choosing::update(const Update& update) {
  const double fresh = measure(update);
  STOKER_TRY(choose(update.chunk.stripe));
  const Cost before = cost();
  STOKER_TRY(SchemeSwitch::update(update));
  updated(update.chunk.stripe, before, 1, fresh);
  return {};
}

Status Choosing::update_together(const std::vector<Update>& pieces) {
  double fresh = 0;
  for (const Update& piece : pieces) fresh += measure(piece);
  const uint64_t stripe = pieces[0].chunk.stripe;
  STOKER_TRY(choose(stripe));
  const Cost before = cost();
  STOKER_TRY(SchemeSwitch::update_together(pieces));
  updated(stripe, before, static_cast<double>(pieces.size()), fresh);
  return {};
}

Status Choosing::fold(uint64_t stripe) {
  const Cost before = cost();
  STOKER_TRY(SchemeSwitch::fold(stripe));
  Seen& seen = seen_[stripe];
  if (scheme_of(stripe) == kLogged) {
    folded_.add(before, cost(), seen.fresh);
  } else {
    overwritten_.add(before, cost(), 0);
  }
  seen.fresh = 0;
  seen.folded_at = updated_bytes_;
  return {};
}

// What is logged and should not be is folded first.
std::vector<uint64_t> Choosing::make_room(uint64_t logged_bytes_max) const {
  std::vector<uint64_t> stripes = SchemeSwitch::make_room(logged_bytes_max);
  for (const auto& [stripe, seen] : seen_) {
    if (!seen.logs && pending_bytes(stripe) != 0) stripes.push_back(stripe);
  }
  std::sort(stripes.begin(), stripes.end());
  stripes.erase(std::unique(stripes.begin(), stripes.end()), stripes.end());
  return stripes;
}

}  // namespace stoker::curm
