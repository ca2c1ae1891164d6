#include "stoker/store/s3/credentials.h"

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "stoker/base/future.h"
#include "stoker/net/http.h"

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

std::string config_path() { return file_path("AWS_CONFIG_FILE", "/.aws/config"); }

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

// What a metadata service answers; empty unless it answers with 200. These services are near: one
// that does not answer in a second is not there.
std::string ask(const std::string& method, const std::string& url, net::Headers headers) {
  auto http = net::Http::make({});
  if (!http) return {};
  auto promise = std::make_shared<Promise<net::HttpAnswer>>();
  const auto answered = promise->future();
  net::HttpRequest request{.method = method, .url = url, .headers = std::move(headers)};
  request.connect_ms = request.stall_ms = 1'000;
  (*http)->send(std::move(request),
                [promise](net::HttpAnswer answer) { promise->complete(std::move(answer)); });
  const auto& answer = answered.wait();
  return answer && answer->status == 200 ? answer->body : std::string();
}

Credentials credentials_of_json(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  const auto field = [&json](const char* name) {
    const auto at = json.is_object() ? json.find(name) : json.end();
    return at != json.end() && at->is_string() ? at->get<std::string>() : std::string();
  };
  Credentials found{field("AccessKeyId"), field("SecretAccessKey"), field("Token"), 0};
  if (found.access_key.empty() || found.secret_key.empty()) return {};
  std::tm when{};
  if (strptime(field("Expiration").c_str(), "%Y-%m-%dT%H:%M:%S", &when) != nullptr)
    found.expires_s = timegm(&when);
  return found;
}

// A container's agent gives our rights to who has the token, so it goes to this machine or by TLS.
bool may_have_token(std::string_view url) {
  if (url.starts_with("https://")) return true;
  for (const std::string_view host :
       {"169.254.170.2", "169.254.170.23", "127.0.0.1", "localhost", "[::1]"}) {
    const std::string start = "http://" + std::string(host);
    if (url.starts_with(start) &&
        (url.size() == start.size() || url[start.size()] == '/' || url[start.size()] == ':'))
      return url.find('@') == std::string_view::npos;
  }
  return false;
}

Credentials credentials_of_container() {
  const std::string relative = environment("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  const std::string url = relative.empty() ? environment("AWS_CONTAINER_CREDENTIALS_FULL_URI")
                                           : "http://169.254.170.2" + relative;
  if (!may_have_token(url)) return {};
  const std::string file = environment("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
  std::string token =
      file.empty() ? environment("AWS_CONTAINER_AUTHORIZATION_TOKEN") : read_file(file);
  while (!token.empty() && (token.back() == '\n' || token.back() == '\r')) token.pop_back();
  net::Headers headers;
  if (!token.empty()) headers.emplace_back("authorization", token);
  return credentials_of_json(ask("GET", url, std::move(headers)));
}

// By IMDSv2: a token first, so that nobody can have us fetched by a GET.
Credentials credentials_of_instance() {
  if (environment("AWS_EC2_METADATA_DISABLED") == "true") return {};
  std::string base = environment("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  if (base.empty()) base = "http://169.254.169.254";
  while (base.ends_with('/')) base.pop_back();
  const std::string token =
      ask("PUT", base + "/latest/api/token", {{"x-aws-ec2-metadata-token-ttl-seconds", "300"}});
  if (token.empty()) return {};
  const net::Headers headers = {{"x-aws-ec2-metadata-token", token}};
  const std::string where = base + "/latest/meta-data/iam/security-credentials/";
  const std::string roles = ask("GET", where, headers);
  const std::string role(trim(std::string_view(roles).substr(0, roles.find('\n'))));
  if (role.empty()) return {};
  return credentials_of_json(ask("GET", where + uri_encode(role, false), headers));
}

}  // namespace

Credentials credentials_in(std::string_view file, std::string_view profile) {
  auto values = section(file, profile);
  if (values["aws_access_key_id"].empty() || values["aws_secret_access_key"].empty()) return {};
  return {values["aws_access_key_id"], values["aws_secret_access_key"], values["aws_session_token"],
          0};
}

std::string endpoint_in(std::string_view file, std::string_view profile) {
  return section(file, profile)["endpoint_url"];
}

std::string region_in(std::string_view file, std::string_view profile) {
  return section(file, profile)["region"];
}

Result<Credentials> find_credentials() {
  Credentials found{environment("AWS_ACCESS_KEY_ID"), environment("AWS_SECRET_ACCESS_KEY"),
                    environment("AWS_SESSION_TOKEN"), 0};
  if (!found.access_key.empty() && !found.secret_key.empty()) return found;
  const std::string path = file_path("AWS_SHARED_CREDENTIALS_FILE", "/.aws/credentials");
  const std::string profile = profile_name();
  found = credentials_in(read_file(path), profile);
  if (!found.anonymous()) return found;
  found = credentials_in(read_file(config_path()), profile);
  if (!found.anonymous()) return found;
  found = credentials_of_container();
  if (found.anonymous()) found = credentials_of_instance();
  if (!found.anonymous()) return found;
  return fail(Code::not_found,
              "there are no credentials for S3. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
              "or give '{}' or '{}' a profile '{}' with both. The metadata of a container or an "
              "instance names none. For a public bucket write ?anon=1",
              path, config_path(), profile);
}

std::string find_state_folder() {
  const std::string named = environment("XDG_STATE_HOME"), home = environment("HOME");
  const std::string state = !named.empty() ? named : home.empty() ? home : home + "/.local/state";
  return state.starts_with('/') ? state + "/stoker/uploads" : std::string();
}

std::string find_region() {
  for (const char* name : {"AWS_REGION", "AWS_DEFAULT_REGION"}) {
    if (std::string region = environment(name); !region.empty()) return region;
  }
  const std::string region = region_in(read_file(config_path()), profile_name());
  return region.empty() ? "us-east-1" : region;
}

std::string find_endpoint() {
  if (environment("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") == "true") return {};
  for (const char* name : {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}) {
    if (std::string url = environment(name); !url.empty()) return url;
  }
  return endpoint_in(read_file(config_path()), profile_name());
}

}  // namespace stoker::s3
