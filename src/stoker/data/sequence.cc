#include "stoker/data/sequence.h"

#include <algorithm>
#include <string>
#include <utility>

namespace stoker::data {
namespace {

// One source, shuffled anew each epoch. The order of an epoch is made once for all positions in it.
template <typename Order, typename Of>
class Epochs {
 public:
  Epochs(uint64_t count, const Of& of, uint64_t seed) : count_(count), of_(of), seed_(seed) {}

  const Order& at(uint64_t position) {
    const uint64_t epoch = position / count_;
    if (!order_ || epoch != epoch_) {
      order_.emplace(of_, seed_, epoch);
      epoch_ = epoch;
    }
    return *order_;
  }
  uint64_t within(uint64_t position) const { return position % count_; }
  uint64_t epoch() const { return epoch_; }

 private:
  uint64_t count_;
  Of of_;
  uint64_t seed_, epoch_ = 0;
  std::optional<Order> order_;
};

// What one source adds to the reads of a range of positions.
class Permuted {
 public:
  Permuted(uint32_t source, uint64_t count, uint64_t seed)
      : source_(source), epochs_(count, count, seed) {}

  void add(uint64_t position, Reads& reads) {
    reads.picks.push_back({source_, epochs_.at(position).sample(epochs_.within(position))});
  }

 private:
  uint32_t source_;
  Epochs<Permutation, uint64_t> epochs_;
};

class InWindows {
 public:
  InWindows(const WindowShape& shape, uint64_t seed)
      : shape_(shape), epochs_(shape.count, shape, seed) {}

  void add(uint64_t position, Reads& reads) {
    const WindowOrder& order = epochs_.at(position);
    const uint64_t within = epochs_.within(position);
    const Stretch stretch = order.stretch(within);
    reads.picks.push_back({0, order.sample(within)});
    reads.of_picks.push_back(neighbours(stretch));
    const auto at = std::ranges::find(ends_, stretch.lane, [](const End& end) { return end.lane; });
    End& end = at == ends_.end() ? ends_.emplace_back() : *at;
    end = {stretch.lane, stretch.window, position, order.passed(within)};
  }
  // The next windows of the lanes that were read, as far as these were passed. Nothing beyond the
  // epoch: it may be the last.
  void look_ahead(Reads& reads) {
    for (const End& end : ends_) {
      const WindowOrder& order = epochs_.at(end.position);
      const auto next = order.stretches(end.lane, end.window + 1);
      const uint64_t many = next.size() * (end.passed + 1) / WindowOrder::kWhole;
      for (uint64_t i = 0; i < many; ++i) reads.soon.push_back(neighbours(next[i]));
    }
  }

 private:
  struct End {
    uint64_t lane, window, position, passed;
  };
  Neighbours neighbours(const Stretch& of) const {
    const uint64_t windows = shape_.count / shape_.window + 1;  // at least those of each lane
    return {0, of.lane, epochs_.epoch() * windows + of.window, of.sample, of.count};
  }

  WindowShape shape_;
  Epochs<WindowOrder, WindowShape> epochs_;
  std::vector<End> ends_;  // of each lane, the last position
};

}  // namespace

Sequence Sequence::in_order(uint64_t count) { return Sequence(InOrder{count}); }

Sequence Sequence::shuffled(uint64_t count, uint64_t seed) {
  return Sequence(Shuffled{count, seed});
}

Sequence Sequence::windowed(const WindowShape& shape, uint64_t seed) {
  return Sequence(Windowed{shape, seed});
}

Result<Sequence> Sequence::mixed(const std::vector<uint64_t>& counts,
                                 const std::vector<double>& weights, uint64_t seed) {
  if (counts.size() != weights.size()) {
    return fail(Code::invalid_argument, "a mixture of {} sources needs as many weights, not {}",
                counts.size(), weights.size());
  }
  STOKER_ASSIGN(Mixture mixture, Mixture::make(weights, seed));
  // Sources of one length must not be drawn in one order: each has a seed of its own.
  std::vector<Shuffled> parts;
  for (size_t i = 0; i < counts.size(); ++i) parts.push_back({counts[i], seed + 1 + i});
  return Sequence(Mixed{std::move(mixture), std::move(parts)});
}

std::optional<uint64_t> Sequence::count() const {
  if (const auto* all = std::get_if<InOrder>(&kind_)) return all->count;
  if (const auto* all = std::get_if<Shuffled>(&kind_)) return all->count;
  if (const auto* all = std::get_if<Windowed>(&kind_)) return all->shape.count;
  return std::nullopt;
}

std::vector<Pick> Sequence::picks(uint64_t first, uint64_t last) const {
  return reads(first, last).picks;
}

Reads Sequence::reads(uint64_t first, uint64_t last) const {
  Reads reads;
  reads.picks.reserve(last - first);
  if (const auto* each = std::get_if<InOrder>(&kind_)) {
    for (uint64_t at = first; at < last; ++at) {
      // Up to the end of the epoch all follow one another; each range is a turn of its own.
      const uint64_t begin = std::max(first, at / each->count * each->count);
      const uint64_t end = std::min(last, (at / each->count + 1) * each->count);
      reads.picks.push_back({0, at % each->count});
      reads.of_picks.push_back({0, 0, begin, begin % each->count, end - begin});
    }
  } else if (const auto* one = std::get_if<Shuffled>(&kind_)) {
    Permuted source(0, one->count, one->seed);
    for (uint64_t at = first; at < last; ++at) source.add(at, reads);
  } else if (const auto* in = std::get_if<Windowed>(&kind_)) {
    InWindows source(in->shape, in->seed);
    for (uint64_t at = first; at < last; ++at) source.add(at, reads);
    source.look_ahead(reads);
  } else {
    const auto& [mixture, parts] = std::get<Mixed>(kind_);
    std::vector<Permuted> sources;
    sources.reserve(parts.size());
    for (uint32_t i = 0; i < parts.size(); ++i)
      sources.emplace_back(i, parts[i].count, parts[i].seed);
    for (uint64_t at = first; at < last; ++at) {
      const Draw draw = mixture.draw(at);
      sources[draw.source].add(draw.number, reads);
    }
  }
  return reads;
}

}  // namespace stoker::data
