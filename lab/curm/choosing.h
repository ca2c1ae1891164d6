// Choosing: a scheme that chooses for each stripe, while it is in use, by what is measured of it.
//
// - Full overwrite (fo), where updates hardly ever come back: to log them first would only add to
// what has to be read and written in the end.
// - CURM, where updates are rewritten before they are folded, and where a stripe is written from
// one end to the other: its row is full soon, and is then folded without reading.
//
// Measured are blocks (whether one was written before within the last window of updates) and, on a
// cluster that tells them, costs: of an update that is logged, of a fold for each update in it that
// was not overtaken, of an update that is overwritten. A stripe of which little is known goes by
// what is known of all. A stripe changes its scheme only beyond either of two limits, and not to fo
// before its log is folded.
#pragma once

#include <unordered_map>
#include <vector>

#include "curm/scheme_switch.h"

namespace stoker::curm {

inline constexpr std::string_view kChoose = "choose";

class Choosing final : public SchemeSwitch {
 public:
  static std::unique_ptr<Choosing> make(const Setup& setup);

  Status update(const Update& update) override;
  Status update_together(const std::vector<Update>& pieces) override;
  Status fold(uint64_t stripe) override;
  std::vector<uint64_t> make_room(uint64_t logged_bytes_max) const override;

 private:
  // Of a stripe, or of all: what was written lately, later updates counting more.
  struct Rewrites {
    double blocks = 0, again = 0;
    void add(double written, double rewritten, double memory);
  };
  // What so many updates cost lately.
  struct Work {
    Cost cost;
    double updates = 0;
    void add(const Cost& before, const Cost& after, double done);
    Cost mean() const { return {cost.busy_ns / updates, cost.path_ns / updates}; }
  };
  struct Seen {
    std::unordered_map<uint64_t, uint64_t> blocks;  // when it was written last, in bytes of updates
    Rewrites rewrites;
    double fresh = 0;                     // updates in the log that overtook nothing in it
    uint64_t folded_at = 0;               // in bytes of updates
    uint64_t run_end = 0, run_bytes = 0;  // the sequential run that was written last
    bool logs = true;
  };
  explicit Choosing(const Setup& setup);
  Cost cost() const { return setup().cost ? setup().cost() : Cost(); }
  double measure(const Update& update);
  bool wants_log(const Seen& seen) const;
  Status choose(uint64_t stripe);
  void updated(uint64_t stripe, const Cost& before, double updates, double fresh);

  const uint64_t window_bytes_;
  uint64_t updated_bytes_ = 0;
  Rewrites all_;
  Work logged_, overwritten_;
  Work folded_;                              // its updates: those that were not overtaken
  std::unordered_map<uint64_t, Seen> seen_;  // by stripe
};

}  // namespace stoker::curm
