#include "stoker/optim/moments.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "stoker/optim/each_target.h"
#include "stoker/optim/scalar.h"

namespace stoker::optim {
namespace {

constexpr MomentType kLossy[] = {MomentType::bf16, MomentType::q8};

// One moment's bytes and scales.
struct Kept {
  Kept(MomentType the_type, size_t count)
      : type(the_type),
        data(count * moment_bytes(the_type)),
        scales(moment_scales(the_type, count)) {}
  MomentType type;
  std::vector<std::byte> data;
  std::vector<float> scales;

  KeptMoment at(size_t i = 0) {
    return {data.data() + i * moment_bytes(type),
            type == MomentType::q8 ? scales.data() + i / kMomentGroup : nullptr};
  }
  bool operator==(const Kept& other) const {
    return data == other.data && (scales.empty() || std::memcmp(scales.data(), other.scales.data(),
                                                                scales.size() * 4) == 0);
  }
};

struct State {
  State(WeightType weight_type, MomentType type, size_t count)
      : weight(count * weight_bytes(weight_type)),
        remainder(count),
        m(type, count),
        v(type, count) {}
  std::vector<std::byte> weight;
  std::vector<uint16_t> remainder;
  Kept m, v;
  bool operator==(const State&) const = default;
};

struct Case {
  std::string name;
  Hyper hyper;
};

std::vector<Case> cases() {
  return {
      {"adamw", {.lr = 1e-2, .weight_decay = 0.1, .step = 3}},
      {"adam first", {.algorithm = Algorithm::adam, .weight_decay = 0.1, .step = 1}},
      {"sgd momentum", {.algorithm = Algorithm::sgd, .momentum = 0.9, .dampening = 0.2, .step = 2}},
      {"sgd", {.algorithm = Algorithm::sgd, .step = 2}},
      {"lion", {.algorithm = Algorithm::lion, .lr = 1e-4, .step = 9}}};
}

float noise(std::mt19937& bits) {
  std::normal_distribution<float> normal;
  return std::ldexp(normal(bits), static_cast<int>(bits() % 24) - 16);
}

// Moments as training makes them, and groups that are zero, tiny, or hold what is not finite.
std::vector<float> numbers(Which which, size_t count, uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const float value = which == Which::m ? noise(bits) : noise(bits) * noise(bits);
    values[i] = which == Which::m ? value : std::fabs(value);
    if (i / kMomentGroup % 7 == 1) values[i] = 0;
    if (i / kMomentGroup % 7 == 2) values[i] *= 0x1p-130F;
    if (i / kMomentGroup % 7 == 3 && i % 50 == 3)
      values[i] = std::numeric_limits<float>::infinity();
    if (i / kMomentGroup % 7 == 4 && i % 90 == 3) values[i] = std::bit_cast<float>(0xffc12345u);
    if (i / kMomentGroup % 7 == 5) values[i] = bits() % 16 == 0 ? values[i] : 0;
  }
  return values;
}

struct Made {
  State state;
  std::vector<std::byte> grad;
};

Made make(WeightType weight_type, GradType grad_type, MomentType type, size_t count, bool special) {
  Made made{State(weight_type, type, count), std::vector<std::byte>(count * grad_bytes(grad_type))};
  std::mt19937 bits(5);
  for (auto* plane : {&made.state.weight, &made.grad}) {
    const size_t width = plane == &made.grad ? grad_bytes(grad_type) : weight_bytes(weight_type);
    for (size_t i = 0; i < count; ++i) {
      const auto value = std::bit_cast<uint32_t>(noise(bits));
      std::memcpy(plane->data() + i * width, reinterpret_cast<const std::byte*>(&value) + 4 - width,
                  width);
    }
  }
  for (const Which which : {Which::m, Which::v}) {
    auto values = numbers(which, count, 6);
    for (float& value : values)
      if (!special && !std::isfinite(value)) value = 1;
    encode(type, which, values.data(), (which == Which::m ? made.state.m : made.state.v).at(),
           count);
  }
  return made;
}

void step(const Hyper& hyper, WeightType weight_type, GradType grad_type, Made& made, size_t from,
          size_t count) {
  std::byte* const weight = made.state.weight.data() + from * weight_bytes(weight_type);
  const Planes planes{
      .weight_in = weight,
      .weight_out = weight,
      .remainder = weight_type == WeightType::bf16 ? made.state.remainder.data() + from : nullptr,
      .grad = made.grad.data() + from * grad_bytes(grad_type)};
  Moments moments{.type = made.state.m.type, .seed = 17, .parameter = 4};
  if (uses_m(hyper)) moments.m = made.state.m.at(from);
  if (uses_v(hyper)) moments.v = made.state.v.at(from);
  const Part part{from, count, made.grad.size() / grad_bytes(grad_type)};
  update(hyper, weight_type, grad_type, planes, moments, part);
}

template <typename Check>
void for_all_kinds(Check check) {
  for (const auto weight : {WeightType::bf16, WeightType::f32})
    for (const auto grad : {GradType::bf16, GradType::f32})
      for (const MomentType type : kLossy)
        for (const auto& [name, hyper] : cases()) {
          SCOPED_TRACE(name + (type == MomentType::q8 ? " 8bit" : " bf16"));
          check(weight, grad, type, hyper);
        }
}

TEST(Moments, EveryTargetEqualsTheReference) {
  constexpr size_t kCount = 9 * kMomentGroup + 77;
  for (const MomentType type : kLossy)
    for (const Which which : {Which::m, Which::v}) {
      const auto values = numbers(which, kCount, 1);
      Kept nearest(type, kCount);
      auto spoiled = values;
      const std::vector<uint32_t> none(kCount, kNoDraw);
      scalar::encode(type, which, spoiled.data(), nearest.at(), kCount, none.data());
      std::vector<float> back(kCount);
      scalar::decode(type, which, nearest.at(), back.data(), kCount);
      Made drawn = make(WeightType::f32, GradType::f32, type, kCount, true), expected = drawn;
      hwy::SetSupportedTargetsForTest(HWY_EMU128);
      step({}, WeightType::f32, GradType::f32, expected, 0, kCount);
      hwy::SetSupportedTargetsForTest(0);
      on_each_target([&] {
        Kept ours(type, kCount);
        encode(type, which, values.data(), ours.at(), kCount);
        EXPECT_EQ(ours, nearest);
        std::vector<float> floats(kCount);
        decode(type, which, ours.at(), floats.data(), kCount);
        EXPECT_EQ(std::memcmp(floats.data(), back.data(), kCount * 4), 0);
        Made made = drawn;
        step({}, WeightType::f32, GradType::f32, made, 0, kCount);
        EXPECT_EQ(made.state, expected.state);
      });
    }
}

TEST(Moments, EveryTargetUpdatesAlike) {
  for (const size_t count : {size_t{1}, size_t{7}, kMomentGroup - 1, 5 * kMomentGroup + 13})
    for_all_kinds([&](WeightType weight, GradType grad, MomentType type, const Hyper& hyper) {
      const Made start = make(weight, grad, type, count, true);
      std::optional<State> first;
      on_each_target([&] {
        Made made = start;
        step(hyper, weight, grad, made, 0, count);
        if (!first) first = made.state;
        EXPECT_EQ(made.state, *first) << count;
      });
      if (count > kMomentGroup) {
        EXPECT_NE(*first, start.state);
      }
    });
}

TEST(Moments, SlicingChangesNoBit) {
  constexpr size_t kCount = 5 * kMomentGroup + 40;
  for_all_kinds([&](WeightType weight, GradType grad, MomentType type, const Hyper& hyper) {
    const Made start = make(weight, grad, type, kCount, true);
    on_each_target([&] {
      Made whole = start;
      step(hyper, weight, grad, whole, 0, kCount);
      const size_t stride = type == MomentType::q8 ? kMomentGroup : 61;
      for (size_t cut = 0; cut <= kCount; cut += stride) {
        Made sliced = start;
        step(hyper, weight, grad, sliced, 0, cut);
        step(hyper, weight, grad, sliced, cut, kCount - cut);
        ASSERT_EQ(sliced.state, whole.state) << "cut at " << cut;
      }
    });
  });
}

// The float32 update of what is kept, then kept again: with draws of its own, but the same weights.
TEST(Moments, TheUpdateIsTheExactOneOfWhatIsKept) {
  constexpr size_t kCount = 3 * kMomentGroup;
  for_all_kinds([&](WeightType weight, GradType grad, MomentType type, const Hyper& hyper) {
    Made made = make(weight, grad, type, kCount, false), exact = made;
    std::vector<float> m(kCount), v(kCount);
    decode(type, Which::m, exact.state.m.at(), m.data(), kCount);
    decode(type, Which::v, exact.state.v.at(), v.data(), kCount);
    step(hyper, weight, grad, made, 0, kCount);
    const Planes planes{exact.state.weight.data(),
                        exact.state.weight.data(),
                        weight == WeightType::bf16 ? exact.state.remainder.data() : nullptr,
                        m.data(),
                        v.data(),
                        exact.grad.data()};
    update(hyper, weight, grad, planes, Part::all(kCount));
    EXPECT_EQ(made.state.weight, exact.state.weight);
    EXPECT_EQ(made.state.remainder, exact.state.remainder);
  });
}

TEST(Moments, Float32IsTheExactUpdate) {
  constexpr size_t kCount = 300;
  Made made = make(WeightType::bf16, GradType::bf16, MomentType::f32, kCount, false), exact = made;
  step({}, WeightType::bf16, GradType::bf16, made, 0, kCount);
  State& s = exact.state;
  update({}, WeightType::bf16, GradType::bf16,
         {s.weight.data(), s.weight.data(), s.remainder.data(),
          reinterpret_cast<float*>(s.m.data.data()), reinterpret_cast<float*>(s.v.data.data()),
          exact.grad.data()},
         Part::all(kCount));
  EXPECT_EQ(made.state, exact.state);
}

// Draws depend on all four of seed, step, parameter and element, beyond 32 bits of each too.
TEST(Moments, DrawsAreKeyedByAllFour) {
  constexpr uint64_t kFar = uint64_t{1} << 32;
  const uint32_t base = Draws(1, 2, 3, 4)[0];
  // computed apart from docs/formats/planes.md: changing a draw changes every run
  EXPECT_EQ(base, 0x68bfdcc3U);
  EXPECT_EQ(Draws(1, 2, 3, 4 + kFar)[0], 0xa7668e6aU);
  EXPECT_EQ(Draws(1, 2, 3, 0)[4], base);
  EXPECT_EQ(Draws(1, 2, 3, 1)[3], base);
  for (const Draws other :
       {Draws(2, 2, 3, 4), Draws(1, 3, 3, 4), Draws(1, 2, 4, 4), Draws(1, 2, 3, 5),
        Draws(1 + kFar, 2, 3, 4), Draws(1, 2 + kFar, 3, 4), Draws(1, 2, 3 + kFar, 4),
        Draws(1, 2, 3, 4 + kFar), Draws(2, 1, 3, 4), Draws(1, 3, 2, 4)})
    EXPECT_NE(other[0], base);
}

// Each of the 32 bits is set in half of the draws, whatever changes from one draw to the next; m's
// and v's halves are unrelated.
TEST(Moments, DrawsAreEven) {
  constexpr int kDraws = 1 << 16;
  for (int what = 0; what < 4; ++what) {
    std::vector<int> set(32), both(16);
    for (int i = 0; i < kDraws; ++i) {
      uint64_t key[4] = {7, 1, 0, 0};
      key[what] += static_cast<uint64_t>(i);
      const uint32_t word = Draws(key[0], key[1], key[2], key[3])[0];
      for (int bit = 0; bit < 32; ++bit) set[bit] += (word >> bit) & 1;
      for (int bit = 0; bit < 16; ++bit) both[bit] += (word >> bit) & (word >> (16 + bit)) & 1;
    }
    const double spread = 6 * std::sqrt(kDraws) / 2;  // 6 standard deviations
    for (int bit = 0; bit < 32; ++bit)
      EXPECT_NEAR(set[bit], kDraws / 2, spread) << what << " bit " << bit;
    for (int bit = 0; bit < 16; ++bit)
      EXPECT_NEAR(both[bit], kDraws / 4, spread) << what << " bit " << bit;
  }
}

// The mean over many steps of a number that is kept is the number.
TEST(Moments, RoundingKeepsTheMean) {
  constexpr size_t kCount = kMomentGroup;
  constexpr int kSteps = 4000;
  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; ++i)
    values[i] = std::pow(10.0F, -3.0F * static_cast<float>(i) / kCount);
  for (const MomentType type : kLossy) {
    std::vector<double> mean(kCount);
    std::vector<float> back(kCount);
    Kept kept(type, kCount);
    for (int at = 0; at < kSteps; ++at) {
      std::vector<float> spoiled = values;
      std::vector<uint32_t> draws(kCount);
      for (size_t i = 0; i < kCount; ++i) draws[i] = Draws(3, static_cast<uint64_t>(at), 0, 0)[i];
      scalar::encode(type, Which::m, spoiled.data(), kept.at(), kCount, draws.data());
      decode(type, Which::m, kept.at(), back.data(), kCount);
      for (size_t i = 0; i < kCount; ++i) mean[i] += back[i] / static_cast<double>(kSteps);
    }
    for (size_t i = 0; i < kCount; ++i) {
      // of neighbours
      const double gap =
          type == MomentType::bf16 ? values[i] / 128 : std::max(values[i] * 0.15, 2e-5);
      EXPECT_NEAR(mean[i], values[i], 6 * gap / 2 / std::sqrt(kSteps)) << i;
    }
  }
}

template <int kLevels>
void expect_levels(const Codes<kLevels>& codes, Which which) {
  // as the paper's decades: 2^p levels evenly spaced up to 10^-(L-1-p)
  std::vector<double> expected = {0};
  for (int p = 0; p < kLevels; ++p)
    for (int i = 1; i <= 1 << p; ++i) {
      const double end = std::pow(10.0, p - kLevels + 1);
      expected.push_back(p == 0 ? end : end * (0.1 + 0.9 * i / (1 << p)));
    }
  ASSERT_EQ(expected.size(), static_cast<size_t>(codes.kTop) + 1);
  float scale = 1;
  for (int code = 0; code <= codes.kTop; ++code) {
    auto byte = static_cast<std::byte>(code);
    float value = 0;
    decode(MomentType::q8, which, {&byte, &scale}, &value, 1);
    const double y = which == Which::m ? value : std::sqrt(value);
    EXPECT_NEAR(y, expected[static_cast<size_t>(code)],
                1e-6 * expected[static_cast<size_t>(code)] + 1e-9)
        << code;
    if (code == codes.kTop) {
      EXPECT_EQ(value, 1.0F);
    }
  }
}

TEST(Moments, LevelsAreThoseOfDynamicTreeQuantization) {
  expect_levels(kSignedCodes, Which::m);
  expect_levels(kUnsignedCodes, Which::v);
}

// What is read comes back as it was when it is written to the nearest: state_dict() and
// load_state_dict() lose nothing.
TEST(Moments, EncodingWhatWasDecodedChangesNothing) {
  for (const float scale : {1.0F, 0.3F, 1e-9F, 3e12F})
    for (const MomentType type : kLossy)
      for (const Which which : {Which::m, Which::v}) {
        Kept kept(type, kMomentGroup);
        for (size_t i = 0; i < kMomentGroup; ++i) {
          if (type == MomentType::q8) {
            // -128 is no code
            kept.data[i] = static_cast<std::byte>(which == Which::m && i == 128 ? 0 : i);
          } else {
            const auto half =
                static_cast<uint16_t>((i % 2 == 0 || which == Which::v ? 0x3000 : 0xb000) + 37 * i);
            std::memcpy(&kept.data[2 * i], &half, 2);
          }
        }
        if (type == MomentType::q8) kept.scales[0] = scale;
        std::vector<float> values(kMomentGroup);
        decode(type, which, kept.at(), values.data(), kMomentGroup);
        Kept again(type, kMomentGroup);
        encode(type, which, values.data(), again.at(), kMomentGroup);
        EXPECT_EQ(again, kept) << scale;
      }
}

TEST(Moments, AVAboveZeroIsNeverKeptAsZero) {
  std::vector<float> values(kMomentGroup, 1e-30F), back(kMomentGroup);
  values[7] = 1;
  values[9] = 0;
  Kept kept(MomentType::q8, kMomentGroup);
  encode(MomentType::q8, Which::v, values.data(), kept.at(), kMomentGroup);
  decode(MomentType::q8, Which::v, kept.at(), back.data(), kMomentGroup);
  for (size_t i = 0; i < kMomentGroup; ++i) EXPECT_EQ(back[i] > 0, values[i] > 0) << i;
}

TEST(Moments, AGroupWithWhatIsNotFiniteIsNaN) {
  for (const Which which : {Which::m, Which::v}) {
    std::vector<float> values(2 * kMomentGroup, 0.5F), back(2 * kMomentGroup);
    values[3] = std::numeric_limits<float>::infinity();
    Kept kept(MomentType::q8, values.size());
    encode(MomentType::q8, which, values.data(), kept.at(), values.size());
    decode(MomentType::q8, which, kept.at(), back.data(), values.size());
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(std::isnan(back[i]), i < kMomentGroup) << i;
  }
}

// docs/formats/planes.md: the worked example.
TEST(Moments, TheExampleOfTheFormat) {
  std::vector<float> m(kMomentGroup), v(kMomentGroup);
  m[0] = -2.0F, m[1] = 1.0F, m[2] = 0.002F, m[3] = 1e-9F;
  v[0] = 4.0F, v[1] = 1.0F, v[2] = 4e-6F, v[3] = 1e-30F;
  Kept kept_m(MomentType::q8, kMomentGroup), kept_v(MomentType::q8, kMomentGroup);
  encode(MomentType::q8, Which::m, m.data(), kept_m.at(), kMomentGroup);
  encode(MomentType::q8, Which::v, v.data(), kept_v.at(), kMomentGroup);
  const auto bytes = [](const Kept& kept) {
    std::vector<int> out;
    for (size_t i = 0; i < 4; ++i) out.push_back(std::to_integer<int>(kept.data[i]));
    return out;
  };
  EXPECT_EQ(kept_m.scales[0], 2.0F);
  EXPECT_EQ(kept_v.scales[0], 2.0F);
  EXPECT_EQ(bytes(kept_m), (std::vector<int>{0x81, 0x5b, 0x0f, 0x00}));
  EXPECT_EQ(bytes(kept_v), (std::vector<int>{0xff, 0xb8, 0x1f, 0x01}));
}

}  // namespace
}  // namespace stoker::optim
