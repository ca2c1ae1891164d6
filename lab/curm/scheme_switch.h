// SchemeSwitch: a scheme by which every stripe goes by one of kSchemes of its own, and may be given
// another while it is in use.
//
// A change folds what is pending of the stripe, then says on all its chunks what it goes by from
// now on: a cluster that is opened again goes on with that. All members draw numbers from one
// source, and each record in the logs says whose it is. After a crash the records that still count
// (above their chunk's mark, not dropped) tell who has to recover a stripe: at most one scheme, for
// the other's are all folded and marked before a change. One thread, like every scheme; whoever
// uses a stripe, or changes it, holds it.
#pragma once

#include <map>
#include <memory>
#include <string_view>

#include "curm/scheme.h"

namespace stoker::curm {

inline constexpr std::string_view kSwitch = "switch";

class SchemeSwitch : public Scheme {
 public:
  // `scheme`: what stripes go by of which nothing else was ever said. Of form safe.
  static Result<std::unique_ptr<SchemeSwitch>> make(const Setup& setup, std::string_view scheme);
  ~SchemeSwitch() override;

  std::string_view scheme_of(uint64_t stripe) const;
  // Durable when it returns; a crash before leaves the stripe with the one or the other.
  Status change(uint64_t stripe, std::string_view scheme);

  Status update(const Update& update) override { return of(update.chunk.stripe).update(update); }
  Status update_together(const std::vector<Update>& pieces) override {
    return of(pieces[0].chunk.stripe).update_together(pieces);
  }
  Result<Value> read(const Chunk& chunk, uint64_t offset, uint64_t bytes) override {
    return of(chunk.stripe).read(chunk, offset, bytes);
  }
  Status fold(uint64_t stripe) override { return of(stripe).fold(stripe); }
  Status recover(const std::set<NodeId>& replaced) override;
  Result<Value> rebuild(const Chunk& lost) override { return of(lost.stripe).rebuild(lost); }

  // Of all members; stripes in the order of each, one member behind the other.
  uint64_t logged_bytes() const override;
  uint64_t reserved_peak_bytes() const override;
  std::vector<uint64_t> pending() const override;
  std::vector<uint64_t> make_room(uint64_t logged_bytes_max) const override;

 protected:
  // `scheme` is one of kSchemes. Setup::numbers are given.
  SchemeSwitch(const Setup& setup, std::string_view scheme);
  // As change(), but nothing is written down: a cluster that is opened again does not know it. That
  // is safe, as what counts after a crash is said by the records themselves.
  Status turn(uint64_t stripe, std::string_view scheme);
  // Bytes that the stripe's scheme holds in logs.
  uint64_t pending_bytes(uint64_t stripe) const;

 private:
  class View;
  struct Member {
    std::unique_ptr<View> view;
    std::unique_ptr<Scheme> scheme;
  };
  struct Found;
  static Result<uint8_t> tag_of(std::string_view scheme);
  uint8_t tag(uint64_t stripe) const;
  Member& member(uint8_t tag);
  Scheme& of(uint64_t stripe) { return *member(tag(stripe)).scheme; }
  Status say(const std::map<uint64_t, uint8_t>& tags);
  Status look(const std::set<NodeId>& replaced, Found& found);
  Status find_owners(const Found& found);
  Status say_again(Found& found);
  std::function<void()> rebuilt(const Chunk& lost, Errand& errand) override;

  const uint8_t default_;
  std::map<uint64_t, uint8_t> said_;   // by stripe
  std::map<uint64_t, uint8_t> found_;  // during a recovery: whose records count
  std::map<uint8_t, Member> members_;  // those that were ever used
};

// What goes by this name: one of kSchemes, kChoose (choosing.h), or kSwitch, where stripes begin
// with VDL. Null for any other.
std::unique_ptr<Scheme> make_scheme_or_switch(std::string_view name, const Setup& setup);

}  // namespace stoker::curm
