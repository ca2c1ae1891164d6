#include "curm/replay.h"

#include <algorithm>
#include <string>

#include "curm/choosing.h"
#include "curm/curm.h"
#include "curm/player.h"
#include "curm/scheme_switch.h"
#include "curm/stripes.h"

namespace stoker::curm {
namespace {

class Replay {
 public:
  Replay(const Trace& trace, const ReplayOptions& options, const ClassTree* tree)
      : trace_(trace),
        options_(options),
        geometry_{options.k, options.m, options.nodes, options.chunk_bytes, 0},
        stripes_(options.k, options.chunk_bytes),
        model_(options.device),
        player_(options.device, options.nodes, options.clients) {
    if (tree != nullptr) classes_.emplace(*tree);
  }

  Result<ReplayResult> run(std::string_view name, Form form) {
    STOKER_TRY(make(name, form));
    const uint64_t acknowledged =
        player_.play_updates([this](Player::Next& next) { return this->next(next); });
    STOKER_TRY(status_);
    STOKER_TRY(drain());
    return summary(name, acknowledged);
  }

  // Plays until as much was updated as the logs hold, or to the end; then loses a node. So all
  // schemes lose it at the same point. How long it takes to rebuild its chunks.
  Result<double> rebuild_seconds(std::string_view name, Form form) {
    stops_early_ = true;
    STOKER_TRY(make(name, form));
    player_.play_updates([this](Player::Next& next) { return this->next(next); });
    STOKER_TRY(status_);
    model_.count_no_more();
    std::vector<Player::Job> rebuilds;
    for (uint64_t stripe = 0; stripe < stripes_.count(); ++stripe) {
      for (int position = 0; position < options_.k + options_.m; ++position) {
        if (geometry_.node({stripe, position}) != 0) continue;
        if (const auto rebuilt = scheme_->rebuild({stripe, position}); !rebuilt)
          return rebuilt.error();
        rebuilds.push_back(model_.take());
      }
    }
    return static_cast<double>(player_.play_background(std::move(rebuilds))) / 1e9;
  }

 private:
  Status make(std::string_view name, Form form) {
    STOKER_ASSIGN(const auto code, codec::ErasureCode::make(options_.k, options_.m));
    Setup setup{&model_, geometry_, code, form, options_.reserved_bytes};
    if (name == kChoose) {
      setup.gap_max = gap_max(options_.device);
      setup.cost = [this] {
        const double nodes = options_.nodes, clients = options_.clients;
        return Cost{model_.busy_ns() / nodes,
                    model_.path_ns(false) / clients + model_.path_ns(true) / nodes};
      };
    }
    if (name != kSwitch) scheme_ = make_scheme_or_switch(name, setup);
    if (!scheme_)
      return fail(Code::invalid_argument,
                  "there is no scheme `{}`; there are fo, fl, pl, plr, parix, vdl, curm, "
                  "curm-reserve and choose",
                  name);
    if (auto* curm = dynamic_cast<Curm*>(scheme_.get()); curm != nullptr && classes_) {
      curm->set_classes([this](uint64_t stripe) { return classes_->of(stripe); });
    }
    return {};
  }

  // The rounds of the next write, and of the folds that are due.
  bool next(Player::Next& next) {
    for (; at_ < trace_.requests.size() && status_; ++at_) {
      const Request& request = trace_.requests[at_];
      // what is only read is stored as well
      const uint64_t touched = stripes_.at(request, request.offset);
      if (classes_) classes_->see(touched, access_of(request));
      if (!request.write) continue;
      ++at_;
      status_ = update(request);
      next.update = model_.take();
      if (stops_early_ && result_.update_bytes >= options_.log_bytes) {
        at_ = trace_.requests.size();
      } else if (status_ && scheme_->logged_bytes() >= options_.log_bytes) {
        for (const uint64_t stripe : scheme_->make_room(options_.log_bytes)) {
          if (status_ = scheme_->fold(stripe); !status_) break;
          next.folds.push_back(model_.take());
        }
      }
      return status_.has_value();
    }
    return false;
  }

  Status update(const Request& request) {
    for (const std::vector<Update>& pieces : stripes_.cut(request)) {
      result_.updates += pieces.size();
      for (const Update& piece : pieces) result_.update_bytes += piece.value.size();
      STOKER_TRY(pieces.size() == 1 ? scheme_->update(pieces[0])
                                    : scheme_->update_together(pieces));
    }
    return {};
  }

  Status drain() {
    std::vector<Player::Job> folds;
    for (const uint64_t stripe : scheme_->pending()) {
      STOKER_TRY(scheme_->fold(stripe));
      folds.push_back(model_.take());
    }
    played_ns_ = player_.now_ns() + player_.play_background(std::move(folds));
    return {};
  }

  ReplayResult summary(std::string_view name, uint64_t acknowledged_ns) {
    result_.counts = model_.counts();
    const auto updates = static_cast<double>(result_.updates);
    result_.updates_per_second =
        acknowledged_ns == 0 ? 0 : updates * 1e9 / static_cast<double>(acknowledged_ns);
    result_.drained_updates_per_second =
        played_ns_ == 0 ? 0 : updates * 1e9 / static_cast<double>(played_ns_);
    std::vector<uint64_t> latencies = player_.latencies_ns();
    std::sort(latencies.begin(), latencies.end());
    const auto quantile = [&](size_t percent) {
      return latencies.empty()
                 ? 0.0
                 : static_cast<double>(latencies[(latencies.size() - 1) * percent / 100]) / 1e3;
    };
    result_.p50_us = quantile(50);
    result_.p99_us = quantile(99);
    const uint64_t chunks = geometry_.chunks(), parities = static_cast<uint64_t>(options_.m);
    result_.space_base_bytes = stripes_.count() * chunks * options_.chunk_bytes;
    const uint64_t behind_parities =
        name == "plr" ? stripes_.count() * parities * options_.reserved_bytes : 0;
    result_.space_peak_bytes = result_.space_base_bytes +
                               static_cast<uint64_t>(player_.log_bytes_peak()) + behind_parities;
    result_.reserved_peak_bytes = behind_parities + scheme_->reserved_peak_bytes();
    return result_;
  }

  const Trace& trace_;
  const ReplayOptions options_;
  const Geometry geometry_;
  Stripes stripes_;
  Model model_;
  Player player_;
  std::optional<ClassTable> classes_;
  std::unique_ptr<Scheme> scheme_;
  size_t at_ = 0;
  bool stops_early_ = false;
  uint64_t played_ns_ = 0;
  Status status_;
  ReplayResult result_;
};

}  // namespace

Result<ReplayResult> replay(const Trace& trace, std::string_view scheme, Form form,
                            const ReplayOptions& options, const ClassTree* tree) {
  if (options.k < 1 || options.m < 1 || options.nodes < options.k + options.m) {
    return fail(Code::invalid_argument,
                "a code of {}+{} needs at least as many nodes as chunks, and there are {}; give "
                "more with --nodes",
                options.k, options.m, options.nodes);
  }
  STOKER_ASSIGN(ReplayResult result, Replay(trace, options, tree).run(scheme, form));
  STOKER_ASSIGN(result.recovery_seconds,
                Replay(trace, options, tree).rebuild_seconds(scheme, form));
  return result;
}

}  // namespace stoker::curm
