// A trace of files that are made, used and removed, by a seed. No public trace that we may use
// tells names and sizes of files as they are made, so this population is made up: folders whose
// files are used alike, most of them named for it, some not, and some files that are used otherwise
// than their folder says.
#include <algorithm>
#include <array>
#include <string>

#include "curm/generator.h"
#include "curm/random.h"
#include "stoker/base/bytes.h"

namespace stoker::curm {
namespace {

constexpr size_t kFolders = 24, kLive = 160;
constexpr double kNamed = 0.7, kOdd = 0.08, kMakes = 0.02;  // shares of folders, of files, of steps

struct Kind {
  std::string_view folder, name, suffix;
  double announced;                   // share of its files whose size is known when they are made
  uint64_t bytes_min, bytes_max;      // written when it is made
  uint64_t uses;                      // until it is removed
  double reads, appends, overwrites;  // of a use; else nothing is done
};
constexpr std::array kKinds = {
    Kind{"datasets", "part-", ".parquet", 0.9, 256 * kKiB, 2048 * kKiB, 40, 0.97, 0, 0.01},
    Kind{"corpus", "shard-", ".tar", 0.9, 512 * kKiB, 4096 * kKiB, 50, 1, 0, 0},
    Kind{"checkpoints", "step-", ".safetensors", 0.9, 512 * kKiB, 4096 * kKiB, 12, 0.04, 0, 0},
    Kind{"backups", "day-", ".dump", 0.3, 256 * kKiB, 2048 * kKiB, 10, 0.02, 0.02, 0},
    Kind{"logs", "run-", ".log", 0, 4 * kKiB, 64 * kKiB, 60, 0.02, 0.95, 0},
    Kind{"metrics", "node-", ".jsonl", 0, 4 * kKiB, 32 * kKiB, 60, 0.03, 0.9, 0},
    Kind{"db", "table-", ".sqlite", 0.6, 64 * kKiB, 1024 * kKiB, 80, 0.35, 0.05, 0.6},
    Kind{"cache", "index-", ".bin", 0.6, 64 * kKiB, 1024 * kKiB, 60, 0.45, 0, 0.5},
    Kind{"tmp", "spill-", "", 0.2, 64 * kKiB, 512 * kKiB, 10, 0.45, 0.45, 0.1},
};

struct Folder {
  const Kind* kind;
  std::string path;
  bool named;
  uint64_t files = 0;
};
struct File {
  uint32_t object;
  size_t folder;
  const Kind* kind;
  std::string path;
  uint64_t bytes, uses;
};

class Files {
 public:
  Files(uint64_t seed, uint64_t requests) : random_(seed), wanted_(requests) {
    for (size_t i = 0; i < kFolders; ++i) {
      const Kind& kind = kKinds[random_.below(kKinds.size())];
      const bool named = random_.chance(kNamed);
      folders_.push_back(
          {&kind, (named ? std::string(kind.folder) : "p") + std::to_string(i), named, 0});
    }
  }

  Trace run() {
    trace_.name = "files";
    trace_.format = "nfs";
    while (trace_.requests.size() < wanted_) {
      if (live_.size() < kLive || random_.chance(kMakes)) {
        make();
      } else {
        use(random_.below(live_.size()));
      }
    }
    return std::move(trace_);
  }

 private:
  void request(uint32_t object, bool write, uint64_t offset, uint64_t bytes) {
    time_us_ += random_.log_uniform(10, 100'000);
    trace_.requests.push_back({time_us_, object, write, offset, bytes});
  }

  void make() {
    const size_t at = random_.below(folders_.size());
    Folder& folder = folders_[at];
    const Kind& kind = random_.chance(kOdd) ? kKinds[random_.below(kKinds.size())] : *folder.kind;
    const std::string number = std::to_string(100'000 + folder.files++).substr(1);
    const std::string path =
        folder.path + "/" +
        (folder.named ? std::string(folder.kind->name) + number + std::string(folder.kind->suffix)
                      : "f" + number);
    File file{static_cast<uint32_t>(trace_.objects.size()),
              at,
              &kind,
              path,
              random_.log_uniform(kind.bytes_min, kind.bytes_max) / (4 * kKiB) * (4 * kKiB),
              1 + random_.below(2 * kind.uses)};
    trace_.objects.push_back("f" + std::to_string(file.object));
    trace_.events.push_back({trace_.requests.size(), true, file.object,
                             static_cast<uint32_t>(at + 1), path,
                             random_.chance(kind.announced) ? file.bytes : 0});
    constexpr uint64_t kPiece = 1024 * kKiB;
    for (uint64_t offset = 0; offset < file.bytes; offset += kPiece)
      request(file.object, true, offset, std::min(kPiece, file.bytes - offset));
    live_.push_back(std::move(file));
  }

  void use(size_t at) {
    File& file = live_[at];
    const double what = random_.share();
    const uint64_t bytes = 4 * kKiB << random_.below(4);
    if (what < file.kind->reads) {
      request(file.object, false, random_.below(file.bytes / (4 * kKiB)) * (4 * kKiB), bytes);
    } else if (what < file.kind->reads + file.kind->appends) {
      request(file.object, true, file.bytes, bytes);
      file.bytes += bytes;
    } else if (what < file.kind->reads + file.kind->appends + file.kind->overwrites) {
      request(file.object, true, random_.below(file.bytes / (4 * kKiB)) * (4 * kKiB), 4 * kKiB);
    }
    if (--file.uses > 0) return;
    trace_.events.push_back({trace_.requests.size(), false, file.object,
                             static_cast<uint32_t>(file.folder + 1), file.path, 0});
    std::swap(file, live_.back());
    live_.pop_back();
  }

  Random random_;
  const uint64_t wanted_;
  std::vector<Folder> folders_;
  std::vector<File> live_;
  Trace trace_;
  uint64_t time_us_ = 0;
};

}  // namespace

Trace generate_files(uint64_t seed, uint64_t requests) {
  return Files(seed, requests == 0 ? 40'000 : requests).run();
}

}  // namespace stoker::curm
