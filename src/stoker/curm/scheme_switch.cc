#include "stoker/curm/scheme_switch.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace stoker::curm {
namespace {

// Whether a fold of this scheme counts by a commit; those of others by their stages.
bool commits(uint8_t tag) { return kSchemes[tag] == "vdl" || kSchemes[tag] == "curm"; }

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

SchemeSwitch::SchemeSwitch(const Setup& setup) : setup_(setup) {}
SchemeSwitch::~SchemeSwitch() = default;

Result<std::unique_ptr<SchemeSwitch>> SchemeSwitch::make(const Setup& setup, std::string_view scheme) {
  std::unique_ptr<SchemeSwitch> made(new SchemeSwitch(setup));
  STOKER_ASSIGN(made->default_, tag_of(scheme));
  made->setup_.form = Form::safe;
  made->setup_.numbers = std::make_shared<Numbers>();
  return made;
}

// What stands in records: never changes.
Result<uint8_t> SchemeSwitch::tag_of(std::string_view scheme) {
  const auto found = std::find(std::begin(kSchemes), std::end(kSchemes), scheme);
  if (found == std::end(kSchemes)) return make_error(Code::invalid_argument, "there is no scheme `" + std::string(scheme) + "`; there are fo, fl, pl, plr, parix, vdl and curm", "curm/scheme_switch");
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
    member.view = std::make_unique<View>(*setup_.substrate, tag);
    Setup setup = setup_;
    setup.substrate = member.view.get();
    setup.owns = [this, tag](uint64_t stripe) { return this->tag(stripe) == tag; };
    member.scheme = make_scheme(kSchemes[tag], setup);
  }
  return member;
}

Status SchemeSwitch::change(uint64_t stripe, std::string_view scheme) {
  STOKER_ASSIGN(const uint8_t next, tag_of(scheme));
  if (next == tag(stripe)) return {};
  STOKER_TRY(fold(stripe));
  said_[stripe] = next;
  return {};
}

Status SchemeSwitch::fold_all() {
  for (auto& [tag, member] : members_) STOKER_TRY(member.scheme->fold_all());
  return {};
}

Status SchemeSwitch::recover(const std::set<NodeId>& replaced) {
  const Geometry& geometry = setup_.geometry;
  std::vector<std::pair<NodeId, NodeState>> states;
  std::set<uint64_t> dropped, committed;
  std::set<uint8_t> concerned = {default_};
  uint64_t settled = 0;
  for (const auto& [stripe, tag] : said_) concerned.insert(tag);
  for (NodeId id = 0; id < geometry.nodes; ++id) {
    if (replaced.count(id) != 0) continue;
    STOKER_ASSIGN(NodeState state, setup_.substrate->scan(id));
    for (const auto& [place, record] : state.records) {
      // All of them begin above whatever any of them did.
      setup_.numbers->seq = std::max(setup_.numbers->seq, record.seq);
      setup_.numbers->epoch = std::max(setup_.numbers->epoch, record.epoch);
      dropped.insert(record.dropped.begin(), record.dropped.end());
      if (record.kind == Record::Kind::commit) committed.insert(record.seq);
      if (record.scheme >= std::size(kSchemes)) return make_error(Code::mismatch, "a record in the log of node " + std::to_string(id) + " is of a scheme that this program does not know: use a newer one", "curm/scheme_switch");
      concerned.insert(record.scheme);
    }
    for (const auto& [chunk, seq] : state.folded) setup_.numbers->seq = std::max(setup_.numbers->seq, seq);
    setup_.numbers->seq = std::max(setup_.numbers->seq, state.settled);
    settled = std::max(settled, state.settled);
    states.emplace_back(id, std::move(state));
  }
  for (const auto& [id, state] : states) {
    for (const auto& [place, record] : state.records) {
      if (record.kind == Record::Kind::epoch || dropped.count(record.seq) != 0) continue;
      // No mark ever says of a stage without its commit that it is dead, and it may come back.
      if (record.kind == Record::Kind::stage && commits(record.scheme) && committed.count(record.seq) == 0) continue;
      const auto nodes = static_cast<uint64_t>(geometry.nodes);
      const Chunk mine{record.chunk.stripe, static_cast<int>((static_cast<uint64_t>(id) + nodes - record.chunk.stripe % nodes) % nodes)};
      const auto folded = state.folded.find(mine);
      if (folded != state.folded.end() && record.seq <= folded->second) continue;
      const auto [known, fresh] = found_.try_emplace(record.chunk.stripe, record.scheme);
      if (!fresh && known->second != record.scheme) {
        return make_error(Code::corruption, "stripe " + std::to_string(record.chunk.stripe) + " has records of `" + std::string(kSchemes[known->second]) + "` and of `" + std::string(kSchemes[record.scheme]) + "` that both count: its logs are damaged", "curm/scheme_switch");
      }
    }
  }
  for (const uint8_t each : concerned) {
    member(each).view->settle_at_most(settled);
    STOKER_TRY(members_[each].scheme->recover(replaced));
  }
  for (auto& [tag, each] : members_) each.view->settle_at_most(UINT64_MAX);
  found_.clear();
  return {};
}

}  // namespace stoker::curm
