// The probe's result as a file: version 1, JSON, replaced atomically.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "stoker/io/probe.h"

namespace stoker {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kVersion = 1;

Result<Load::Kind> parse_kind(const std::string& text) {
  for (const Load::Kind kind : {Load::Kind::read, Load::Kind::write, Load::Kind::mixed}) {
    if (text == name(kind)) return kind;
  }
  return fail(Code::corruption, "'{}' is not a kind of load", text);
}

// Throws what nlohmann throws when a field is missing or of another type.
Result<Probe> parse(const Json& json) {
  Probe probe;
  json.at("engine").get_to(probe.engine);
  json.at("pages").get_to(probe.pages);
  json.at("direct").get_to(probe.direct);
  json.at("file_bytes").get_to(probe.file_bytes);
  json.at("first_write_bytes_per_second").get_to(probe.first_write_bytes_per_second);
  for (const Json& each : json.at("points")) {
    ProbePoint point;
    STOKER_ASSIGN(point.kind, parse_kind(each.at("op").get<std::string>()));
    each.at("block_bytes").get_to(point.block_bytes);
    each.at("depth").get_to(point.depth);
    each.at("bytes_per_second").get_to(point.bytes_per_second);
    each.at("latency_us").get_to(point.latency_us);
    probe.points.push_back(point);
  }
  return probe;
}

Status write_whole(const std::string& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return fail(errno, "cannot write the probe's result to '{}'", path);
  size_t at = 0;
  int error = 0;
  while (at < text.size() && error == 0) {
    const ssize_t wrote = ::write(fd, text.data() + at, text.size() - at);
    if (wrote > 0)
      at += static_cast<size_t>(wrote);
    else if (wrote == 0 || errno != EINTR)
      error = wrote == 0 ? EIO : errno;
  }
  if (error == 0 && fsync(fd) != 0) error = errno;
  if (::close(fd) != 0 && error == 0) error = errno;
  return error == 0 ? Status{} : fail(error, "cannot write the probe's result to '{}'", path);
}

}  // namespace

std::string probe_path(const std::string& folder) { return folder + "/stoker.probe.json"; }

std::string probe_json(const Probe& probe) {
  Json json = {{"version", kVersion},
               {"engine", probe.engine},
               {"pages", probe.pages},
               {"direct", probe.direct},
               {"file_bytes", probe.file_bytes},
               {"first_write_bytes_per_second", probe.first_write_bytes_per_second}};
  for (const Load::Kind kind : {Load::Kind::read, Load::Kind::write, Load::Kind::mixed}) {
    json["best_bytes_per_second"][std::string(name(kind))] = probe.best(kind);
  }
  json["points"] = Json::array();
  for (const ProbePoint& point : probe.points) {
    json["points"].push_back({{"op", std::string(name(point.kind))},
                              {"block_bytes", point.block_bytes},
                              {"depth", point.depth},
                              {"bytes_per_second", point.bytes_per_second},
                              {"latency_us", point.latency_us}});
  }
  return json.dump(2) + "\n";
}

Status save_probe(const std::string& folder, const Probe& probe) {
  const std::string path = probe_path(folder);
  const std::string temporary = path + "." + std::to_string(getpid());
  Status status = write_whole(temporary, probe_json(probe));
  if (status && rename(temporary.c_str(), path.c_str()) != 0)
    status = fail(errno, "cannot write the probe's result to '{}'", path);
  if (!status) unlink(temporary.c_str());
  return status;
}

Result<Probe> load_probe(const std::string& folder) {
  const std::string path = probe_path(folder);
  std::ifstream file(path);
  if (!file)
    return fail(Code::not_found, "'{}' has not been probed: run 'stoker probe {}'", folder, folder);
  std::ostringstream text;
  text << file.rdbuf();
  try {
    const Json json = Json::parse(text.str());
    if (const int version = json.at("version").get<int>(); version != kVersion) {
      return fail(Code::mismatch, "'{}' has version {}, not {}: run 'stoker probe {}' again", path,
                  version, kVersion, folder);
    }
    auto probe = parse(json);
    if (!probe) return probe.error().with("'" + path + "'");
    return probe;
  } catch (const Json::exception& error) {
    return fail(Code::corruption, "'{}' is not a probe's result ({}): run 'stoker probe {}' again",
                path, error.what(), folder);
  }
}

}  // namespace stoker
