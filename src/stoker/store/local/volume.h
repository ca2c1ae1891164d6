// Volumes: the files or devices that hold a store: finding, making, locking and identifying them.
#pragma once

#include <string>
#include <vector>

#include "stoker/base/result.h"
#include "stoker/io/loop.h"
#include "stoker/store/local/format.h"
#include "stoker/store/local/map.h"
#include "stoker/store/local/store.h"
#include "stoker/store/open.h"
#include "stoker/store/store_file.h"

namespace stoker::local {

struct Volume : StoreFile {
  VolumeHeader header;
  bool in_folder = false;           // the file is the store's own; else the user named it
  std::vector<std::string> damage;  // of its header copies
};

// Closes and unlocks when destroyed. Not thread-safe.
class VolumeSet {
 public:
  // Opens, locks and checks the volumes of one store; with options.create makes the files where
  // there are none. The headers of a store that is not finished are planned but not written:
  // fresh() says so, and the caller finishes it.
  static Result<VolumeSet> open(const std::vector<std::string>& paths, Loop& loop,
                                const StoreOptions& options, const LocalOptions& local);
  VolumeSet(VolumeSet&& other) noexcept = default;
  VolumeSet& operator=(VolumeSet&&) = delete;
  ~VolumeSet();

  bool fresh() const { return fresh_; }
  // Writes the headers in both copies and flushes them. `opened`: the number of the generation that
  // begins next; `generation`: of the one in use, 0 where there is none.
  Status write_headers(VolumeState state, uint32_t opened, uint32_t generation);
  // mismatch: a volume is older than the others. `generation`: the number of the one in use.
  Status check_same_time(uint32_t generation) const;
  // Gives volumes that were cut short their size again.
  Status restore_sizes();
  void keep_files() {
    for (Volume& volume : volumes_) volume.made = false;
  }

  const std::vector<Volume>& all() const { return volumes_; }
  const Volume& operator[](size_t i) const { return volumes_[i]; }
  size_t size() const { return volumes_.size(); }
  MapLimits limits() const;

 private:
  explicit VolumeSet(Loop& loop) : loop_(&loop) {}
  Status open_one(const std::string& path, const StoreOptions& options, const LocalOptions& local,
                  uint64_t bytes);
  Status read_headers();
  Status identify(const StoreOptions& options, const std::vector<VolumeHeader>& plan);
  Status check_fresh(const Volume& volume) const;
  Status make_again(Volume& volume, uint64_t bytes);
  Status order_by_index();
  uint32_t newest_up_to(uint32_t generation) const;

  Loop* loop_;
  std::vector<Volume> volumes_;
  std::vector<bool> blank_;  // no header, only zeros
  bool fresh_ = false;
};

}  // namespace stoker::local
