#include "stoker/store/s3/uploads.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>

#include "stoker/base/log.h"
#include "stoker/store/folder.h"
#include "stoker/store/s3/sigv4.h"

namespace stoker::s3 {
namespace {

constexpr std::string_view kHead = "stoker-uploads 1 ";
constexpr const char* kEnd = ".uploads";

std::string random_name() {
  std::random_device random;
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x%08x", random(), random());
  return digits.data();
}

std::string decode(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      out +=
          static_cast<char>(std::strtol(std::string(text.substr(i + 1, 2)).c_str(), nullptr, 16));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool try_lock(const Fd& file) { return flock(file.get(), LOCK_EX | LOCK_NB) == 0; }

// id -> key of what was begun and not ended; nothing if the file is of another bucket. A last line
// without its end is one that its writer died in.
std::optional<std::map<std::string, std::string>> left_in(const std::string& path,
                                                          const std::string& bucket) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream all;
  all << file.rdbuf();
  std::map<std::string, std::string> left;
  std::string line;
  if (!std::getline(all, line) || all.eof()) return left;
  if (line != std::string(kHead) + bucket) return {};
  while (std::getline(all, line) && !all.eof()) {
    std::istringstream words(line);
    std::string verb, id, key;
    words >> verb >> id >> key;
    if (verb == "begun" && !key.empty())
      left[id] = key;
    else
      left.erase(id);
  }
  return left;
}

}  // namespace

Uploads::Uploads(std::string folder, const std::string& bucket)
    : folder_(std::move(folder)), bucket_(uri_encode(bucket, true)) {}

Uploads::~Uploads() {
  if (file_ && going_.empty()) ::unlink(path_.c_str());
}

void Uploads::begun(std::string_view key, std::string_view id) {
  MutexLock lock(mutex_);
  going_.emplace(id, key);
  append("begun " + uri_encode(id, false) + " " + uri_encode(key, true) + "\n");
}

void Uploads::ended(std::string_view id) {
  MutexLock lock(mutex_);
  const auto at = going_.find(id);
  if (at == going_.end()) return;
  going_.erase(at);
  append("ended " + uri_encode(id, false) + "\n");
}

void Uploads::append(const std::string& line) {
  if (folder_.empty() || failed_) return;
  if ((file_ || make_file()) &&
      ::write(file_.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size()))
    return;
  failed_ = true;
  log().warn(
      "the list of unfinished uploads cannot be written in '{}': if this process dies, its uploads "
      "stay in the bucket and take space",
      folder_);
}

bool Uploads::make_file() {
  if (!make_folder(folder_)) return false;
  for (int tries = 0; tries < 10; ++tries) {
    path_ = folder_ + "/" + random_name() + kEnd;
    Fd file(open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600));
    if (!file) return false;
    struct stat status {};
    // Who sweeps may have been quicker, and have taken it for one of a dead writer.
    if (!try_lock(file) || fstat(file.get(), &status) != 0 || status.st_nlink == 0) continue;
    file_ = std::move(file);
    const std::string head = std::string(kHead) + bucket_ + "\n";
    return ::write(file_.get(), head.data(), head.size()) == static_cast<ssize_t>(head.size());
  }
  return false;
}

void Uploads::sweep(
    const std::function<bool(const std::string& key, const std::string& id)>& end) const {
  if (folder_.empty()) return;
  std::error_code none;
  for (const auto& each : std::filesystem::directory_iterator(folder_, none)) {
    if (each.path().extension() != kEnd) continue;
    const Fd file(open(each.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!file || !try_lock(file)) continue;  // its writer lives
    const auto left = left_in(each.path(), bucket_);
    if (!left) continue;
    bool all = true;
    for (const auto& [id, key] : *left) {
      const bool gone = end(decode(key), decode(id));
      all = all && gone;
    }
    if (all) ::unlink(each.path().c_str());
  }
}

}  // namespace stoker::s3
