// CURM: VDL, and what is known of the stripes decides the rest.
//
// - Pieces of one stripe that are written together and cover most of it are written through: parity from the data, nothing logged.
// - A fold takes, range by range, the cheaper of old bytes with old parity, and the clean chunks (reconstruct-write).
// - A record that newer ones cover whole is let go of at once, so hot ranges take little of the log.
// - Full logs are not emptied: the stripes folded first are those whose class says that they will not be rewritten (write-only),
//   then those longest untouched; half of the room stays with what is still being rewritten.
#pragma once

#include <functional>

#include "stoker/classes/classes.h"
#include "stoker/curm/vdl.h"

namespace stoker::curm {

class Curm final : public Vdl {
 public:
  using Vdl::Vdl;
  // Who tells the class of a stripe; without one all are read-write. A wrong class costs speed only.
  void set_classes(std::function<Class(uint64_t stripe)> classes) { classes_ = std::move(classes); }

  Status update_together(const std::vector<Update>& pieces) override;
  std::vector<uint64_t> pending() const override;
  std::vector<uint64_t> make_room(uint64_t logged_bytes_max) const override;

 private:
  bool lets_go_early() const override { return true; }
  bool reconstructs(int dirty) const override { return k() - dirty < dirty + m(); }

  std::function<Class(uint64_t)> classes_;
};

}  // namespace stoker::curm
