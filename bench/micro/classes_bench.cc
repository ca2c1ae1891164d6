// What it takes to tell a class: one walk down the shipped tree, over features that differ from
// call to call; and of an object that is made, whose name is read.
#include <benchmark/benchmark.h>

#include <random>
#include <string>
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

void at_creation(benchmark::State& state) {
  ClassTable table(ClassTree::shipped());
  table.set(1, 7, {Class::read_only, true});
  std::vector<std::string> keys;
  for (int i = 0; i < 256; ++i)
    keys.push_back("run7/" + std::string(i % 2 == 0 ? "checkpoints" : "some-folder") + "/part-" +
                   std::to_string(i) + (i % 4 < 2 ? ".parquet" : ".bin"));
  size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(table.at_creation({7, keys[at % keys.size()], at}));
    ++at;
  }
}
BENCHMARK(at_creation);

}  // namespace

BENCHMARK_MAIN();
