// The uploads in parts that this process has begun, in a file of this machine. So those of a writer
// that died can be aborted. docs/stores/s3.md has the grammar.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "stoker/base/fd.h"
#include "stoker/base/mutex.h"

namespace stoker::s3 {

// Any thread.
class Uploads {
 public:
  // `folder`: of all writers of this user; empty: nothing is written down. `bucket`: theirs.
  Uploads(std::string folder, const std::string& bucket);
  ~Uploads();  // removes its file, unless uploads are left over
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;

  void begun(std::string_view key, std::string_view id);
  void ended(std::string_view id);
  // Hands over each upload in this bucket whose writer is dead. `end` says whether it is gone.
  void sweep(const std::function<bool(const std::string& key, const std::string& id)>& end) const;

 private:
  void append(const std::string& line) REQUIRES(mutex_);
  bool make_file() REQUIRES(mutex_);

  const std::string folder_, bucket_;
  Mutex mutex_;
  std::map<std::string, std::string, std::less<>> going_ GUARDED_BY(mutex_);  // id -> key
  Fd file_ GUARDED_BY(mutex_);  // locked; none before the first upload
  std::string path_ GUARDED_BY(mutex_);
  bool failed_ GUARDED_BY(mutex_) = false;  // said once
};

}  // namespace stoker::s3
