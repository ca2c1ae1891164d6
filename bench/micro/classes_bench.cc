// What it takes to tell a class: one walk down the shipped tree, over features that differ from call to call.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "stoker/classes/classes.h"

namespace {

using namespace stoker;

void classify(benchmark::State& state) {
  std::mt19937 random(1);
  std::vector<ClassFeatures> all(4096);
  for (ClassFeatures& features : all) {
    for (float& feature : features) feature = static_cast<float>(random() % 1000) / 100;
  }
  const ClassTree& tree = ClassTree::shipped();
  size_t at = 0;
  for (auto _ : state) benchmark::DoNotOptimize(tree.classify(all[at++ % all.size()]));
}
BENCHMARK(classify);

}  // namespace

BENCHMARK_MAIN();
