// CURM: VDL, and what is known of the stripes decides the rest.
//
// - Pieces of one stripe that are written together and cover most of it are written through: parity
// from the data, nothing logged.
// - A fold takes, range by range, the cheaper of old bytes with old parity, and the clean chunks
// (reconstruct-write).
// - A record that newer ones cover whole is let go of at once, so hot ranges take little of the
// log.
// - Full logs are not emptied: the stripes folded first are those whose class says that they will
// not be rewritten (write-only),
//   then those longest untouched; half of the room stays with what is still being rewritten.
#pragma once

#include <functional>

#include "curm/reserves.h"
#include "curm/vdl.h"
#include "stoker/classes/classes.h"

namespace stoker::curm {

class Curm : public Vdl {
 public:
  using Vdl::Vdl;
  // Who tells the class of a stripe; without one all are read-write. A wrong class costs speed
  // only.
  void set_classes(std::function<Class(uint64_t stripe)> classes) { classes_ = std::move(classes); }

  Status update_together(const std::vector<Update>& pieces) override;
  std::vector<uint64_t> pending() const override;
  std::vector<uint64_t> make_room(uint64_t logged_bytes_max) const override;

 protected:
  bool read_write(uint64_t stripe) const {
    return !classes_ || classes_(stripe) == Class::read_write;
  }
  // What the stripe has logged in the room that all share.
  virtual uint64_t shared_bytes(uint64_t stripe) const { return Vdl::logged_bytes(stripe); }

 private:
  bool lets_go_early() const override { return true; }
  bool reconstructs(int dirty) const override { return k() - dirty < dirty + m(); }

  std::function<Class(uint64_t)> classes_;
};

// CURM with reserves: beside the room of the logs that all stripes share, each log that a hot
// read-write stripe's updates go to (that of D, those of its parities) has room for that stripe
// alone, as much as it is measured to be updated with. What is logged within it fills no log, and
// is not folded to make room for others. The records stand where all others do: a place of their
// own would cost each append a seek.
class ReservedCurm final : public Curm {
 public:
  explicit ReservedCurm(const Setup& setup);

  Status update(const Update& update) override;
  uint64_t logged_bytes() const override;
  uint64_t reserved_peak_bytes() const override {
    return reserves_.peak_bytes() * (1 + static_cast<uint64_t>(m()));
  }

 private:
  uint64_t shared_bytes(uint64_t stripe) const override;

  Reserves reserves_;
};

}  // namespace stoker::curm
