#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "stoker/optim/each_target.h"
#include "stoker/optim/planes.h"
#include "stoker/optim/scalar.h"

namespace stoker::optim {
namespace {

// Every plane of a small tensor. Comparing states compares all bits, those of NaNs too.
struct State {
  std::vector<std::byte> weight;
  std::vector<uint16_t> remainder;
  std::vector<float> m, v;

  bool same_bits(const State& other) const {
    const auto equal = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
    };
    return weight == other.weight && remainder == other.remainder && equal(m, other.m) && equal(v, other.v);
  }
};

struct Case {
  std::string name;
  Hyper hyper;
};

std::vector<Case> cases() {
  const Hyper base{.lr = 1e-2, .weight_decay = 0.1, .step = 3};
  std::vector<Case> all;
  const auto add = [&](std::string name, auto change) {
    Hyper hyper = base;
    change(hyper);
    all.push_back({std::move(name), hyper});
  };
  for (const auto algorithm : {Algorithm::adamw, Algorithm::adam, Algorithm::sgd, Algorithm::lion}) {
    const std::string name = "algorithm " + std::to_string(static_cast<int>(algorithm));
    add(name, [&](Hyper& h) { h.algorithm = algorithm; });
    add(name + " no decay", [&](Hyper& h) { h.algorithm = algorithm, h.weight_decay = 0; });
    add(name + " maximize", [&](Hyper& h) { h.algorithm = algorithm, h.maximize = true; });
    add(name + " scaled", [&](Hyper& h) { h.algorithm = algorithm, h.grad_scale = 1024.5; });
    add(name + " first", [&](Hyper& h) { h.algorithm = algorithm, h.step = 1; });
    add(name + " small beta", [&](Hyper& h) { h.algorithm = algorithm, h.beta1 = 0.25; });
  }
  add("sgd momentum", [](Hyper& h) { h.algorithm = Algorithm::sgd, h.momentum = 0.9, h.dampening = 0.2; });
  add("sgd momentum first", [](Hyper& h) { h.algorithm = Algorithm::sgd, h.momentum = 0.9, h.dampening = 0.2, h.step = 1; });
  add("sgd nesterov", [](Hyper& h) { h.algorithm = Algorithm::sgd, h.momentum = 0.9, h.nesterov = true; });
  return all;
}

// Numbers that break kernels: zeros of both signs, denormals, the extremes, infinities and NaNs of several payloads.
constexpr uint32_t kSpecial[] = {0u,          0x80000000u, 1u,          0x807fffffu, 0x00800000u, 0x7f7fffffu, 0xff7f8000u,
                                 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u, 0x7fa00001u, 0x3f808000u, 0x3f818000u};

struct Random {
  std::mt19937 bits;
  std::normal_distribution<float> normal;
  bool special;  // every eighth number is one of kSpecial

  float next() {
    if (special && bits() % 8 == 0) return std::bit_cast<float>(kSpecial[bits() % std::size(kSpecial)]);
    return std::ldexp(normal(bits), static_cast<int>(bits() % 16) - 8);
  }
};

std::vector<std::byte> random_grad(GradType type, size_t count, Random& random) {
  std::vector<std::byte> grad(count * grad_bytes(type));
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(random.next());
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (type == GradType::bf16) std::memcpy(grad.data() + 2 * i, &half, 2);
    else std::memcpy(grad.data() + 4 * i, &bits, 4);
  }
  return grad;
}

// A state whose masters are the same numbers for both weight types.
State random_state(WeightType type, size_t count, Random& random) {
  State state;
  std::vector<float> masters(count);
  for (float& master : masters) master = random.next();
  state.weight.resize(count * weight_bytes(type));
  if (type == WeightType::f32) {
    std::memcpy(state.weight.data(), masters.data(), state.weight.size());
  } else {
    state.remainder.resize(count);
    split(masters.data(), reinterpret_cast<uint16_t*>(state.weight.data()), state.remainder.data(), count);
  }
  state.m.resize(count);
  state.v.resize(count);
  for (float& m : state.m) m = random.next();
  for (float& v : state.v) v = std::fabs(random.next());
  return state;
}

Planes planes_at(State& state, WeightType weight, const std::vector<std::byte>& grad, GradType type, size_t at) {
  std::byte* const weights = state.weight.data() + at * weight_bytes(weight);
  return {weights,
          weights,
          weight == WeightType::bf16 ? state.remainder.data() + at : nullptr,
          state.m.data() + at,
          state.v.data() + at,
          grad.data() + at * grad_bytes(type)};
}

template <typename Check>
void for_all_types(Check check) {
  for (const auto weight : {WeightType::bf16, WeightType::f32})
    for (const auto grad : {GradType::bf16, GradType::f32}) check(weight, grad);
}

TEST(Update, EveryTargetEqualsTheReference) {
  constexpr size_t kCount = 1000 + 13;
  for (const auto& [name, hyper] : cases())
    for_all_types([&](WeightType weight, GradType type) {
      Random random{std::mt19937(7), {}, true};
      const State start = random_state(weight, kCount, random);
      const auto grad = random_grad(type, kCount, random);
      State reference = start;
      scalar::update(Coefficients(hyper), weight, type, planes_at(reference, weight, grad, type, 0), kCount);
      on_each_target([&] {
        State ours = start;
        update(hyper, weight, type, planes_at(ours, weight, grad, type, 0), kCount);
        EXPECT_TRUE(ours.same_bits(reference)) << name;
      });
    });
}

// Which targets the tests of this folder compare: all that this processor has, by its own word.
TEST(Update, NoTargetOfThisProcessorIsLeftOut) {
  std::vector<std::string> names;
  on_each_target([&] { names.emplace_back(target_name()); });
  std::vector<std::string> expected;
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (avx3) expected.emplace_back("AVX3");
  if (avx2) expected.emplace_back("AVX2");
#endif
  expected.emplace_back("scalar");
  EXPECT_THAT(names, testing::IsSupersetOf(expected));  // a newer Highway has further ones
  EXPECT_THAT(names, testing::Not(testing::Contains(testing::HasSubstr("SSE"))));
}

// Every length of a tail, beside every kind of vector.
TEST(Update, OddSizesEqualTheReference) {
  for (const auto& [name, hyper] : cases())
    for_all_types([&](WeightType weight, GradType type) {
      for (size_t count = 1; count <= 35; ++count) {
        Random random{std::mt19937(8), {}, true};
        const State start = random_state(weight, count, random);
        const auto grad = random_grad(type, count, random);
        State reference = start;
        const Planes planes = planes_at(reference, weight, grad, type, 0);
        scalar::update(Coefficients(hyper), weight, type, planes, count);
        on_each_target([&] {
          State ours = start;
          update(hyper, weight, type, planes_at(ours, weight, grad, type, 0), count);
          EXPECT_TRUE(ours.same_bits(reference)) << name << " " << count;
        });
      }
    });
}

TEST(Update, SlicingAnywhereChangesNoBit) {
  constexpr size_t kCount = 67;
  for (const auto& [name, hyper] : cases())
    for_all_types([&](WeightType weight, GradType type) {
      Random random{std::mt19937(11), {}, true};
      const State start = random_state(weight, kCount, random);
      const auto grad = random_grad(type, kCount, random);
      on_each_target([&] {
        State whole = start;
        update(hyper, weight, type, planes_at(whole, weight, grad, type, 0), kCount);
        for (size_t cut = 0; cut <= kCount; ++cut) {
          State sliced = start;
          update(hyper, weight, type, planes_at(sliced, weight, grad, type, 0), cut);
          update(hyper, weight, type, planes_at(sliced, weight, grad, type, cut), kCount - cut);
          ASSERT_TRUE(sliced.same_bits(whole)) << name << " cut at " << cut;
        }
      });
    });
}

TEST(Update, TouchesNothingBeyondTheSlice) {
  constexpr size_t kCount = 64, kBegin = 5, kEnd = 40;
  for_all_types([&](WeightType weight, GradType type) {
    Random random{std::mt19937(13), {}, false};
    const State start = random_state(weight, kCount, random);
    const auto grad = random_grad(type, kCount, random);
    on_each_target([&] {
      State state = start;
      update(Hyper{}, weight, type, planes_at(state, weight, grad, type, kBegin), kEnd - kBegin);
      const size_t size = weight_bytes(weight);
      for (size_t i = 0; i < kCount; ++i) {
        const bool inside = i >= kBegin && i < kEnd;
        ASSERT_EQ(state.m[i] != start.m[i], inside) << i;
        ASSERT_EQ(state.v[i] != start.v[i], inside) << i;
        if (inside) continue;
        ASSERT_EQ(std::memcmp(&state.weight[i * size], &start.weight[i * size], size), 0) << i;
        if (weight == WeightType::bf16) {
          ASSERT_EQ(state.remainder[i], start.remainder[i]) << i;
        }
      }
    });
  });
}

TEST(Update, OutOfPlaceEqualsInPlace) {
  constexpr size_t kCount = 45;
  for_all_types([&](WeightType weight, GradType type) {
    Random random{std::mt19937(17), {}, true};
    const State start = random_state(weight, kCount, random);
    const auto grad = random_grad(type, kCount, random);
    on_each_target([&] {
      State in_place = start, aside = start;
      update(Hyper{}, weight, type, planes_at(in_place, weight, grad, type, 0), kCount);
      std::vector<std::byte> out(aside.weight.size());
      Planes planes = planes_at(aside, weight, grad, type, 0);
      planes.weight_out = out.data();
      update(Hyper{}, weight, type, planes, kCount);
      EXPECT_EQ(aside.weight, start.weight);
      aside.weight = out;
      EXPECT_TRUE(aside.same_bits(in_place));
    });
  });
}

// bf16 weights with their remainders are float32 weights in another coat: the same masters after every step.
TEST(Update, Bf16MastersEqualFloat32Weights) {
  constexpr size_t kCount = 333;
  for (const auto& [name, start_hyper] : cases()) {
    Hyper hyper = start_hyper;
    Random one{std::mt19937(19), {}, false}, two = one;
    State half = random_state(WeightType::bf16, kCount, one);
    State full = random_state(WeightType::f32, kCount, two);
    for (int step = 0; step < 50; ++step, ++hyper.step) {
      const auto grad = random_grad(GradType::bf16, kCount, one);
      update(hyper, WeightType::bf16, GradType::bf16, planes_at(half, WeightType::bf16, grad, GradType::bf16, 0), kCount);
      update(hyper, WeightType::f32, GradType::bf16, planes_at(full, WeightType::f32, grad, GradType::bf16, 0), kCount);
      std::vector<std::byte> masters(kCount * sizeof(float));
      join(reinterpret_cast<const uint16_t*>(half.weight.data()), half.remainder.data(),
           reinterpret_cast<float*>(masters.data()), kCount);
      ASSERT_EQ(masters, full.weight) << name << " step " << step;
    }
  }
}

// A bf16 gradient and the same numbers in float32 give the same update.
TEST(Update, GradientTypesAgree) {
  constexpr size_t kCount = 100;
  Random random{std::mt19937(23), {}, false};
  const State start = random_state(WeightType::f32, kCount, random);
  const auto half = random_grad(GradType::bf16, kCount, random);
  std::vector<std::byte> full(kCount * 4);
  for (size_t i = 0; i < kCount; ++i) std::memcpy(&full[4 * i + 2], &half[2 * i], 2);
  State a = start, b = start;
  update(Hyper{}, WeightType::f32, GradType::bf16, planes_at(a, WeightType::f32, half, GradType::bf16, 0), kCount);
  update(Hyper{}, WeightType::f32, GradType::f32, planes_at(b, WeightType::f32, full, GradType::f32, 0), kCount);
  EXPECT_TRUE(a.same_bits(b));
}

TEST(Update, PlanesThatAreNotNeededMayBeNull) {
  std::vector<float> weight(20, 1.0f), grad(20, 0.5f), m(20, 0.0f);
  Planes planes;
  planes.weight_in = planes.weight_out = reinterpret_cast<std::byte*>(weight.data());
  planes.grad = reinterpret_cast<const std::byte*>(grad.data());
  Hyper hyper{.algorithm = Algorithm::sgd, .lr = 0.5};
  EXPECT_FALSE(uses_m(hyper) || uses_v(hyper));
  on_each_target([&] {
    weight.assign(20, 1.0f);
    update(hyper, WeightType::f32, GradType::f32, planes, weight.size());
    EXPECT_EQ(weight, std::vector<float>(20, 0.75f));
  });
  Hyper lion{.algorithm = Algorithm::lion, .lr = 0.5};
  EXPECT_TRUE(uses_m(lion) && !uses_v(lion));
  planes.m = m.data();
  weight.assign(20, 1.0f);
  update(lion, WeightType::f32, GradType::f32, planes, weight.size());
  EXPECT_EQ(weight, std::vector<float>(20, 0.5f));  // one step of lr against the gradient's sign
}

}  // namespace
}  // namespace stoker::optim
