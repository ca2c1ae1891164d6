#include "curm/trace.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>

namespace stoker::curm {
namespace {

constexpr size_t kComplaintsMax = 5;
constexpr std::string_view kCloudPhysicsHeader = "version,time,op,size,lbn";

// SCSI operations: the READs of 6, 10, 12 and 16 bytes; the WRITEs, those that verify, and COMPARE
// AND WRITE.
constexpr std::array<uint64_t, 4> kScsiReads{0x08, 0x28, 0xa8, 0x88};
constexpr std::array<uint64_t, 8> kScsiWrites{0x0a, 0x2a, 0xaa, 0x8a, 0x2e, 0xae, 0x8e, 0x89};
// What else a disk is told: flushes, UNMAP and WRITE SAME (whose size is not that of what it
// changes), verifying, reservations, questions about itself.
constexpr std::array<uint64_t, 35> kScsiOthers{0x00, 0x03, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1d,
                                               0x1e, 0x25, 0x2f, 0x34, 0x35, 0x41, 0x42, 0x4c, 0x4d,
                                               0x55, 0x56, 0x57, 0x5a, 0x5e, 0x5f, 0x83, 0x84, 0x85,
                                               0x8f, 0x90, 0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa4};

template <size_t N>
bool is_one_of(const std::array<uint64_t, N>& all, std::optional<uint64_t> op) {
  return op && std::find(all.begin(), all.end(), *op) != all.end();
}

std::vector<std::string_view> split(std::string_view line, char separator) {
  std::vector<std::string_view> fields;
  while (!line.empty()) {
    const size_t end = std::min(line.find(separator), line.size());
    if (separator != ' ' || end != 0) fields.push_back(line.substr(0, end));
    if (end == line.size()) break;
    line.remove_prefix(end + 1);
  }
  return fields;
}

std::optional<uint64_t> number(std::string_view text, int base = 10) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Takes the lines of one format. A line is a request, nothing that concerns us, or malformed: then
// it says why.
class Reader {
 public:
  explicit Reader(Trace& trace) : trace_(trace) {}
  std::string msr(std::string_view line);
  std::string cloud_physics(std::string_view line);
  std::string nfs(std::string_view line);

 private:
  std::string add(double time_us, std::string_view object, bool write,
                  std::optional<uint64_t> offset, std::optional<uint64_t> bytes);

  // A call on a name, until it is answered.
  struct Asked {
    std::string folder, name;
    uint64_t bytes = 0;
  };
  using ValueOf = std::function<std::string_view(std::initializer_list<std::string_view>)>;
  bool on_names(const std::vector<std::string_view>& words, bool call, const ValueOf& value_of);
  void answered(const Asked& asked, std::string_view what, std::string_view handle);
  uint32_t object_of(std::string_view name);

  Trace& trace_;
  std::unordered_map<std::string, uint32_t> objects_, folders_;
  std::unordered_map<std::string, Asked> asked_;  // by client and number of the call
  // by handle; handles, by that of the folder and name
  std::unordered_map<std::string, std::string> paths_, files_;
  std::optional<double> began_;
};

uint32_t Reader::object_of(std::string_view name) {
  const auto [found, fresh] =
      objects_.try_emplace(std::string(name), static_cast<uint32_t>(trace_.objects.size()));
  if (fresh) trace_.objects.emplace_back(name);
  return found->second;
}

std::string Reader::add(double time_us, std::string_view object, bool write,
                        std::optional<uint64_t> offset, std::optional<uint64_t> bytes) {
  if (!offset) return "the offset is not a number";
  if (!bytes) return "the size is not a number";
  if (*bytes == 0) return "the size is 0";
  if (*bytes > kRequestBytesMax) return "the size is more than 1 GiB";
  if (*offset > kOffsetMax) return "the offset is beyond 1 PiB";
  if (!began_) began_ = time_us;
  // Some clocks step back for a moment.
  trace_.requests.push_back({static_cast<uint64_t>(std::max(0.0, time_us - *began_)),
                             object_of(object), write, *offset, *bytes});
  return {};
}

// timestamp (100 ns), host, disk, Read or Write, offset, bytes, response (100 ns)
std::string Reader::msr(std::string_view line) {
  const auto fields = split(line, ',');
  if (fields.size() != 7) return "it has " + std::to_string(fields.size()) + " fields, not 7";
  const auto time = number(fields[0]);
  if (!time) return "the time is not a number";
  const bool write = fields[3] == "Write";
  if (!write && fields[3] != "Read")
    return "`" + std::string(fields[3].substr(0, 20)) + "` is neither Read nor Write";
  return add(static_cast<double>(*time) / 10, std::string(fields[1]) + "." + std::string(fields[2]),
             write, number(fields[4]), number(fields[5]));
}

// version, seconds, SCSI operation (hexadecimal), bytes, block of 512 bytes
std::string Reader::cloud_physics(std::string_view line) {
  const auto fields = split(line, ',');
  if (fields.size() != 5) return "it has " + std::to_string(fields.size()) + " fields, not 5";
  const auto time = number(fields[1]), op = number(fields[2], 16), block = number(fields[4]);
  if (!time) return "the time is not a number";
  const bool write = is_one_of(kScsiWrites, op);
  if (!write && !is_one_of(kScsiReads, op)) {
    if (!is_one_of(kScsiOthers, op))
      return "there is no operation `" + std::string(fields[2].substr(0, 20)) + "` of a disk";
    ++trace_.others;
    return {};
  }
  if (!block || *block > kOffsetMax / 512) return "the block is not a number, or beyond 1 PiB";
  return add(static_cast<double>(*time) * 1e6, "disk", write, *block * 512, number(fields[3]));
}

// seconds.microseconds source destination U|T C3|R3 id number name, then words: fh F, off O, count
// N; all hexadecimal but the time. Calls on names have fh FOLDER, name "N", perhaps size B; their
// answer says OK, and fh F.
std::string Reader::nfs(std::string_view line) {
  const auto words = split(line, ' ');
  if (words.size() < 8) return "it has " + std::to_string(words.size()) + " words, fewer than 8";
  double seconds = 0;
  const auto [end, error] =
      std::from_chars(words[0].data(), words[0].data() + words[0].size(), seconds);
  if (error != std::errc() || end != words[0].data() + words[0].size() || !std::isfinite(seconds) ||
      seconds < 0 || seconds > 1e11)
    return "the time is not a number";
  const bool call = words[4] == "C2" || words[4] == "C3",
             answer = words[4] == "R2" || words[4] == "R3";
  if (!call && !answer)
    return "`" + std::string(words[4].substr(0, 20)) + "` is neither a call nor an answer";
  const auto value_of = [&](std::initializer_list<std::string_view> names) {
    for (size_t i = 8; i + 1 < words.size(); ++i) {
      if (std::find(names.begin(), names.end(), words[i]) != names.end()) return words[i + 1];
    }
    return std::string_view();
  };
  const bool write = words[7] == "write";
  if (on_names(words, call, value_of) || answer) return {};
  if (!write && words[7] != "read") {
    ++trace_.others;
    return {};
  }
  const std::string_view handle = value_of({"fh", "file"});
  if (handle.empty()) return "it names no file handle";
  return add(seconds * 1e6, handle, write, number(value_of({"off", "offset"}), 16),
             number(value_of({"count", "tcount"}), 16));
}

// Files and folders that are made, looked up or removed. False: the line is of another kind.
bool Reader::on_names(const std::vector<std::string_view>& words, bool call,
                      const ValueOf& value_of) {
  const std::string_view what = words[7];
  if (what != "create" && what != "mkdir" && what != "lookup" && what != "remove") return false;
  const std::string id = std::string(words[call ? 1 : 2]) + " " + std::string(words[5]);
  if (!call) {
    const auto asked = asked_.extract(id);
    if (!asked.empty() && words.size() > 8 && words[8] == "OK")
      answered(asked.mapped(), what, value_of({"fh", "file"}));
    return true;
  }
  std::string_view name = value_of({"name", "fn"});
  while (name.starts_with('"')) name.remove_prefix(1);
  while (name.ends_with('"')) name.remove_suffix(1);
  if (!name.empty())
    asked_.insert_or_assign(id, Asked{std::string(value_of({"fh"})), std::string(name),
                                      number(value_of({"size"}), 16).value_or(0)});
  return true;
}

void Reader::answered(const Asked& asked, std::string_view what, std::string_view handle) {
  constexpr size_t kPathMax = 1024;
  const std::string there = asked.folder + "/" + asked.name;
  const auto folder =
      folders_.try_emplace(asked.folder, static_cast<uint32_t>(folders_.size() + 1)).first->second;
  if (what == "remove") {
    const auto file = files_.extract(there);
    if (!file.empty() && objects_.contains(file.mapped()))
      trace_.events.push_back({trace_.requests.size(), false, object_of(file.mapped()), folder,
                               paths_[file.mapped()], 0});
    return;
  }
  if (handle.empty()) return;
  const auto above = paths_.find(asked.folder);
  std::string path = above == paths_.end() ? asked.name : above->second + "/" + asked.name;
  if (path.size() > kPathMax) path = asked.name.substr(0, kPathMax);
  paths_[std::string(handle)] = path;
  files_[there] = handle;
  if (what == "create")
    trace_.events.push_back(
        {trace_.requests.size(), true, object_of(handle), folder, path, asked.bytes});
}

}  // namespace

Result<Trace> parse_trace(std::string name, std::string_view text, bool lenient) {
  Trace trace;
  trace.name = std::move(name);
  Reader reader(trace);
  uint64_t line_number = 0;
  auto form = &Reader::msr;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.empty()) continue;
    if (trace.format.empty()) {
      const bool header = line == kCloudPhysicsHeader,
                 spaces = line.find(',') == std::string_view::npos &&
                          line.find(' ') != std::string_view::npos;
      trace.format = header ? "cloudphysics" : spaces ? "nfs" : "msr";
      form = header ? &Reader::cloud_physics : spaces ? &Reader::nfs : &Reader::msr;
      if (header) continue;
    }
    const std::string wrong = (reader.*form)(line);
    if (wrong.empty()) continue;
    ++trace.malformed;
    if (trace.complaints.size() < kComplaintsMax)
      trace.complaints.push_back("line " + std::to_string(line_number) + ": " + wrong);
  }
  if (trace.malformed != 0 && !lenient) {
    return fail(Code::invalid_argument,
                "{}: {} malformed lines, read as {}; {}; correct them, or skip them with --lenient",
                trace.name, trace.malformed, trace.format, trace.complaints[0]);
  }
  if (trace.requests.empty())
    return fail(Code::invalid_argument,
                "{}: holds no request that reads or writes; MSR Cambridge CSV, CloudPhysics CSV "
                "and nfsdump records are understood",
                trace.name);
  return trace;
}

Result<Trace> read_trace(const std::string& path, bool lenient) {
  std::error_code not_there;
  if (std::filesystem::is_directory(path, not_there))
    return fail(Code::invalid_argument, "{} is a folder; name the trace files in it", path);
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail(Code::not_found, "the trace {} cannot be opened; check the path", path);
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) return fail(Code::io, "the trace {} cannot be read to its end", path);
  return parse_trace(std::filesystem::path(path).filename().string(), text.str(), lenient);
}

std::string msr_text(const Trace& trace) {
  std::string text;
  for (const Request& request : trace.requests) {
    text += std::to_string(128166372000000000 + request.time_us * 10) + "," + trace.name + "," +
            std::to_string(request.object) + (request.write ? ",Write," : ",Read,") +
            std::to_string(request.offset) + "," + std::to_string(request.bytes) + ",0\n";
  }
  return text;
}

std::string nfs_text(const Trace& trace) {
  std::string text;
  std::set<uint32_t> folders;
  uint64_t call = 0;
  const auto hex = [](uint64_t value) {
    std::array<char, 16> digits{};
    return std::string(digits.data(),
                       std::to_chars(digits.data(), digits.data() + digits.size(), value, 16).ptr);
  };
  const auto line = [&](uint64_t time_us, bool answer, const std::string& what) {
    const std::string part = std::to_string(1'000'000 + time_us % 1'000'000).substr(1);
    text += std::to_string(1'034'524'800 + time_us / 1'000'000) + "." + part +
            (answer ? " 30.0801 31.03f2 U R3 " : " 31.03f2 30.0801 U C3 ") + hex(call) + " " +
            what + "\n";
  };
  const auto ask = [&](uint64_t time_us, const std::string& what, const std::string& answer) {
    ++call;
    line(time_us, false, what + " con = 1 len = 2");
    if (!answer.empty()) line(time_us, true, answer);
  };
  const auto name_of = [&](uint32_t folder) { return "d" + hex(folder); };
  size_t next = 0;
  for (size_t i = 0; i <= trace.requests.size(); ++i) {
    const uint64_t now_us =
        trace.requests.empty() ? 0 : trace.requests[std::min(i, trace.requests.size() - 1)].time_us;
    for (; next < trace.events.size() && trace.events[next].before <= i; ++next) {
      const FileEvent& event = trace.events[next];
      const size_t slash = event.path.rfind('/');
      const std::string folder = slash == std::string::npos ? "" : event.path.substr(0, slash),
                        name = "\"" + event.path.substr(slash + 1) + "\"";
      if (!folder.empty() && folders.insert(event.folder).second)
        ask(now_us, "9 mkdir fh root name \"" + folder + "\" mode 1ed",
            "9 mkdir OK fh " + name_of(event.folder) + " ftype 2");
      if (event.made) {
        ask(now_us,
            "8 create fh " + name_of(event.folder) + " name " + name + " how U mode 1a4" +
                (event.bytes > 0 ? " size " + hex(event.bytes) : ""),
            "8 create OK fh " + trace.objects[event.object] + " ftype 1");
      } else {
        ask(now_us, "c remove fh " + name_of(event.folder) + " name " + name, "c remove OK");
      }
    }
    if (i == trace.requests.size()) break;
    const Request& request = trace.requests[i];
    const std::string where = " fh " + trace.objects[request.object] +
                              (request.write ? " off " : " offset ") + hex(request.offset) +
                              " count " + hex(request.bytes);
    ask(request.time_us, (request.write ? "7 write" : "6 read") + where, "");
  }
  return text;
}

void show(const Trace& trace, uint64_t piece_bytes, ClassTable& classes) {
  if (trace.events.empty()) {
    for (const Request& request : trace.requests)
      classes.see(uint64_t{request.object} << 40 | request.offset / piece_bytes,
                  access_of(request));
    return;
  }
  std::vector<uint32_t> folder_of(trace.objects.size());
  size_t next = 0;
  for (size_t i = 0; i <= trace.requests.size(); ++i) {
    for (; next < trace.events.size() && trace.events[next].before <= i; ++next) {
      const FileEvent& event = trace.events[next];
      folder_of[event.object] = event.folder;
      if (event.made) {
        classes.create(event.object, {event.folder, event.path, event.bytes});
      } else {
        classes.forget(event.object);
      }
    }
    if (i == trace.requests.size()) break;
    const Request& request = trace.requests[i];
    classes.see(request.object,
                {folder_of[request.object], request.write, request.offset, request.bytes});
  }
}

}  // namespace stoker::curm
