#include "stoker/store/s3/sigv4.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>
#include <ctime>

#include "stoker/base/check.h"

namespace stoker::s3 {
namespace {

using Digest = std::array<unsigned char, 32>;

std::string hex(const Digest& digest) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string out;
  for (const unsigned char byte : digest) {
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  return out;
}

Digest hmac(std::string_view key, std::string_view text) {
  Digest digest{};
  unsigned int size = digest.size();
  const auto* done =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data(), &size);
  STOKER_CHECK(done != nullptr);
  return digest;
}

std::string_view view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// Trimmed, and runs of blanks are one.
std::string canonical_value(std::string_view value) {
  std::string out;
  for (const char c : value) {
    const bool blank = c == ' ' || c == '\t';
    if (!blank)
      out += c;
    else if (!out.empty() && out.back() != ' ')
      out += ' ';
  }
  if (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

}  // namespace

std::string sha256_hex(const void* data, size_t bytes) {
  Digest digest{};
  unsigned int size = digest.size();
  STOKER_CHECK(EVP_Digest(data, bytes, digest.data(), &size, EVP_sha256(), nullptr) == 1);
  return hex(digest);
}

std::string md5_base64(std::string_view text) {
  std::array<unsigned char, 16> digest{};
  unsigned int size = digest.size();
  STOKER_CHECK(EVP_Digest(text.data(), text.size(), digest.data(), &size, EVP_md5(), nullptr) == 1);
  return base64({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

std::string base64(std::string_view bytes) {
  std::string encoded(4 * ((bytes.size() + 2) / 3) + 1, '\0');  // with the zero behind it
  EVP_EncodeBlock(reinterpret_cast<unsigned char*>(encoded.data()),
                  reinterpret_cast<const unsigned char*>(bytes.data()),
                  static_cast<int>(bytes.size()));
  encoded.pop_back();
  return encoded;
}

std::string uri_encode(std::string_view text, bool path) {
  constexpr std::string_view digits = "0123456789ABCDEF";
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
                       (byte >= '0' && byte <= '9') || c == '-' || c == '.' || c == '_' || c == '~';
    if (plain || (path && c == '/')) {
      out += c;
    } else {
      out += '%';
      out += digits[byte >> 4];
      out += digits[byte & 15];
    }
  }
  return out;
}

std::string encode_query(const Query& query) {
  Query encoded;
  for (const auto& [name, value] : query)
    encoded.emplace_back(uri_encode(name, false), uri_encode(value, false));
  std::sort(encoded.begin(), encoded.end());
  std::string out;
  for (const auto& [name, value] : encoded) {
    if (!out.empty()) out += '&';
    out.append(name).append("=").append(value);
  }
  return out;
}

std::string amz_time(int64_t unix_seconds) {
  const auto seconds = static_cast<time_t>(unix_seconds);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  std::array<char, 20> text{};
  std::strftime(text.data(), text.size(), "%Y%m%dT%H%M%SZ", &utc);
  return text.data();
}

std::string authorization(const ToSign& request, const Credentials& credentials,
                          const std::string& region, const std::string& service,
                          const std::string& time) {
  Fields headers = request.headers;
  std::stable_sort(headers.begin(), headers.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string canonical, names;
  for (const auto& [name, value] : headers) {
    canonical += name + ":" + canonical_value(value) + "\n";
    names += (names.empty() ? "" : ";") + name;
  }
  const std::string whole = request.method + "\n" + request.path + "\n" +
                            encode_query(request.query) + "\n" + canonical + "\n" + names + "\n" +
                            request.body_sha256;
  const std::string date = time.substr(0, 8);
  const std::string scope = date + "/" + region + "/" + service + "/aws4_request";
  const std::string text =
      "AWS4-HMAC-SHA256\n" + time + "\n" + scope + "\n" + sha256_hex(whole.data(), whole.size());
  const Digest of_date = hmac("AWS4" + credentials.secret_key, date);
  const Digest of_region = hmac(view(of_date), region);
  const Digest of_service = hmac(view(of_region), service);
  const Digest key = hmac(view(of_service), "aws4_request");
  return "AWS4-HMAC-SHA256 Credential=" + credentials.access_key + "/" + scope +
         ", SignedHeaders=" + names + ", Signature=" + hex(hmac(view(key), text));
}

}  // namespace stoker::s3
