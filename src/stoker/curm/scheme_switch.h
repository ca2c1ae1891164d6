// SchemeSwitch: every stripe goes by the scheme that its volume names, and may be changed to another while it is in use.
//
// A change folds what is pending of the stripe; the next update goes by the new scheme. Each record in the logs says whose it is. After a
// crash the records that still count (above their chunk's mark, not dropped) tell who has to recover a stripe: at most one
// scheme, for the other's are all folded and marked before a change. Which scheme a stripe goes by *next* is said by the caller, anew after each opening.
// One thread; whoever uses a stripe holds it.
#pragma once

#include <map>
#include <memory>
#include <string_view>

#include "stoker/curm/scheme.h"

namespace stoker::curm {

class SchemeSwitch {
 public:
  // `scheme`: what stripes go by of which nothing else is said. Of form safe.
  static Result<std::unique_ptr<SchemeSwitch>> make(const Setup& setup, std::string_view scheme);
  ~SchemeSwitch();

  std::string_view scheme_of(uint64_t stripe) const;
  Status change(uint64_t stripe, std::string_view scheme);

  Status update(const Update& update) { return of(update.chunk.stripe).update(update); }
  Status update_together(const std::vector<Update>& pieces) { return of(pieces[0].chunk.stripe).update_together(pieces); }
  Result<Value> read(const Chunk& chunk, uint64_t offset, uint64_t bytes) { return of(chunk.stripe).read(chunk, offset, bytes); }
  Status fold(uint64_t stripe) { return of(stripe).fold(stripe); }
  Status fold_all();
  Status recover(const std::set<NodeId>& replaced);

 private:
  class View;
  struct Member {
    std::unique_ptr<View> view;
    std::unique_ptr<Scheme> scheme;
  };
  explicit SchemeSwitch(const Setup& setup);
  static Result<uint8_t> tag_of(std::string_view scheme);
  uint8_t tag(uint64_t stripe) const;
  Member& member(uint8_t tag);
  Scheme& of(uint64_t stripe) { return *member(tag(stripe)).scheme; }

  Setup setup_;
  uint8_t default_ = 0;
  std::map<uint64_t, uint8_t> said_;   // by stripe, where it is not the default
  std::map<uint64_t, uint8_t> found_;  // during a recovery: whose records count
  std::map<uint8_t, Member> members_;  // those that were ever used
};

}  // namespace stoker::curm
