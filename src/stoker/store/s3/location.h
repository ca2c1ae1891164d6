// What "s3://bucket/prefix?endpoint=...&region=..." says. Grammar and options: docs/stores/s3.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "stoker/base/result.h"

namespace stoker::s3 {

enum class Style : uint8_t { chosen, path, host };

struct Location {
  std::string bucket;
  std::string prefix;    // of every key: empty, or ends with '/'
  std::string endpoint;  // "https://host:port"; empty: Amazon's
  std::string region;    // empty: the environment's
  std::string ca_file;
  Style style = Style::chosen;
  bool anonymous = false;
  uint64_t patience_s = 120;

  std::string composition() const;  // that opens it again
};

Result<Location> parse_location(const std::string& composition);

// scheme, host (with the port, if it is not the scheme's) and whether TLS is used.
struct Endpoint {
  bool tls = true;
  std::string host;
  std::string url() const { return (tls ? "https://" : "http://") + host; }
};
Result<Endpoint> parse_endpoint(const std::string& url);

// Amazon's own servers.
bool is_amazon(const std::string& host);
bool is_region(std::string_view name);
// Whether what is meant for the host `from` may go to the host `to`, ports aside: it is the same, a
// part of it, or both are Amazon's.
bool is_same_party(const std::string& from, const std::string& to);

// invalid_argument unless it can be a key below the prefix.
Status check_key(const Location& location, std::string_view key);

}  // namespace stoker::s3
