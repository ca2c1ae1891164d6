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

WindowOrder::WindowOrder(const WindowShape& shape, uint64_t seed, uint64_t epoch)
    : shape_(shape),
      seed_(seed),
      epoch_(epoch),
      lane_samples_(shape.count / shape.batch * (shape.batch / shape.lanes)),
      runs_((shape.count + shape.run - 1) / shape.run, seed, epoch),
      short_slot_(runs_.position(runs_.count() - 1)),
      short_run_(shape.count - (runs_.count() - 1) * shape.run) {
  STOKER_CHECK(shape.count <= uint64_t{1} << 62 && shape.run <= uint64_t{1} << 62 &&
               shape.window >= 1 && shape.lanes >= 1 && shape.batch % shape.lanes == 0);
}

uint64_t WindowOrder::lane_samples(uint64_t lane) const {
  return lane < shape_.lanes ? lane_samples_ : shape_.count - shape_.lanes * lane_samples_;
}

// The rest is less than a batch: one window.
uint64_t WindowOrder::window_samples(uint64_t lane) const {
  return lane < shape_.lanes ? shape_.window : std::max<uint64_t>(1, lane_samples(lane));
}

WindowOrder::Place WindowOrder::place(uint64_t position) const {
  STOKER_CHECK(position < shape_.count);
  const uint64_t in_lanes = shape_.lanes * lane_samples_;
  if (position >= in_lanes) return {shape_.lanes, position - in_lanes};
  const uint64_t each = shape_.batch / shape_.lanes;  // places of a batch
  const uint64_t within = position % shape_.batch;
  return {within / each, position / shape_.batch * each + within % each};
}

WindowOrder::Part WindowOrder::part(uint64_t lane, uint64_t window) const {
  const uint64_t begin = lane * lane_samples_, samples = lane_samples(lane);
  const uint64_t first = window * window_samples(lane);
  return {begin + first, begin + first + std::min(window_samples(lane), samples - first)};
}

Permutation WindowOrder::mixed(uint64_t lane, uint64_t window, const Part& part) const {
  // Not the key of the runs, nor that of another window.
  return {part.last - part.first, mix(mix(mix(seed_) + lane) + window), epoch_};
}

uint64_t WindowOrder::line(const Place& place) const {
  const uint64_t window = place.within / window_samples(place.lane);
  const Part of = part(place.lane, window);
  return of.first + mixed(place.lane, window, of).sample(place.within % window_samples(place.lane));
}

// Only the last run may be short: what stands behind it begins so much earlier.
WindowOrder::Slot WindowOrder::slot(uint64_t number) const {
  const uint64_t first = number * shape_.run - (number > short_slot_ ? shape_.run - short_run_ : 0);
  return {runs_.sample(number), first, first + (number == short_slot_ ? short_run_ : shape_.run)};
}

WindowOrder::Slot WindowOrder::slot_at(uint64_t line) const {
  const uint64_t before = short_slot_ * shape_.run;
  if (line < before) return slot(line / shape_.run);
  if (line < before + short_run_) return slot(short_slot_);
  return slot(short_slot_ + 1 + (line - before - short_run_) / shape_.run);
}

uint64_t WindowOrder::sample(uint64_t position) const {
  const uint64_t at = line(place(position));
  const Slot in = slot_at(at);
  return in.run * shape_.run + at - in.first;
}

uint64_t WindowOrder::position(uint64_t sample) const {
  STOKER_CHECK(sample < shape_.count);
  const uint64_t at = slot(runs_.position(sample / shape_.run)).first + sample % shape_.run;
  const uint64_t lane =
      lane_samples_ == 0 ? shape_.lanes : std::min(at / lane_samples_, shape_.lanes);
  const uint64_t window = (at - lane * lane_samples_) / window_samples(lane);
  const Part of = part(lane, window);
  const uint64_t within =
      window * window_samples(lane) + mixed(lane, window, of).position(at - of.first);
  if (lane == shape_.lanes) return shape_.lanes * lane_samples_ + within;
  const uint64_t each = shape_.batch / shape_.lanes;
  return within / each * shape_.batch + lane * each + within % each;
}

Stretch WindowOrder::stretch(uint64_t position) const {
  const Place at = place(position);
  const uint64_t window = at.within / window_samples(at.lane);
  const Part of = part(at.lane, window);
  const Slot in = slot_at(line(at));
  const uint64_t first = std::max(of.first, in.first), last = std::min(of.last, in.last);
  return {at.lane, window, in.run * shape_.run + first - in.first, last - first};
}

uint64_t WindowOrder::passed(uint64_t position) const {
  const Place at = place(position);
  const Part of = part(at.lane, at.within / window_samples(at.lane));
  const uint64_t samples = of.last - of.first;
  return at.within % window_samples(at.lane) * kWhole / samples;
}

std::vector<Stretch> WindowOrder::stretches(uint64_t lane, uint64_t window) const {
  std::vector<Stretch> all;
  const uint64_t samples = lane_samples(lane);
  if (lane > shape_.lanes || samples == 0 || window > (samples - 1) / window_samples(lane))
    return all;
  const Part of = part(lane, window);
  for (uint64_t at = of.first; at < of.last;) {
    const Slot in = slot_at(at);
    const uint64_t last = std::min(of.last, in.last);
    all.push_back({lane, window, in.run * shape_.run + at - in.first, last - at});
    at = last;
  }
  return all;
}

Result<Mixture> Mixture::make(std::span<const double> weights, uint64_t seed) {
  if (weights.empty() || weights.size() > kCycle) {
    return fail(Code::invalid_argument, "a mixture has 1 to {} sources, not {}", kCycle,
                weights.size());
  }
  double greatest = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] <= 0) {
      return fail(Code::invalid_argument,
                  "the weight of source {} of a mixture is {}: give a number above zero, or leave "
                  "the source out",
                  i, weights[i]);
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
