// AdamW, with m and v as float32, bfloat16 and in 8 bits, against the machine's memory: bytes a
// second that the kernel must touch (each plane read once, and written once if it changes), beside
// a stream over the very same buffers that reads and writes the same bytes and computes next to
// nothing. The ratio of the two is printed at the end. Buffers are larger than any cache, in large
// pages where the kernel grants them, and touched before the first measurement.
//   stoker_optim_bench [--benchmark_out=FILE --benchmark_out_format=json]
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "stoker/optim/moments.h"

namespace {

using namespace stoker::optim;

constexpr size_t kCount = size_t{32} << 20;  // elements: 448 or 640 MB of planes
constexpr size_t kAlign = size_t{64} << 10;  // elements; where threads split

// Memory for one plane, never freed: it lives as long as the program.
std::byte* plane(size_t bytes) {
  constexpr size_t kLargePage = size_t{2} << 20;
  void* const mapped =
      mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    std::perror("cannot map the benchmark's buffers; they take 1.1 GB");
    std::exit(1);
  }
  void* const at = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(mapped) + kLargePage - 1) &
                                           ~(kLargePage - 1));
  madvise(at, bytes, MADV_HUGEPAGE);
  std::memset(at, 0, bytes);
  return static_cast<std::byte*>(at);
}

struct Buffers {
  WeightType weight_type;
  GradType grad_type;
  Planes planes;

  explicit Buffers(WeightType type)
      : weight_type(type), grad_type(type == WeightType::bf16 ? GradType::bf16 : GradType::f32) {
    std::byte* const weight = plane(kCount * weight_bytes(type));
    std::byte* const grad = plane(kCount * grad_bytes(grad_type));
    planes = {weight,
              weight,
              nullptr,
              reinterpret_cast<float*>(plane(kCount * 4)),
              reinterpret_cast<float*>(plane(kCount * 4)),
              grad};
    if (type == WeightType::bf16) planes.remainder = reinterpret_cast<uint16_t*>(plane(kCount * 2));
    // 0x3c3c.. reads as about 0.011 in either type: ordinary numbers, so that no denormal slows the
    // arithmetic
    std::memset(grad, 0x3c, kCount * grad_bytes(grad_type));
    std::memset(weight, 0x3c, kCount * weight_bytes(type));
  }

  double written_bytes(MomentType moments) const {  // of an element
    const double scales = moments == MomentType::q8 ? 8.0 / kMomentGroup : 0;
    return static_cast<double>(weight_bytes(weight_type) + (planes.remainder ? 2 : 0) +
                               2 * moment_bytes(moments)) +
           scales;
  }
  double touched_bytes(MomentType moments) const {
    return 2 * written_bytes(moments) + static_cast<double>(grad_bytes(grad_type));
  }
};

// m, or v, of float32 is long enough for what is kept in fewer bytes, and the scales behind it.
KeptMoment kept(float* plane, MomentType type, size_t begin) {
  const KeptMoment whole{reinterpret_cast<std::byte*>(plane),
                         type == MomentType::q8 ? plane + kCount / 2 : nullptr};
  return {whole.data + begin * moment_bytes(type),
          whole.scales ? whole.scales + begin / kMomentGroup : nullptr};
}

Buffers& buffers(WeightType type) {
  static Buffers bf16(WeightType::bf16), f32(WeightType::f32);
  return type == WeightType::bf16 ? bf16 : f32;
}

struct Share {
  size_t begin, count;
};

// Each thread works on its own part of the tensor.
Share share_of(const benchmark::State& state) {
  const size_t each = kCount / static_cast<size_t>(state.threads()) / kAlign * kAlign;
  return {each * static_cast<size_t>(state.thread_index()), each};
}

void count_bytes(benchmark::State& state, const Buffers& buffers, MomentType moments,
                 size_t count) {
  state.SetBytesProcessed(
      static_cast<int64_t>(static_cast<double>(state.iterations()) * static_cast<double>(count) *
                           buffers.touched_bytes(moments)));
}

void adamw(benchmark::State& state, WeightType type, MomentType moment_type) {
  const Buffers& b = buffers(type);
  const auto [begin, count] = share_of(state);
  Planes p = b.planes;
  p.weight_in += begin * weight_bytes(type);
  p.weight_out += begin * weight_bytes(type);
  p.grad += begin * grad_bytes(b.grad_type);
  if (p.remainder) p.remainder += begin;
  const Moments moments{
      .type = moment_type, .m = kept(p.m, moment_type, begin), .v = kept(p.v, moment_type, begin)};
  const Part part{.first = begin, .count = count, .elements = kCount};
  Hyper hyper{.lr = 1e-6, .weight_decay = 0.01};
  if (state.thread_index() == 0) {
    std::memset(b.planes.m, 0, kCount * 4);  // zeros in every form
    std::memset(b.planes.v, 0, kCount * 4);
  }
  for (auto _ : state) {
    update(hyper, type, b.grad_type, p, moments, part);
    ++hyper.step;
  }
  count_bytes(state, b, moment_type, count);
}

#if defined(__x86_64__) && !defined(__clang__)
#define STOKER_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define STOKER_WIDEST
#endif

// Flips a bit of each word. Twice is nothing, so the planes keep ordinary numbers.
STOKER_WIDEST void rewrite(void* at, size_t bytes) {
  auto* const words = static_cast<uint64_t*>(at);
  for (size_t i = 0; i < bytes / 8; ++i) words[i] ^= 1;
}

STOKER_WIDEST uint64_t read_all(const void* at, size_t bytes) {
  const auto* const words = static_cast<const uint64_t*>(at);
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes / 8; ++i) sum += words[i];
  return sum;
}

// One plane after the other: few streams at a time is what memory likes best, so this is the higher
// ceiling.
void stream(benchmark::State& state, WeightType type, MomentType moments) {
  const Buffers& b = buffers(type);
  const auto [begin, count] = share_of(state);
  for (auto _ : state) {
    rewrite(b.planes.weight_out + begin * weight_bytes(type), count * weight_bytes(type));
    if (b.planes.remainder) rewrite(b.planes.remainder + begin, count * 2);
    rewrite(b.planes.m + begin, count * moment_bytes(moments));
    rewrite(b.planes.v + begin, count * moment_bytes(moments));
    benchmark::DoNotOptimize(
        read_all(b.planes.grad + begin * grad_bytes(b.grad_type), count * grad_bytes(b.grad_type)));
  }
  count_bytes(state, b, moments, count);
}

#define STOKER_BESIDE_ITS_STREAM(name, weights, moments) \
  BENCHMARK_CAPTURE(adamw, name, weights, moments)       \
      ->Threads(1)                                       \
      ->Threads(2)                                       \
      ->UseRealTime()                                    \
      ->Unit(benchmark::kMillisecond);                   \
  BENCHMARK_CAPTURE(stream, name, weights, moments)      \
      ->Threads(1)                                       \
      ->Threads(2)                                       \
      ->UseRealTime()                                    \
      ->Unit(benchmark::kMillisecond)
STOKER_BESIDE_ITS_STREAM(bf16, WeightType::bf16, MomentType::f32);
STOKER_BESIDE_ITS_STREAM(f32, WeightType::f32, MomentType::f32);
STOKER_BESIDE_ITS_STREAM(bf16_moments_bf16, WeightType::bf16, MomentType::bf16);
STOKER_BESIDE_ITS_STREAM(bf16_moments_8bit, WeightType::bf16, MomentType::q8);

// Keeps the medians, to set each kernel beside its stream.
class Ratios : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs)
      if (run.aggregate_name == "median")
        medians_[run.run_name.str()] = run.counters.at("bytes_per_second").value;
  }

  void print() const {
    std::printf("\nkernels: %s\n", target_name());
    for (const auto& [name, rate] : medians_) {
      if (name.rfind("adamw", 0) != 0) continue;
      const double ceiling = medians_.at("stream" + name.substr(5));
      std::printf("%-32s %5.1f GB/s of %5.1f GB/s: ratio %.2f\n", name.c_str(), rate / 1e9,
                  ceiling / 1e9, rate / ceiling);
    }
  }

 private:
  std::map<std::string, double> medians_;
};

}  // namespace

int main(int argc, char** argv) {
  // Five repetitions, interleaved, unless the command line says otherwise.
  std::vector<std::string> words{argv[0], "--benchmark_repetitions=5",
                                 "--benchmark_enable_random_interleaving=true",
                                 "--benchmark_report_aggregates_only=true"};
  words.insert(words.end(), argv + 1, argv + argc);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  benchmark::AddCustomContext("target", target_name());
  buffers(WeightType::bf16);  // touched before anything is measured
  Ratios reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  reporter.print();
}
