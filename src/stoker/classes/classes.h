// Classes of objects: what each is expected to see next. Stated by our own interfaces where they
// know, else told by decision trees of depth at most 6: one over what is known when an object is
// made, one over counters of its requests later. A wrong class costs speed only.
//
// What is said when an object is made counts until its requests tell otherwise. Counters are closed
// every window of requests (and halved: what is older counts less). The tree then says a class for
// each object that was touched; an object changes its class when it was said twice in a row. In the
// next window the tree is judged by what the objects did. It is ignored while it is right less
// often than always saying the most frequent class would be. What was said when an object was made
// is judged apart, by the next window in which it is touched. One that is removed untouched was
// write-only.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/classes/class.h"
#include "stoker/classes/creation.h"

namespace stoker {

inline constexpr size_t kFeatures = 8;
inline constexpr std::array<std::string_view, kFeatures> kFeatureNames = {
    "read_share",        // of requests
    "log_writes",        // log2(1 + writes)
    "rewrite_ratio",     // of written 4 KiB blocks, those written before
    "log_mean_bytes",    // log2 of the mean request
    "sequential_share",  // of requests, those that begin where the last one ended
    "idle_windows",      // since it was touched before this window
    "log_blocks",        // log2(1 + 4 KiB blocks ever written): its size as far as is known
    // share of its volume's objects that were read-write when last seen (the history of its folder)
    "rewriting_peers",
};
using ClassFeatures = std::array<float, kFeatures>;

class ClassTree {
 public:
  // The tree that ships (class_tree.json).
  static const ClassTree& shipped();
  // JSON as classes/training/train.py writes it; docs/curm.md tells its form.
  static Result<ClassTree> parse(std::string_view json);

  Class classify(const ClassFeatures& features) const { return walk(nodes_, features); }
  // Of an object that is made now. A file without a tree for that says read-write.
  Class classify(const CreationFeatures& known) const {
    return created_.empty() ? Class::read_write : walk(created_, known);
  }
  // Says write-only for read-write and the other way round: what being wrong costs.
  ClassTree contrary() const;

 private:
  struct Node {
    int16_t feature = -1;  // of kFeatureNames, or kCreationFeatureNames; -1: a leaf
    float threshold = 0;
    // both behind this node; left where the feature is at most the threshold
    uint16_t left = 0, right = 0;
    Class leaf = Class::read_write;
  };
  using Nodes = std::vector<Node>;
  static Class walk(const Nodes& nodes, std::span<const float> features) {
    size_t at = 0;
    while (nodes[at].feature >= 0)
      at = features[static_cast<size_t>(nodes[at].feature)] <= nodes[at].threshold
               ? nodes[at].left
               : nodes[at].right;
    return nodes[at].leaf;
  }
  friend struct ClassTreeText;  // parses

  Nodes nodes_, created_;  // the root first
};

// A request, as the classes see it.
struct Access {
  uint32_t volume = 0;  // or folder: what has a history of its own
  bool write = false;
  uint64_t offset = 0, bytes = 0;
};

// Not thread-safe.
class ClassTable {
 public:
  static constexpr uint64_t kWindow = 1024;                    // requests
  explicit ClassTable(const ClassTree& tree) : tree_(tree) {}  // which outlives it

  void see(uint64_t object, const Access& access);
  // Read-write where nothing is known.
  Class of(uint64_t object) const;

  // An object that is made now: its folder, its name, and the bytes that are announced (0: it is to
  // grow).
  struct Creation {
    uint32_t volume = 0;
    std::string_view key;
    uint64_t bytes = 0;
  };
  // What it will be; read-write where neither name nor folder tell anything.
  Class at_creation(const Creation& made) const;
  // It is made, whatever had this number before.
  void create(uint64_t object, const Creation& made);

  // What is known of an object beyond its counters: its class, stated by an interface that knows
  // and changed by nothing else; or learnt.
  struct Known {
    Class held = Class::read_write;
    bool stated = false;
    bool operator==(const Known&) const = default;
  };
  std::optional<Known> known(uint64_t object) const;  // none: never touched
  void set(uint64_t object, uint32_t volume, Known known);
  void forget(uint64_t object);
  uint64_t memory_bytes() const;

  struct Score {
    // majority: always saying what was most frequent until then
    uint64_t judged = 0, right = 0, majority_right = 0;
    // windows in which the guard did not listen to the tree; of creations, how many it did not
    uint64_t distrusted = 0;
    std::array<uint64_t, kClasses.size()> truth{};  // how often each class was what happened
  };
  const Score& score() const { return told_.score; }
  const Score& creation_score() const { return guessed_.score; }
  // Told of each object that was judged: what was known before the window, or when it was made, and
  // what it did. For training.
  void on_sample(std::function<void(const ClassFeatures&, Class)> sample) {
    sample_ = std::move(sample);
  }
  void on_creation_sample(std::function<void(const CreationFeatures&, Class)> sample) {
    creation_sample_ = std::move(sample);
  }

 private:
  static constexpr size_t kPageBlocks = 512;
  struct Object {
    bool seen = false;  // and counted in its volume
    bool stated = false;
    bool guessed = false;  // held is what was said when it was made
    uint32_t volume = 0;
    // halved each window
    float reads = 0, writes = 0, bytes = 0, blocks_written = 0, blocks_rewritten = 0, follows = 0;
    // of this window
    uint32_t window_reads = 0, window_blocks = 0, window_rewritten = 0;
    uint64_t end = 0, last_window = 0;
    std::unordered_map<uint64_t, std::bitset<kPageBlocks>> written;  // 4 KiB blocks, by 2 MiB
    uint64_t blocks = 0;                                             // of these
    bool has_features = false;
    ClassFeatures features{};
    Class said = Class::read_write, held = Class::read_write;
    std::unique_ptr<CreationFeatures> made_as;  // until what was said of it then is judged
    Class said_then = Class::read_write;
  };
  struct Volume {
    uint64_t objects = 0, read_write = 0;
    FolderHistory did{};
  };
  // How right one of the trees is, and was of late.
  struct Judge {
    Score score;
    float recent_right = 0, recent_majority_right = 0;  // rolling
    bool trusts() const { return recent_right >= recent_majority_right; }
    void hear(Class said, Class was);
  };
  void close_window();
  void judge(Object& object);
  void judge_creation(Object& object, Class was);
  CreationFeatures features_of(const Creation& made) const;
  void write(Object& object, const Access& access);
  void hold(Object& object, Class held);
  ClassFeatures features_of(const Object& object) const;

  const ClassTree& tree_;
  std::unordered_map<uint64_t, Object> objects_;
  std::unordered_map<uint32_t, Volume> volumes_;
  std::vector<uint64_t> touched_;  // in this window
  uint64_t window_ = 1, seen_ = 0;
  Judge told_, guessed_;  // by counters; when made
  std::function<void(const ClassFeatures&, Class)> sample_;
  std::function<void(const CreationFeatures&, Class)> creation_sample_;
};

}  // namespace stoker
