#include "curm/model.h"

#include <algorithm>
#include <utility>

namespace stoker::curm {
namespace {

uint64_t area_of(const Chunk& chunk) {
  return chunk.stripe * 64 + static_cast<uint64_t>(chunk.position);
}

bool in_log(const Step::Part& part) { return part.logged && !part.place.reserved; }

// Word of what is released goes along with other messages.
bool says_something(const Errand& errand) {
  return std::any_of(errand.steps.begin(), errand.steps.end(),
                     [](const Step& step) { return step.kind != Step::Kind::release; });
}

}  // namespace

Model::Picked Model::pick(const Errand& errand) const {
  std::vector<std::pair<uint64_t, uint64_t>> wanted;  // begin, end in the log
  for (const Step& step : errand.steps) {
    for (const Step::Part& part : step.parts) {
      const auto found = in_log(part) ? logged_.find(part.place.id) : logged_.end();
      if (found != logged_.end())
        wanted.emplace_back(found->second.at + part.offset,
                            found->second.at + part.offset + part.bytes);
    }
  }
  std::sort(wanted.begin(), wanted.end());
  Picked picked;
  uint64_t last = 0;
  for (const auto& [begin, end] : wanted) {
    const bool jumps = picked.seeks == 0 || begin > last + gap_;
    if (jumps) ++picked.seeks;
    picked.bytes += jumps ? end - begin : end > last ? end - last : 0;
    last = std::max(last, end);
  }
  return picked;
}

// All that the errand reads of the log comes with the first step that wants some of it.
Play::Step Model::read(const Step& step, Picked& picked) {
  Play::Step play{Play::Kind::read, area_of(step.chunk), 0, 0, 0, 0};
  uint64_t bytes = 0;
  for (const Step::Part& part : step.parts) {
    bytes += part.bytes;
    if (in_log(part)) {
      const Picked all = std::exchange(picked, {});
      play.seeks += all.seeks;
      play.bytes += all.bytes;
      if (all.seeks != 0) play.area = UINT64_MAX;
    } else {
      play.bytes += part.bytes;
      // what is reserved comes with its chunk
      if (!part.logged && play.seeks++ == 0) play.at = part.offset;
    }
  }
  *step.value = Value::sized(bytes);
  return play;
}

Play::Step Model::append(NodeId node, Step& step, bool background) {
  const Record record = step.record();
  const uint64_t payload = record.payload_bytes(), bytes = payload + kRecordHeaderBytes;
  *step.place = {node, ++ids_, step.reserved};
  logged_[ids_] = {log_ends_[node], bytes};
  if (!step.reserved) log_ends_[node] += bytes;
  if (counts_on_) {
    (background ? counts_.background_payload_bytes : counts_.payload_bytes) += payload;
    (background ? counts_.background_framing_bytes : counts_.framing_bytes) += kRecordHeaderBytes;
    if (background) {
      ++counts_.background_writes;
    } else {
      ++(step.reserved ? counts_.random_writes : counts_.sequential_writes);
    }
  }
  // What is reserved is space that was taken when the chunk was made.
  if (step.reserved) return {Play::Kind::write, area_of(step.chunk) + 32, ids_, bytes, 1, 0};
  return {Play::Kind::append, 0, 0, bytes, 1, bytes};
}

void Model::count(const Round& round, const Step& step, uint64_t bytes) {
  if (!counts_on_) return;
  if (step.kind == Step::Kind::mark) {
    (round.background ? counts_.background_framing_bytes : counts_.framing_bytes) += bytes;
    return;
  }
  (round.background ? counts_.background_payload_bytes : counts_.payload_bytes) += bytes;
  // Records reserved behind a chunk are read in one go with it: no request of their own.
  const bool asks = std::any_of(step.parts.begin(), step.parts.end(), [](const Step::Part& part) {
    return !part.logged || in_log(part);
  });
  if (step.kind == Step::Kind::read && asks)
    ++(round.background ? counts_.background_reads : counts_.reads);
  if (step.kind == Step::Kind::write)
    ++(round.background ? counts_.background_writes : counts_.random_writes);
}

void count_messages(const Round& round, Counts& counts) {
  if (round.background) return;
  bool remote = false;
  for (const Errand& errand : round.errands) {
    if (errand.node == round.from || (!says_something(errand) && !errand.steps.empty())) continue;
    remote = true;
    counts.messages += round.kind == Round::Kind::entry ? 1 : 2;
  }
  if (round.kind == Round::Kind::acknowledge && round.from != kClient) ++counts.messages;
  if (round.kind == Round::Kind::entry || (round.kind == Round::Kind::exchange && remote))
    ++counts.round_trips;
}

// On a disk by itself, or as the share of one that works on so many at once.
double Model::takes_ns(const Play::Step& step, int lanes) const {
  const auto on = [&](uint64_t begins_ns, uint64_t bytes_per_s) {
    return static_cast<double>(begins_ns) / lanes +
           static_cast<double>(step.bytes) * 1e9 / static_cast<double>(bytes_per_s);
  };
  switch (step.kind) {
    case Play::Kind::read:
      return on(step.seeks * device_.random_read_ns, device_.read_bytes_per_s);
    case Play::Kind::write:
      return on(step.seeks * device_.random_write_ns, device_.write_bytes_per_s);
    case Play::Kind::append:
      return on(device_.next_ns, device_.write_bytes_per_s);
    case Play::Kind::flush:
      return static_cast<double>(device_.flush_ns) / lanes;
  }
  return 0;
}

void Model::add_cost(const Round& round, const Play& play) {
  double longest = 0;
  for (const Play::Errand& errand : play.errands) {
    double path = 0;
    if (errand.node != round.from)
      path += 2 * static_cast<double>(device_.link_ns) +
              static_cast<double>(errand.sent + errand.answered) * 1e9 /
                  static_cast<double>(device_.link_bytes_per_s);
    for (const Play::Step& step : errand.steps) {
      busy_ns_ += takes_ns(step, device_.lanes);
      path += takes_ns(step, 1);
    }
    longest = std::max(longest, path);
  }
  path_ns_[round.background ? 1 : 0] += longest;
}

Status Model::run(Round& round) {
  Play play;
  play.from = round.from;
  play.kind = round.kind;
  if (counts_on_) count_messages(round, counts_);
  for (Errand& errand : round.errands) {
    const bool says = says_something(errand);
    Play::Errand mine;
    mine.node = errand.node;
    mine.sent = errand.sent;
    mine.answered = errand.answered;
    Picked picked = pick(errand);
    for (Step& step : errand.steps) {
      switch (step.kind) {
        case Step::Kind::derive:
          *step.value = step.compute();
          break;
        case Step::Kind::read: {
          const Play::Step next = read(step, picked);
          if (next.bytes != 0) mine.steps.push_back(next);
          count(round, step, step.value->size());
          break;
        }
        case Step::Kind::write:
          mine.steps.push_back(
              {Play::Kind::write, area_of(step.chunk), step.offset, step.value->size(), 1, 0});
          count(round, step, step.value->size());
          break;
        case Step::Kind::mark:
          mine.steps.push_back(
              {Play::Kind::write, area_of(step.chunk), UINT64_MAX / 2, kChunkHeaderBytes, 1, 0});
          count(round, step, kChunkHeaderBytes);
          break;
        case Step::Kind::append: {
          const Play::Step next = append(errand.node, step, round.background);
          if (next.kind == Play::Kind::append && !mine.steps.empty() &&
              mine.steps.back().kind == Play::Kind::append) {
            mine.steps.back().bytes += next.bytes;  // records that follow each other leave together
            mine.steps.back().space += next.space;
          } else {
            mine.steps.push_back(next);
          }
          break;
        }
        case Step::Kind::flush:
          mine.steps.push_back({Play::Kind::flush, 0, 0, 0, 0, 0});
          if (counts_on_ && !round.background) ++counts_.flushes;
          break;
        case Step::Kind::release:
          for (const LogPlace& place : step.released) {
            const auto found = logged_.find(place.id);
            if (found == logged_.end()) continue;
            if (!place.reserved) play.freed += found->second.bytes;
            logged_.erase(found);
          }
          break;
      }
    }
    if (!says && !errand.steps.empty()) continue;
    play.errands.push_back(std::move(mine));
  }
  add_cost(round, play);
  plays_.push_back(std::move(play));
  return {};
}

}  // namespace stoker::curm
