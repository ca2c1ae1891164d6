// Signature Version 4, header form. Pure functions; checked with the examples that AWS publishes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stoker/memory/slice.h"

namespace stoker::s3 {

// Secret: stands in no log and no error.
struct Credentials {
  std::string access_key, secret_key, session_token;
  int64_t expires_s = 0;  // of the real clock; 0: never, as far as we know
  bool anonymous() const { return access_key.empty(); }
};

using Query = std::vector<std::pair<std::string, std::string>>;   // not encoded
using Fields = std::vector<std::pair<std::string, std::string>>;  // headers

struct ToSign {
  std::string method;
  std::string path;  // encoded, begins with '/'
  Query query;
  Fields headers;  // all that are to be signed, "host" among them; names in lower case
  std::string body_sha256;
};

std::string md5_base64(std::string_view text);  // as Content-MD5 has it
std::string base64(std::string_view bytes);
std::string sha256_hex(const void* data, size_t bytes);
// Percent-encoded as AWS wants it: all but letters, digits and "-._~"; '/' stays where `path`.
std::string uri_encode(std::string_view text, bool path);
std::string encode_query(const Query& query);  // sorted by name, then value
std::string amz_time(int64_t unix_seconds);    // 20130524T000000Z

// The value of the Authorization header. `headers` must hold x-amz-date with `time`.
std::string authorization(const ToSign& request, const Credentials& credentials,
                          const std::string& region, const std::string& service,
                          const std::string& time);

}  // namespace stoker::s3
