#include "stoker/base/order.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>

#include "stoker/base/check.h"
#include "stoker/base/error.h"

namespace stoker {
namespace {

// The finaliser of splitmix64: every input bit reaches every output bit.
uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

Permutation::Permutation(uint64_t count, uint64_t seed, uint64_t epoch) : count_(count) {
  STOKER_CHECK(count >= 1 && count <= uint64_t{1} << 63);
  const auto bits = static_cast<uint32_t>(std::bit_width(count - 1));
  half_bits_ = std::max(1U, (bits + 1) / 2);
  half_mask_ = (uint64_t{1} << half_bits_) - 1;
  // Seed and epoch are mixed one after the other, so that (1, 2) and (2, 1) are unrelated.
  uint64_t key = mix(mix(seed) ^ epoch);
  for (uint64_t& round : keys_) round = key = mix(key);
}

// A cycle that starts inside the range returns to it, so both walks end.
uint64_t Permutation::sample(uint64_t position) const {
  STOKER_CHECK(position < count_);
  do position = forward(position);
  while (position >= count_);
  return position;
}

uint64_t Permutation::position(uint64_t sample) const {
  STOKER_CHECK(sample < count_);
  do sample = backward(sample);
  while (sample >= count_);
  return sample;
}

uint64_t Permutation::forward(uint64_t value) const {
  uint64_t left = value >> half_bits_;
  uint64_t right = value & half_mask_;
  for (const uint64_t key : keys_) {
    const uint64_t next = left ^ (mix(right ^ key) & half_mask_);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

uint64_t Permutation::backward(uint64_t value) const {
  uint64_t left = value >> half_bits_;
  uint64_t right = value & half_mask_;
  for (size_t round = kRounds; round-- > 0;) {
    const uint64_t before = right ^ (mix(left ^ keys_[round]) & half_mask_);
    right = left;
    left = before;
  }
  return left << half_bits_ | right;
}

Result<Mixture> Mixture::make(std::span<const double> weights, uint64_t seed) {
  if (weights.empty() || weights.size() > kCycle) {
    return make_error(Code::invalid_argument, "a mixture has 1 to " + std::to_string(kCycle) +
                                                  " sources, not " +
                                                  std::to_string(weights.size()));
  }
  double greatest = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] <= 0) {
      return make_error(Code::invalid_argument,
                        "the weight of source " + std::to_string(i) + " of a mixture is " +
                            std::to_string(weights[i]) +
                            ": give a number above zero, or leave the source out");
    }
    greatest = std::max(greatest, weights[i]);
  }
  double sum = 0;  // of weights beside the greatest: it cannot overflow
  for (const double weight : weights) sum += weight / greatest;
  // Each source has one draw for certain. The rest goes to those that are short of their share, and
  // what rounding leaves over goes to the largest remainders, the first ones first.
  std::vector<double> wanted(weights.size());
  double wanted_sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    wanted[i] = std::max(0.0, weights[i] / greatest / sum * static_cast<double>(kCycle) - 1);
    wanted_sum += wanted[i];
  }
  std::vector<uint32_t> counts(weights.size(), 1);
  uint64_t left = kCycle - weights.size();
  const double scale = left == 0 ? 0 : static_cast<double>(left) / wanted_sum;
  for (size_t i = 0; i < weights.size(); ++i) {
    double whole = 0;
    wanted[i] = std::modf(wanted[i] * scale, &whole);
    const uint64_t given = std::min(left, static_cast<uint64_t>(whole));
    counts[i] += static_cast<uint32_t>(given);
    left -= given;
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](size_t i) { return wanted[i]; });
  for (size_t i = 0; left > 0; i = (i + 1) % order.size(), --left) ++counts[order[i]];
  return Mixture(std::move(counts), seed);
}

Mixture::Mixture(std::vector<uint32_t> counts, uint64_t seed)
    : counts_(std::move(counts)), starts_(counts_.size()), seed_(seed) {
  std::exclusive_scan(counts_.begin(), counts_.end(), starts_.begin(), uint32_t{0});
}

Draw Mixture::draw(uint64_t position) const {
  const uint64_t cycle = position / kCycle;
  const uint64_t slot = Permutation(kCycle, seed_, cycle).sample(position % kCycle);
  const auto after = std::ranges::upper_bound(starts_, slot);
  const auto source = static_cast<uint32_t>(after - starts_.begin() - 1);
  return {source, cycle * counts_[source] + slot - starts_[source]};
}

uint64_t Mixture::position(const Draw& draw) const {
  STOKER_CHECK(draw.source < counts_.size());
  const uint64_t cycle = draw.number / counts_[draw.source];
  const uint64_t slot = starts_[draw.source] + draw.number % counts_[draw.source];
  return cycle * kCycle + Permutation(kCycle, seed_, cycle).position(slot);
}

}  // namespace stoker
