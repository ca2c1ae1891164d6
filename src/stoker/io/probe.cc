#include "stoker/io/probe.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "stoker/base/bytes.h"

namespace stoker {
namespace {

constexpr uint64_t kFileMax = 1 * kGiB;
constexpr uint64_t kFileMin = 64 * kMiB;
constexpr size_t kMemory = 64 * kMiB;
constexpr uint32_t kDepth = 32;

struct Plan {
  Load::Kind kind;
  size_t block_bytes;
  uint32_t depth;
};

// In order of importance: on a slow disk the last ones may not be reached.
std::vector<Plan> plans() {
  std::vector<Plan> plans;
  constexpr std::array kinds = {Load::Kind::read, Load::Kind::write, Load::Kind::mixed};
  for (const size_t block : {1 * kMiB, 4 * kMiB, 256 * kKiB, 64 * kKiB}) {
    for (const Load::Kind kind : kinds)
      plans.push_back(
          {kind, block, static_cast<uint32_t>(std::min<size_t>(kDepth, kMemory / block))});
  }
  for (const uint32_t depth : {1U, 4U, 8U}) {
    for (const Load::Kind kind : {Load::Kind::read, Load::Kind::write})
      plans.push_back({kind, 1 * kMiB, depth});
  }
  return plans;
}

// How large a temporary file the folder has room for; half of what is free at most.
Result<uint64_t> choose_bytes(const std::string& folder) {
  struct stat st {};
  if (stat(folder.c_str(), &st) != 0) return fail(errno, "cannot probe '{}'", folder);
  if (!S_ISDIR(st.st_mode))
    return fail(Code::invalid_argument, "cannot probe '{}': it is not a folder; name a folder",
                folder);
  struct statvfs fs {};
  if (statvfs(folder.c_str(), &fs) != 0) return fail(errno, "cannot probe '{}'", folder);
  const uint64_t free = static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize;
  const uint64_t bytes = align_down(std::min(kFileMax, free / 2), 4 * kMiB);
  if (bytes < kFileMin) {
    return fail(Code::out_of_space,
                "cannot probe '{}': only {} are free and {} are needed; free some space", folder,
                human_bytes(free), human_bytes(2 * kFileMin));
  }
  return bytes;
}

std::string page_kind(const PageReport& pages) {
  switch (pages.kind) {
    case PageReport::Kind::hugetlb:
      return "hugetlb";
    case PageReport::Kind::transparent:
      return "transparent";
    case PageReport::Kind::small:
      return "small";
  }
  return "";
}

// Some bytes that do not compress to nothing, for devices that would cheat.
void fill(const Slice& memory) {
  uint64_t state = 0x9E3779B97F4A7C15ULL;
  for (size_t at = 0; at + 8 <= memory.size; at += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(memory.data + at, &state, 8);
  }
}

class Prober {
 public:
  Prober(Loop& loop, const Slice& memory, const ProbeOptions& options)
      : loop_(loop), memory_(memory), options_(options), started_ns_(loop.clock().now_ns()) {}

  // The first pass over the new file: gives it content, and the rate of never written blocks. A
  // slow disk gets a smaller file.
  Status prepare(FileId file, uint64_t bytes, Probe* probe) {
    tell("first write", 0);
    uint64_t written = 0;
    uint64_t ns = 0;
    while (written < bytes && (written == 0 || seconds() < options_.seconds / 4)) {
      const uint64_t now = std::min(kFileMin, bytes - written);
      STOKER_ASSIGN(
          const LoadResult pass,
          run_load(loop_, file, memory_, {Load::Kind::write, 1 * kMiB, kDepth, now, 0, written}));
      ns += pass.ns;
      written += now;
    }
    probe->file_bytes = written;
    rate_ = static_cast<double>(written) * 1e9 / static_cast<double>(std::max<uint64_t>(ns, 1));
    probe->first_write_bytes_per_second = rate_;
    return {};
  }

  Status measure(FileId file, Probe* probe) {
    const std::vector<Plan> all = plans();
    const double begin = seconds();
    const double each =
        std::max(0.05, (options_.seconds - begin) / static_cast<double>(all.size()));
    for (const Plan& plan : all) {
      if (seconds() + each / 2 > options_.seconds && !probe->points.empty()) break;
      tell(std::string(name(plan.kind)) + " " + human_bytes(plan.block_bytes) + " depth " +
               std::to_string(plan.depth),
           seconds() / options_.seconds);
      // What is under way when the time is over must still finish: no more than the disk does in
      // the time of one point.
      const double fits = std::max(1.0, rate_ * each / static_cast<double>(plan.block_bytes));
      const auto depth = static_cast<uint32_t>(std::min<double>(plan.depth, fits));
      const Load load{plan.kind, plan.block_bytes, depth, probe->file_bytes,
                      static_cast<uint64_t>(each * 1e9)};
      STOKER_ASSIGN(const LoadResult result, run_load(loop_, file, memory_, load));
      const double latency_us =
          static_cast<double>(result.ns) * depth / static_cast<double>(result.operations) / 1e3;
      probe->points.push_back(
          {plan.kind, plan.block_bytes, depth, result.bytes_per_second(), latency_us});
    }
    tell("done", 1);
    return {};
  }

 private:
  double seconds() const { return static_cast<double>(loop_.clock().now_ns() - started_ns_) / 1e9; }
  void tell(std::string_view doing, double fraction) const {
    if (options_.progress) options_.progress(doing, std::min(fraction, 1.0));
  }

  Loop& loop_;
  const Slice memory_;
  const ProbeOptions& options_;
  const uint64_t started_ns_;
  double rate_ = 0;  // bytes a second of the first pass
};

Result<Probe> probe_file(Loop& loop, FileId file, uint64_t bytes, const Arena& arena,
                         const Buffer& buffer, const ProbeOptions& options) {
  Probe probe;
  probe.engine = loop.traits().name;
  probe.pages = page_kind(arena.pages());
  Prober prober(loop, buffer.slice(), options);
  STOKER_TRY(prober.prepare(file, bytes, &probe));
  STOKER_TRY(prober.measure(file, &probe));
  return probe;
}

}  // namespace

double Probe::best(Load::Kind kind) const {
  double best = 0;
  for (const ProbePoint& point : points) {
    if (point.kind == kind) best = std::max(best, point.bytes_per_second);
  }
  return best;
}

Result<Probe> run_probe(const std::string& folder, const ProbeOptions& options) {
  STOKER_ASSIGN(const uint64_t bytes, choose_bytes(folder));
  STOKER_ASSIGN(auto engine, make_engine(options.engine, kDepth));
  Budget budget(kMemory);
  STOKER_ASSIGN(const auto arena, Arena::make(kMemory, budget));
  STOKER_ASSIGN(const Buffer buffer, arena->take(kMemory));
  fill(buffer.slice());
  STOKER_ASSIGN(const auto loop,
                Loop::make(std::move(engine), {.depth = kDepth, .background_bytes = 0}));
  STOKER_TRY(loop->adopt(*arena));
  const std::string path = folder + "/.stoker.probe." + std::to_string(getpid());
  const auto file = loop->open({.path = path, .create = true, .reserve_bytes = bytes});
  unlink(path.c_str());  // whatever happens from here on, nothing stays behind
  if (!file) return file.error().with("cannot probe '" + folder + "'");
  auto probe = probe_file(*loop, file->id, bytes, *arena, buffer, options);
  if (probe) probe->direct = file->direct;
  STOKER_TRY(loop->close(file->id));
  STOKER_TRY(loop->unadopt(*arena));
  return probe;
}

}  // namespace stoker
