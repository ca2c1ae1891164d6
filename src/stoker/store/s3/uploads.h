// The uploads in parts that this process has begun, in a file of this machine, so that those of a
// writer that died can be aborted. docs/stores/s3.md has the grammar.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "stoker/base/fd.h"

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
  void append(const std::string& line);  // with the mutex
  bool make_file();                      // with the mutex

  const std::string folder_, bucket_;
  std::mutex mutex_;                                       // guards what follows
  std::map<std::string, std::string, std::less<>> going_;  // id -> key
  Fd file_;                                                // locked; none before the first upload
  std::string path_;
  bool failed_ = false;  // said once
};

}  // namespace stoker::s3
