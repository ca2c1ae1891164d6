#include "stoker/data/sequence.h"

#include <string>
#include <utility>

namespace stoker::data {
namespace {

constexpr const char* kWhere = "data/sequence";

// The permutation of an epoch is made once for all positions in it.
class Epochs {
 public:
  Epochs(uint64_t count, uint64_t seed) : count_(count), seed_(seed) {}

  uint64_t sample(uint64_t position) {
    const uint64_t epoch = position / count_;
    if (!order_ || epoch != epoch_) {
      order_.emplace(count_, seed_, epoch);
      epoch_ = epoch;
    }
    return order_->sample(position % count_);
  }

 private:
  uint64_t count_, seed_, epoch_ = 0;
  std::optional<Permutation> order_;
};

}  // namespace

Sequence Sequence::in_order(uint64_t count) { return Sequence(InOrder{count}); }

Sequence Sequence::shuffled(uint64_t count, uint64_t seed) {
  return Sequence(Shuffled{count, seed});
}

Result<Sequence> Sequence::mixed(const std::vector<uint64_t>& counts,
                                 const std::vector<double>& weights, uint64_t seed) {
  if (counts.size() != weights.size()) {
    return make_error(Code::invalid_argument,
                      "a mixture of " + std::to_string(counts.size()) +
                          " sources needs as many weights, not " + std::to_string(weights.size()),
                      kWhere);
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
  return std::nullopt;
}

std::vector<Pick> Sequence::picks(uint64_t first, uint64_t last) const {
  std::vector<Pick> picks;
  picks.reserve(last - first);
  if (const auto* all = std::get_if<InOrder>(&kind_)) {
    for (uint64_t at = first; at < last; ++at) picks.push_back({0, at % all->count});
  } else if (const auto* each = std::get_if<Shuffled>(&kind_)) {
    Epochs epochs(each->count, each->seed);
    for (uint64_t at = first; at < last; ++at) picks.push_back({0, epochs.sample(at)});
  } else {
    const auto& [mixture, parts] = std::get<Mixed>(kind_);
    std::vector<Epochs> epochs;
    epochs.reserve(parts.size());
    for (const Shuffled& part : parts) epochs.emplace_back(part.count, part.seed);
    for (uint64_t at = first; at < last; ++at) {
      const Draw draw = mixture.draw(at);
      picks.push_back({draw.source, epochs[draw.source].sample(draw.number)});
    }
  }
  return picks;
}

}  // namespace stoker::data
