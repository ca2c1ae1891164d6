// Spares: files of removed objects, whose space new objects are written into. Where a file system
// notes which blocks were never written (ext4, XFS), writing over old blocks costs about half.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/fd.h"
#include "stoker/base/mutex.h"

namespace stoker::dir {

// A file, open for reading and writing and locked, with a name of the store's own in its folder.
struct Spare {
  Fd file;
  std::string name;
  uint64_t bytes = 0;
};

// Whether the file system makes blocks that were written before the cheaper ones, and a lease knows
// all who have a file open: on network file systems it does not.
bool spares_gain(const Fd& file);

// Any thread.
class Spares {
 public:
  // Files below `smallest` bytes are none.
  Spares(Fd folder, uint64_t smallest) : folder_(std::move(folder)), smallest_(smallest) {}
  ~Spares() { drop_all(); }
  Spares(const Spares&) = delete;
  Spares& operator=(const Spares&) = delete;

  // Where they lie: the store's own folder.
  const Fd& folder() const { return folder_; }
  // So many bytes at most from now on; what is over that is given back.
  void keep(uint64_t bytes);
  // Of an object that is about to be removed; nothing: it is small, there is no room, the file
  // system gains nothing, or somebody else locks it. The caller renames it to `name`.
  std::optional<Spare> hold(const Fd& folder, const std::string& name) const;
  // Once the object's removal is durable. Not kept where the file has another name, or is open
  // elsewhere: who reads it goes on reading what it was. Then it is returned, without a name.
  std::optional<Fd> add(Spare spare);
  // The one nearest in size, for an object of so many bytes; its name is the caller's now.
  std::optional<Spare> take(uint64_t bytes);
  void drop_all() { keep_at_most(0); }  // others may come later

 private:
  void keep_at_most(uint64_t bytes);
  bool fits(uint64_t bytes) const REQUIRES(mutex_);
  bool is_ours(const Spare& spare) const;

  const Fd folder_;
  const uint64_t smallest_;
  mutable Mutex mutex_;
  uint64_t limit_ GUARDED_BY(mutex_) = 0, held_ GUARDED_BY(mutex_) = 0;
  std::vector<Spare> spares_ GUARDED_BY(mutex_);
};

}  // namespace stoker::dir
