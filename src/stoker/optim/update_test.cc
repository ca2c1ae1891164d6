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
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
    };
    return weight == other.weight && remainder == other.remainder && equal(m, other.m) &&
           equal(v, other.v);
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
  for (const auto algorithm :
       {Algorithm::adamw, Algorithm::adam, Algorithm::sgd, Algorithm::lion}) {
    const std::string name = "algorithm " + std::to_string(static_cast<int>(algorithm));
    add(name, [&](Hyper& h) { h.algorithm = algorithm; });
    add(name + " no decay", [&](Hyper& h) { h.algorithm = algorithm, h.weight_decay = 0; });
    add(name + " maximize", [&](Hyper& h) { h.algorithm = algorithm, h.maximize = true; });
    add(name + " scaled", [&](Hyper& h) { h.algorithm = algorithm, h.grad_scale = 1024.5; });
    add(name + " first", [&](Hyper& h) { h.algorithm = algorithm, h.step = 1; });
    add(name + " small beta", [&](Hyper& h) { h.algorithm = algorithm, h.beta1 = 0.25; });
  }
  add("sgd momentum",
      [](Hyper& h) { h.algorithm = Algorithm::sgd, h.momentum = 0.9, h.dampening = 0.2; });
  add("sgd momentum first", [](Hyper& h) {
    h.algorithm = Algorithm::sgd, h.momentum = 0.9, h.dampening = 0.2, h.step = 1;
  });
  add("sgd nesterov",
      [](Hyper& h) { h.algorithm = Algorithm::sgd, h.momentum = 0.9, h.nesterov = true; });
  return all;
}

// Numbers that break kernels: zeros of both signs, denormals, the extremes, infinities and NaNs of
// several payloads.
constexpr uint32_t kSpecial[] = {0u,          0x80000000u, 1u,          0x807fffffu, 0x00800000u,
                                 0x7f7fffffu, 0xff7f8000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                                 0xffc12345u, 0x7fa00001u, 0x3f808000u, 0x3f818000u};

struct Random {
  std::mt19937 bits;
  std::normal_distribution<float> normal;
  bool special;  // every eighth number is one of kSpecial

  float next() {
    if (special && bits() % 8 == 0)
      return std::bit_cast<float>(kSpecial[bits() % std::size(kSpecial)]);
    return std::ldexp(normal(bits), static_cast<int>(bits() % 16) - 8);
  }
};

std::vector<std::byte> random_grad(GradType type, size_t count, Random& random) {
  std::vector<std::byte> grad(count * grad_bytes(type));
  for (size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(random.next());
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (type == GradType::bf16)
      std::memcpy(grad.data() + 2 * i, &half, 2);
    else
      std::memcpy(grad.data() + 4 * i, &bits, 4);
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
    split(masters.data(), reinterpret_cast<uint16_t*>(state.weight.data()), state.remainder.data(),
          count);
  }
  state.m.resize(count);
  state.v.resize(count);
  for (float& m : state.m) m = random.next();
  for (float& v : state.v) v = std::fabs(random.next());
  return state;
}

Planes planes_at(State& state, WeightType weight, const std::vector<std::byte>& grad, GradType type,
                 size_t at) {
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

// The reference, with the rest of a float32 parameter, if it has one.
void plain_update(const Hyper& hyper, WeightType weight, GradType type, State& state,
                  const std::vector<std::byte>& grad, size_t count) {
  const Coefficients c(hyper);
  const size_t rest = weight == WeightType::f32 ? count % 8 : 0, before = count - rest;
  scalar::update(c, weight, type, planes_at(state, weight, grad, type, 0), before);
  scalar::update_rest(c, type, planes_at(state, weight, grad, type, before), rest);
}

TEST(Update, EveryTargetEqualsTheReference) {
  constexpr size_t kCount = 1000 + 13;
  for (const auto& [name, hyper] : cases())
    for_all_types([&](WeightType weight, GradType type) {
      Random random{std::mt19937(7), {}, true};
      const State start = random_state(weight, kCount, random);
      const auto grad = random_grad(type, kCount, random);
      State reference = start;
      plain_update(hyper, weight, type, reference, grad, kCount);
      on_each_target([&] {
        State ours = start;
        const Planes planes = planes_at(ours, weight, grad, type, 0);
        update(hyper, weight, type, planes, Part::all(kCount));
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
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq");
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
        plain_update(hyper, weight, type, reference, grad, count);
        on_each_target([&] {
          State ours = start;
          const Planes planes = planes_at(ours, weight, grad, type, 0);
          update(hyper, weight, type, planes, Part::all(count));
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
        update(hyper, weight, type, planes_at(whole, weight, grad, type, 0), Part::all(kCount));
        for (size_t cut = 0; cut <= kCount; ++cut) {
          State sliced = start;
          for (const Part part : {Part{0, cut, kCount}, Part{cut, kCount - cut, kCount}})
            update(hyper, weight, type, planes_at(sliced, weight, grad, type, part.first), part);
          ASSERT_TRUE(sliced.same_bits(whole)) << name << " cut at " << cut;
        }
      });
    });
}

// What torch makes of an old moment (v of Adam, m of SGD) where it takes single elements.
float rest_of(float factor, float old, float added) { return std::fma(old, factor, added); }

TEST(Update, TheRestOfAFloat32ParameterFusesTheOldMoment) {
  constexpr size_t kCount = 8 * 40 + 7;
  constexpr auto kF32 = WeightType::f32;
  constexpr auto kGrad = GradType::f32;
  for (const bool sgd : {false, true}) {
    Hyper hyper{.lr = 1e-2, .step = 3};
    if (sgd) hyper.algorithm = Algorithm::sgd, hyper.momentum = 0.9, hyper.dampening = 0.3;
    const Coefficients c(hyper);
    Random random{std::mt19937(29), {}, false};
    const State start = random_state(kF32, kCount, random);
    const auto grad = random_grad(kGrad, kCount, random);
    on_each_target([&] {
      size_t unlike = 0;
      for (size_t count = 1; count <= kCount; ++count) {
        State ours = start, vectors = start;
        update(hyper, kF32, kGrad, planes_at(ours, kF32, grad, kGrad, 0), Part::all(count));
        scalar::update(c, kF32, kGrad, planes_at(vectors, kF32, grad, kGrad, 0), count);
        const std::vector<float>& moment = sgd ? ours.m : ours.v;
        for (size_t i = count / 8 * 8; i < count; ++i) {
          float g = 0;
          std::memcpy(&g, grad.data() + 4 * i, 4);
          const float expected = sgd ? rest_of(0.9F, start.m[i], static_cast<float>(1 - 0.3) * g)
                                     : rest_of(0.999F, start.v[i], c.one_minus_beta2 * g * g);
          ASSERT_EQ(moment[i], expected) << i << " of " << count;
          unlike += moment[i] != (sgd ? vectors.m : vectors.v)[i] ? 1 : 0;
        }
        const size_t bytes = count / 8 * 8 * sizeof(float);
        ASSERT_EQ(std::memcmp(ours.weight.data(), vectors.weight.data(), bytes), 0) << count;
        ASSERT_EQ(std::memcmp(ours.m.data(), vectors.m.data(), bytes), 0) << count;
        ASSERT_EQ(std::memcmp(ours.v.data(), vectors.v.data(), bytes), 0) << count;
      }
      EXPECT_GT(unlike, 50U);  // else this could not fail
    });
  }
}

TEST(Update, TouchesNothingBeyondTheSlice) {
  constexpr size_t kCount = 64, kBegin = 5, kEnd = 40;
  for_all_types([&](WeightType weight, GradType type) {
    Random random{std::mt19937(13), {}, false};
    const State start = random_state(weight, kCount, random);
    const auto grad = random_grad(type, kCount, random);
    on_each_target([&] {
      State state = start;
      const Part part{kBegin, kEnd - kBegin, kCount};
      update(Hyper{}, weight, type, planes_at(state, weight, grad, type, kBegin), part);
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
      const Part all = Part::all(kCount);
      update(Hyper{}, weight, type, planes_at(in_place, weight, grad, type, 0), all);
      std::vector<std::byte> out(aside.weight.size());
      Planes planes = planes_at(aside, weight, grad, type, 0);
      planes.weight_out = out.data();
      update(Hyper{}, weight, type, planes, all);
      EXPECT_EQ(aside.weight, start.weight);
      aside.weight = out;
      EXPECT_TRUE(aside.same_bits(in_place));
    });
  });
}

// bf16 weights with their remainders are float32 weights in another coat: the same masters after
// every step. There is no rest, which float32 weights alone have.
TEST(Update, Bf16MastersEqualFloat32Weights) {
  constexpr size_t kCount = 333 / kTorchLanes * kTorchLanes;
  for (const auto& [name, start_hyper] : cases()) {
    Hyper hyper = start_hyper;
    Random one{std::mt19937(19), {}, false}, two = one;
    State half = random_state(WeightType::bf16, kCount, one);
    State full = random_state(WeightType::f32, kCount, two);
    for (int step = 0; step < 50; ++step, ++hyper.step) {
      const auto grad = random_grad(GradType::bf16, kCount, one);
      for (const WeightType weight : {WeightType::bf16, WeightType::f32}) {
        State& state = weight == WeightType::bf16 ? half : full;
        const Planes planes = planes_at(state, weight, grad, GradType::bf16, 0);
        update(hyper, weight, GradType::bf16, planes, Part::all(kCount));
      }
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
  const auto planes_of = [](State& state, const std::vector<std::byte>& grad, GradType type) {
    return planes_at(state, WeightType::f32, grad, type, 0);
  };
  const Part all = Part::all(kCount);
  update({}, WeightType::f32, GradType::bf16, planes_of(a, half, GradType::bf16), all);
  update({}, WeightType::f32, GradType::f32, planes_of(b, full, GradType::f32), all);
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
    update(hyper, WeightType::f32, GradType::f32, planes, Part::all(weight.size()));
    EXPECT_EQ(weight, std::vector<float>(20, 0.75f));
  });
  Hyper lion{.algorithm = Algorithm::lion, .lr = 0.5};
  EXPECT_TRUE(uses_m(lion) && !uses_v(lion));
  planes.m = m.data();
  weight.assign(20, 1.0f);
  update(lion, WeightType::f32, GradType::f32, planes, Part::all(weight.size()));
  EXPECT_EQ(weight, std::vector<float>(20, 0.5f));  // one step of lr against the gradient's sign
}

}  // namespace
}  // namespace stoker::optim
