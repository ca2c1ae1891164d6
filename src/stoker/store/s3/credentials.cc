#include "stoker/store/s3/credentials.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

namespace stoker::s3 {
namespace {

constexpr size_t kFileMax = 1 << 20;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string profile_name() {
  const std::string named = environment("AWS_PROFILE");
  return named.empty() ? "default" : named;
}

std::string file_path(const char* variable, const char* below_home) {
  const std::string named = environment(variable);
  const std::string home = environment("HOME");
  return !named.empty() ? named : home.empty() ? std::string() : home + below_home;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kFileMax, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
  return text;
}

std::string_view trim(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

std::map<std::string, std::string, std::less<>> section(std::string_view file,
                                                        std::string_view profile) {
  std::map<std::string, std::string, std::less<>> values;
  bool ours = false;
  while (!file.empty()) {
    const size_t end = file.find('\n');
    const std::string_view line = trim(file.substr(0, end));
    file = end == std::string_view::npos ? std::string_view() : file.substr(end + 1);
    if (line.empty() || line.front() == '#' || line.front() == ';') continue;
    if (line.front() == '[') {
      std::string_view name =
          trim(line.substr(1, line.find(']') == std::string_view::npos ? 0 : line.find(']') - 1));
      if (name.starts_with("profile ")) name = trim(name.substr(8));
      ours = name == profile;
    } else if (const size_t equals = line.find('='); ours && equals != std::string_view::npos) {
      values.insert_or_assign(std::string(trim(line.substr(0, equals))),
                              std::string(trim(line.substr(equals + 1))));
    }
  }
  return values;
}

}  // namespace

Credentials credentials_in(std::string_view file, std::string_view profile) {
  auto values = section(file, profile);
  if (values["aws_access_key_id"].empty() || values["aws_secret_access_key"].empty()) return {};
  return {values["aws_access_key_id"], values["aws_secret_access_key"],
          values["aws_session_token"]};
}

std::string region_in(std::string_view file, std::string_view profile) {
  return section(file, profile)["region"];
}

Result<Credentials> find_credentials() {
  Credentials found{environment("AWS_ACCESS_KEY_ID"), environment("AWS_SECRET_ACCESS_KEY"),
                    environment("AWS_SESSION_TOKEN")};
  if (!found.access_key.empty() && !found.secret_key.empty()) return found;
  const std::string path = file_path("AWS_SHARED_CREDENTIALS_FILE", "/.aws/credentials");
  const std::string profile = profile_name();
  found = credentials_in(read_file(path), profile);
  if (!found.anonymous()) return found;
  return make_error(Code::not_found,
                    "there are no credentials for S3: neither AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY are set, nor has '" +
                        path + "' a profile '" + profile +
                        "' with both; for a public bucket write ?anon=1",
                    "store/s3/credentials");
}

std::string find_region() {
  for (const char* name : {"AWS_REGION", "AWS_DEFAULT_REGION"}) {
    if (std::string region = environment(name); !region.empty()) return region;
  }
  const std::string region =
      region_in(read_file(file_path("AWS_CONFIG_FILE", "/.aws/config")), profile_name());
  return region.empty() ? "us-east-1" : region;
}

}  // namespace stoker::s3
