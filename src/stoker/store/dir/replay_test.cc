// Replays the steps of commits: what any power cut between two of them may leave in the folder is
// the old object or the new one.
//
// The file system of the replay is the worst that keeps its promises. Bytes are kept from the
// fdatasync of their file on; names of a folder from its fsync on. What is not kept yet may be
// there or not, each file and each folder for itself; names of one folder change in order.
#include <gtest/gtest.h>

#include <fcntl.h>

#include <filesystem>
#include <map>
#include <set>

#include "stoker/base/mutex.h"
#include "stoker/store/dir/beneath.h"
#include "stoker/store/dir/spares.h"
#include "stoker/store/dir/store.h"
#include "stoker/store/runtime.h"
#include "stoker/testing/store_harness.h"

namespace stoker {
namespace {

using Kind = DirStep::Kind;
using Files = std::map<std::string, Bytes>;  // by path

// A folder's names: to files (by number) and folders.
struct Folder {
  std::map<std::string, int> names;  // -1: a folder
};

class Replay {
 public:
  // Everything that may be found after the first `count` steps and a power cut.
  static std::vector<Files> after(const std::vector<DirStep>& steps, size_t count) {
    Replay replay;
    for (size_t i = 0; i < count; ++i) replay.apply(steps[i]);
    return replay.outcomes();
  }

 private:
  using Name = std::map<std::string, int>;
  static constexpr int kFolder = -1;

  void apply(const DirStep& step) {
    const auto [folder, name] = dir::split_key(step.path);
    switch (step.kind) {
      case Kind::make_folder:
        change(folder, [&](Name& names) { names[name] = kFolder; });
        break;
      case Kind::create: {
        const int file = static_cast<int>(live_.size());
        live_.emplace_back();
        kept_.emplace_back();
        change(folder, [&](Name& names) { names[name] = file; });
        break;
      }
      case Kind::write: {
        Bytes& bytes = live_[static_cast<size_t>(newest(folder).at(name))];
        bytes.resize(std::max(bytes.size(), step.offset + step.bytes.size()));
        std::copy(step.bytes.begin(), step.bytes.end(),
                  bytes.begin() + static_cast<ptrdiff_t>(step.offset));
        break;
      }
      case Kind::resize:
        live_[static_cast<size_t>(newest(folder).at(name))].resize(step.offset);
        break;
      case Kind::sync_file: {
        const auto file = static_cast<size_t>(newest(folder).at(name));
        kept_[file] = live_[file];
        break;
      }
      case Kind::rename:
      case Kind::link: {
        const auto [to_folder, to] = dir::split_key(step.to);
        const int file = newest(folder).at(name);
        const bool one = to_folder == folder;
        change(to_folder, [&](Name& names) {
          names[to] = file;
          if (one && step.kind == Kind::rename) names.erase(name);
        });
        if (!one && step.kind == Kind::rename)
          change(folder, [&](Name& names) { names.erase(name); });
        break;
      }
      case Kind::unlink:
        change(folder, [&](Name& names) { names.erase(name); });
        break;
      case Kind::sync_folder: {
        auto& states = folders_[step.path];
        if (states.size() > 1) states = {states.back()};
        break;
      }
    }
  }

  const Name& newest(const std::string& folder) { return states(folder).back(); }
  std::vector<Name>& states(const std::string& folder) {
    auto& all = folders_[folder];
    if (all.empty()) all.emplace_back();
    return all;
  }
  template <typename F>
  void change(const std::string& folder, F edit) {
    auto& all = states(folder);
    all.push_back(all.back());
    edit(all.back());
  }

  std::vector<Files> outcomes() const {
    std::vector<std::map<std::string, Name>> choices = {{}};
    for (const auto& [path, states] : folders_) {
      std::vector<std::map<std::string, Name>> next;
      for (const auto& choice : choices) {
        for (const Name& state : states) {
          next.push_back(choice);
          next.back()[path] = state;
        }
      }
      choices = std::move(next);
    }
    std::vector<Files> found;
    for (const auto& choice : choices) {
      for (const bool lucky : {false, true}) {  // bytes that nobody flushed: none of them, or all
        Files files;
        gather(choice, "", lucky, files);
        found.push_back(std::move(files));
      }
    }
    return found;
  }
  void gather(const std::map<std::string, Name>& choice, const std::string& path, bool lucky,
              Files& files) const {
    const auto at = choice.find(path);
    if (at == choice.end()) return;
    for (const auto& [name, file] : at->second) {
      const std::string below = path.empty() ? name : path + "/" + name;
      if (file == kFolder)
        gather(choice, below, lucky, files);
      else if (!dir::is_own_name(name))
        files[below] = lucky ? live_[static_cast<size_t>(file)] : kept_[static_cast<size_t>(file)];
    }
  }

  std::vector<Bytes> live_, kept_;
  std::map<std::string, std::vector<Name>> folders_;  // from the last that is kept to the newest
};

// A run: its steps, and what was acknowledged after how many of them.
struct Recorded {
  std::vector<DirStep> steps;
  std::vector<std::pair<size_t, Files>> acknowledged = {{0, {}}};
};

Recorded record(bool no_replace) {
  const std::string root = testing::TempDir() + "dir_replay_" + std::to_string(getpid());
  std::filesystem::remove_all(root);
  const auto runtime = std::move(*RuntimeOwner::make({.engine = "posix", .cpu_threads = 2}));
  Recorded run;
  Mutex mutex;
  const auto note = [&](const DirStep& step) {
    MutexLock lock(mutex);
    run.steps.push_back(step);
  };
  {
    const auto store =
        std::move(*open_dir_store(root, runtime->runtime(), {.create = true},
                                  {.no_replace = no_replace, .spare_bytes = 100, .steps = note}));
    store->keep_space(500);
    Files files;
    const auto commit = [&](const std::string& key, size_t bytes, uint64_t seed,
                            bool absent = false) {
      auto change = std::move(*store->begin());
      Bytes data = pattern(bytes, seed);
      EXPECT_OK(change->resize(key, bytes));
      EXPECT_OK(change->write(key, 0, slice_of(data)).wait());
      if (absent) {
        EXPECT_OK(change->require(key, kAbsent));
      }
      EXPECT_OK(change->commit(Durability::deferred).wait());
      files[key] = data;
      run.acknowledged.emplace_back(run.steps.size(), files);
    };
    commit("a", 100, 1);
    commit("a", 200, 2);
    commit("deep/below/b", 300, 3);
    commit("deep/c", 50, 4, true);
    commit("deep/below/b", 10, 5);
    const auto remove = [&](const std::string& key) {
      auto change = std::move(*store->begin());
      EXPECT_OK(change->remove(key));
      EXPECT_OK(change->commit(Durability::durable).wait());
      files.erase(key);
      run.acknowledged.emplace_back(run.steps.size(), files);
    };
    remove("deep/c");
    remove("a");  // becomes a spare
    commit("deep/d", 150, 6);
  }
  std::filesystem::remove_all(root);
  return run;
}

// How many of the states that may be found are neither what was acknowledged last nor what the
// commit after it makes.
size_t violations(const Recorded& run, size_t& cases) {
  size_t wrong = 0;
  for (size_t count = 0; count <= run.steps.size(); ++count) {
    size_t last = 0;
    while (last + 1 < run.acknowledged.size() && run.acknowledged[last + 1].first <= count) ++last;
    for (const Files& found : Replay::after(run.steps, count)) {
      ++cases;
      const bool old = found == run.acknowledged[last].second;
      const bool next =
          last + 1 < run.acknowledged.size() && found == run.acknowledged[last + 1].second;
      if (!old && !next) ++wrong;
    }
  }
  return wrong;
}

TEST(DirReplay, APowerCutLeavesTheOldObjectOrTheNew) {
  for (const bool no_replace : {true, false}) {
    const Recorded run = record(no_replace);
    size_t cases = 0;
    EXPECT_EQ(violations(run, cases), 0U);
    EXPECT_GT(cases, 100U);
    EXPECT_EQ(run.acknowledged.size(), 9U);
  }
}

// What the replay says of spares is of one that was used.
TEST(DirReplay, ASpareIsWrittenIntoAgain) {
  if (!dir::spares_gain(Fd(::open(testing::TempDir().c_str(), O_RDONLY))))
    GTEST_SKIP() << "no ext4 and no XFS";
  size_t moved = 0;
  for (const DirStep& step : record(true).steps)
    moved += step.kind == Kind::rename && step.path.starts_with(".stoker-") &&
                     step.to.starts_with("deep/.stoker-")
                 ? 1
                 : 0;
  EXPECT_EQ(moved, 1U);
}

// The proof that the replay finds bugs: any flush that is left out is found.
TEST(DirReplay, EveryFlushIsNeeded) {
  const Recorded run = record(true);
  size_t left_out = 0;
  for (size_t i = 0; i < run.steps.size(); ++i) {
    if (run.steps[i].kind != Kind::sync_file && run.steps[i].kind != Kind::sync_folder) continue;
    Recorded without = run;
    without.steps.erase(without.steps.begin() + static_cast<ptrdiff_t>(i));
    for (auto& [count, files] : without.acknowledged) count -= count > i ? 1 : 0;
    size_t cases = 0;
    EXPECT_GT(violations(without, cases), 0U)
        << "step " << i << " in '" << run.steps[i].path << "'";
    ++left_out;
  }
  EXPECT_GE(left_out, 12U);
}

}  // namespace
}  // namespace stoker
