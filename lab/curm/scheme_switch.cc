#include "curm/scheme_switch.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "curm/choosing.h"
#include "stoker/base/check.h"

namespace stoker::curm {
namespace {

// Whether a fold of this scheme counts by a commit; those of others by their stages.
bool commits(uint8_t tag) { return kSchemes[tag] == "vdl" || kSchemes[tag].starts_with("curm"); }

}  // namespace

// The substrate as one scheme sees it: what it appends bears its name, and it finds what does.
class SchemeSwitch::View final : public Substrate {
 public:
  View(Substrate& under, uint8_t tag) : under_(under), tag_(tag) {}

  Status run(Round& round) override {
    for (Errand& errand : round.errands) {
      for (Step& step : errand.steps) {
        if (step.kind == Step::Kind::release) step.seq = std::min(step.seq, settled_max_);
        if (step.kind != Step::Kind::append) continue;
        step.record = [make = std::move(step.record), tag = tag_] {
          Record record = make();
          record.scheme = tag;
          return record;
        };
      }
    }
    return under_.run(round);
  }

  Result<NodeState> scan(NodeId node) override {
    STOKER_ASSIGN(NodeState state, under_.scan(node));
    std::erase_if(state.records, [this](const auto& each) { return each.second.scheme != tag_; });
    return state;
  }

  // While others have not recovered, what they left is not settled, whatever number this one draws.
  void settle_at_most(uint64_t seq) { settled_max_ = seq; }

 private:
  Substrate& under_;
  const uint8_t tag_;
  uint64_t settled_max_ = UINT64_MAX;
};

SchemeSwitch::SchemeSwitch(const Setup& setup, std::string_view scheme)
    : Scheme(setup), default_(*tag_of(scheme)) {}
SchemeSwitch::~SchemeSwitch() = default;

Result<std::unique_ptr<SchemeSwitch>> SchemeSwitch::make(const Setup& setup,
                                                         std::string_view scheme) {
  if (const auto known = tag_of(scheme); !known) return known.error();
  Setup own = setup;
  own.form = Form::safe;
  own.numbers = std::make_shared<Numbers>();
  return std::unique_ptr<SchemeSwitch>(new SchemeSwitch(own, scheme));
}

// What stands in records and in chunk headers: never changes.
Result<uint8_t> SchemeSwitch::tag_of(std::string_view scheme) {
  const auto found = std::find(std::begin(kSchemes), std::end(kSchemes), scheme);
  if (found == std::end(kSchemes))
    return fail(
        Code::invalid_argument,
        "there is no scheme `{}`; there are fo, fl, pl, plr, parix, vdl, curm and curm-reserve",
        scheme);
  return static_cast<uint8_t>(found - std::begin(kSchemes));
}

uint8_t SchemeSwitch::tag(uint64_t stripe) const {
  if (const auto found = found_.find(stripe); found != found_.end()) return found->second;
  const auto said = said_.find(stripe);
  return said == said_.end() ? default_ : said->second;
}

std::string_view SchemeSwitch::scheme_of(uint64_t stripe) const { return kSchemes[tag(stripe)]; }

SchemeSwitch::Member& SchemeSwitch::member(uint8_t tag) {
  Member& member = members_[tag];
  if (!member.scheme) {
    member.view = std::make_unique<View>(*setup().substrate, tag);
    Setup own = setup();
    own.substrate = member.view.get();
    own.owns = [this, tag](uint64_t stripe) { return this->tag(stripe) == tag; };
    member.scheme = make_scheme(kSchemes[tag], own);
  }
  return member;
}

Status SchemeSwitch::change(uint64_t stripe, std::string_view scheme) {
  STOKER_ASSIGN(const uint8_t next, tag_of(scheme));
  if (next == tag(stripe)) return {};
  STOKER_TRY(fold(stripe));
  STOKER_TRY(say({{stripe, next}}));
  said_[stripe] = next;
  return {};
}

Status SchemeSwitch::turn(uint64_t stripe, std::string_view scheme) {
  STOKER_ASSIGN(const uint8_t next, tag_of(scheme));
  if (next == tag(stripe)) return {};
  STOKER_TRY(fold(stripe));
  said_[stripe] = next;
  return {};
}

// What stripes go by from now on. They are folded, no record of them counts: so their marks say
// nothing new.
Status SchemeSwitch::say(const std::map<uint64_t, uint8_t>& tags) {
  Round round;
  round.background = true;
  for (const auto& [stripe, tag] : tags) {
    const uint64_t seq = next_seq();
    for (int position = 0; position < k() + m(); ++position) {
      const Chunk chunk{stripe, position};
      Errand& errand = round.to(node(chunk));
      errand.mark(chunk, seq, tag);
      errand.flush();
    }
  }
  return run(round);
}

uint64_t SchemeSwitch::pending_bytes(uint64_t stripe) const {
  const auto found = members_.find(tag(stripe));
  return found == members_.end()
             ? 0
             : std::as_const(*found->second.scheme).Scheme::logged_bytes(stripe);
}

uint64_t SchemeSwitch::logged_bytes() const {
  uint64_t sum = 0;
  for (const auto& [tag, each] : members_) sum += each.scheme->logged_bytes();
  return sum;
}

uint64_t SchemeSwitch::reserved_peak_bytes() const {
  uint64_t sum = 0;
  for (const auto& [tag, each] : members_) sum += each.scheme->reserved_peak_bytes();
  return sum;
}

std::vector<uint64_t> SchemeSwitch::pending() const {
  std::vector<uint64_t> stripes;
  for (const auto& [tag, each] : members_) {
    const std::vector<uint64_t> mine = each.scheme->pending();
    stripes.insert(stripes.end(), mine.begin(), mine.end());
  }
  return stripes;
}

// What the others hold is not a member's room: so all together keep what one alone may.
std::vector<uint64_t> SchemeSwitch::make_room(uint64_t logged_bytes_max) const {
  std::vector<uint64_t> stripes;
  const uint64_t all = logged_bytes();
  for (const auto& [tag, each] : members_) {
    const uint64_t others = all - each.scheme->logged_bytes();
    const std::vector<uint64_t> mine =
        each.scheme->make_room(logged_bytes_max - std::min(logged_bytes_max, others));
    stripes.insert(stripes.end(), mine.begin(), mine.end());
  }
  return stripes;
}

// Nobody asks: rebuild() is the member's, whose records bear its name.
std::function<void()> SchemeSwitch::rebuilt(const Chunk& /*lost*/, Errand& /*errand*/) {
  STOKER_CHECK(false);
  return {};
}

// ---- recovery
// -------------------------------------------------------------------------------------------------

// What the nodes that are not replaced say.
struct SchemeSwitch::Found {
  std::vector<std::pair<NodeId, NodeState>> states;
  std::set<uint64_t> dropped, committed;  // by seq
  std::set<uint8_t> concerned;            // members that have something to recover
  std::map<uint64_t, Said> said;          // the last change of each stripe
  uint64_t settled = 0;
};

Status SchemeSwitch::look(const std::set<NodeId>& replaced, Found& found) {
  Numbers& numbers = *setup().numbers;  // all members begin above whatever any of them did
  const auto unknown = [](const std::string& what, NodeId id) {
    return fail(Code::mismatch,
                "{} of node {} is of a scheme that this program does not know: use a newer one",
                what, id);
  };
  found.concerned.insert(default_);
  for (NodeId id = 0; id < geometry().nodes; ++id) {
    if (replaced.count(id) != 0) continue;
    STOKER_ASSIGN(NodeState state, setup().substrate->scan(id));
    for (const auto& [place, record] : state.records) {
      if (record.scheme >= std::size(kSchemes)) return unknown("a record in the log", id);
      numbers.seq = std::max(numbers.seq, record.seq);
      numbers.epoch = std::max(numbers.epoch, record.epoch);
      found.dropped.insert(record.dropped.begin(), record.dropped.end());
      if (record.kind == Record::Kind::commit) found.committed.insert(record.seq);
      found.concerned.insert(record.scheme);
    }
    for (const auto& [chunk, seq] : state.folded) numbers.seq = std::max(numbers.seq, seq);
    for (const auto& [chunk, said] : state.said) {
      if (said.scheme >= std::size(kSchemes))
        return unknown("what a stripe goes by, says a chunk header", id);
      Said& last = found.said[chunk.stripe];
      if (said.seq > last.seq) last = said;
    }
    found.settled = std::max(found.settled, state.settled);
    found.states.emplace_back(id, std::move(state));
  }
  numbers.seq = std::max(numbers.seq, found.settled);
  return {};
}

Status SchemeSwitch::find_owners(const Found& found) {
  for (const auto& [stripe, said] : found.said) said_[stripe] = said.scheme;
  for (const auto& [id, state] : found.states) {
    for (const auto& [place, record] : state.records) {
      if (record.kind == Record::Kind::epoch || found.dropped.count(record.seq) != 0) continue;
      // No mark ever says of a stage without its commit that it is dead, and it may come back.
      if (record.kind == Record::Kind::stage && commits(record.scheme) &&
          found.committed.count(record.seq) == 0)
        continue;
      const auto folded = state.folded.find(chunk_on(record.chunk.stripe, id));
      if (folded != state.folded.end() && record.seq <= folded->second) continue;
      const auto [known, fresh] = found_.try_emplace(record.chunk.stripe, record.scheme);
      if (!fresh && known->second != record.scheme) {
        return fail(
            Code::corruption,
            "stripe {} has records of `{}` and of `{}` that both count: its logs are damaged",
            record.chunk.stripe, kSchemes[known->second], kSchemes[record.scheme]);
      }
    }
  }
  return {};
}

Status SchemeSwitch::recover(const std::set<NodeId>& replaced) {
  Found found;
  STOKER_TRY(look(replaced, found));
  STOKER_TRY(find_owners(found));
  for (const auto& [stripe, tag] : said_) found.concerned.insert(tag);
  for (const uint8_t each : found.concerned) {
    member(each).view->settle_at_most(found.settled);
    STOKER_TRY(members_[each].scheme->recover(replaced));
  }
  for (auto& [tag, each] : members_) each.view->settle_at_most(UINT64_MAX);
  found_.clear();
  return say_again(found);
}

// What not all chunks of a stripe say is said to all again, before more are lost.
Status SchemeSwitch::say_again(Found& found) {
  constexpr size_t kAtOnce = 64;  // stripes that are flushed together
  std::map<uint64_t, size_t> agree;
  for (const auto& [id, state] : found.states) {
    for (const auto& [chunk, said] : state.said)
      agree[chunk.stripe] += said == found.said[chunk.stripe] ? 1 : 0;
  }
  std::map<uint64_t, uint8_t> again;
  for (const auto& [stripe, said] : found.said) {
    if (agree[stripe] != geometry().chunks()) again[stripe] = said.scheme;
    if (again.size() == kAtOnce) STOKER_TRY(say(std::exchange(again, {})));
  }
  return say(again);
}

std::unique_ptr<Scheme> make_scheme_or_switch(std::string_view name, const Setup& setup) {
  if (name == kChoose) return Choosing::make(setup);
  if (name != kSwitch) return make_scheme(name, setup);
  auto made = SchemeSwitch::make(setup, "vdl");
  return made ? std::move(*made) : nullptr;
}

}  // namespace stoker::curm
