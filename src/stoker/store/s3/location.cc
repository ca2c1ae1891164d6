#include "stoker/store/s3/location.h"

#include <algorithm>
#include <charconv>

#include "stoker/store/s3/sigv4.h"

namespace stoker::s3 {
namespace {

constexpr size_t kKeyMax = 1024;

Error bad(const std::string& composition, const std::string& why) {
  return fail(
      Code::invalid_argument,
      "cannot open the store '{}': {}; write for example s3://bucket/prefix?region=eu-west-1",
      composition, why);
}

bool is_word(std::string_view text, std::string_view more) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [more](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           more.find(c) != std::string_view::npos;
  });
}

// %XX in the prefix and in options.
Result<std::string> decode(const std::string& composition, std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned value = 0;
    const auto [end, error] =
        i + 3 <= text.size() ? std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16)
                             : std::from_chars_result{nullptr, std::errc::invalid_argument};
    if (error != std::errc() || end != text.data() + i + 3)
      return bad(composition, "two hexadecimal digits must follow each %; write a plain % as %25");
    out += static_cast<char>(static_cast<unsigned char>(value));
    i += 2;
  }
  return out;
}

Status set_option(const std::string& composition, Location& location, std::string_view name,
                  const std::string& value) {
  if (name == "endpoint") {
    if (const auto parsed = parse_endpoint(value); !parsed)
      return bad(composition, parsed.error().what);
    location.endpoint = value;
  } else if (name == "region") {
    if (!is_region(value)) return bad(composition, "'" + value + "' is not a region");
    location.region = value;
  } else if (name == "style") {
    if (value != "path" && value != "host")
      return bad(composition, "style= must be path or host, not '" + value + "'");
    location.style = value == "path" ? Style::path : Style::host;
  } else if (name == "anon") {
    if (value != "0" && value != "1")
      return bad(composition, "anon= must be 0 or 1, not '" + value + "'");
    location.anonymous = value == "1";
  } else if (name == "ca") {
    location.ca_file = value;
  } else if (name == "patience") {
    const auto [end, error] =
        std::from_chars(value.data(), value.data() + value.size(), location.patience_s);
    if (error != std::errc() || end != value.data() + value.size() || location.patience_s > 86'400)
      return bad(composition,
                 "patience= must be a number of seconds up to 86400, not '" + value + "'");
  } else {
    return bad(composition,
               "the option '" + std::string(name) +
                   "' is unknown; the options are endpoint, region, style, anon, ca and patience");
  }
  return {};
}

}  // namespace

Result<Endpoint> parse_endpoint(const std::string& url) {
  Endpoint endpoint;
  std::string_view rest = url;
  if (rest.starts_with("https://"))
    rest.remove_prefix(8);
  else if (rest.starts_with("http://"))
    rest.remove_prefix(7), endpoint.tls = false;
  else
    return fail(Code::invalid_argument, "the endpoint must begin with http:// or https://");
  if (rest.ends_with('/')) rest.remove_suffix(1);
  if (rest.find('@') != std::string_view::npos)
    return fail(Code::invalid_argument,
                "the endpoint must not hold a user: credentials come from the environment or the "
                "shared files");
  if (!is_word(rest, ".-_:[]"))
    return fail(Code::invalid_argument,
                "the endpoint must be a host, with a port or without, and nothing after it");
  endpoint.host = rest;
  std::transform(endpoint.host.begin(), endpoint.host.end(), endpoint.host.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  const size_t behind = endpoint.host.starts_with('[') ? endpoint.host.find(']') : 0;
  const size_t colon = behind == std::string::npos ? 0 : endpoint.host.find(':', behind);
  if (colon != std::string::npos) {
    unsigned port = 0;
    const char* const end = endpoint.host.data() + endpoint.host.size();
    const auto parsed = std::from_chars(endpoint.host.data() + colon + 1, end, port);
    if (parsed.ec != std::errc() || parsed.ptr != end || port == 0 || port > 65'535)
      return fail(Code::invalid_argument,
                  "the endpoint's port is not a number from 1 to 65535; write an IPv6 address in "
                  "brackets");
  }
  // As the library sends it in "Host", which is signed.
  const std::string usual = endpoint.tls ? ":443" : ":80";
  if (endpoint.host.ends_with(usual)) endpoint.host.resize(endpoint.host.size() - usual.size());
  return endpoint;
}

bool is_amazon(const std::string& host) {
  return host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn");
}

bool is_region(std::string_view name) { return is_word(name, "-_."); }

bool is_same_party(const std::string& from, const std::string& to) {
  // Without the port; the colons of an IPv6 address stand in brackets.
  const auto name = [](const std::string& host) {
    const size_t colon = host.find(':', host.starts_with('[') ? host.find(']') : 0);
    return host.substr(0, colon);
  };
  const std::string old = name(from), fresh = name(to);
  return fresh == old || fresh.ends_with("." + old) || (is_amazon(old) && is_amazon(fresh));
}

std::string Location::composition() const {
  std::string text =
      "s3://" + bucket +
      (prefix.empty() ? "" : "/" + uri_encode(prefix.substr(0, prefix.size() - 1), true));
  const auto add = [&text](const std::string& name, const std::string& value) {
    text += (text.find('?') == std::string::npos ? "?" : "&") + name + "=" + value;
  };
  if (!endpoint.empty()) add("endpoint", endpoint);
  if (!region.empty()) add("region", region);
  if (style != Style::chosen) add("style", style == Style::path ? "path" : "host");
  if (anonymous) add("anon", "1");
  if (!ca_file.empty()) add("ca", uri_encode(ca_file, true));
  if (patience_s != Location().patience_s) add("patience", std::to_string(patience_s));
  return text;
}

Result<Location> parse_location(const std::string& composition) {
  std::string_view rest = composition;
  if (!rest.starts_with("s3://")) return bad(composition, "it must begin with s3://");
  rest.remove_prefix(5);
  Location location;
  std::string_view options;
  if (const size_t mark = rest.find('?'); mark != std::string_view::npos) {
    options = rest.substr(mark + 1);
    rest = rest.substr(0, mark);
  }
  const size_t slash = rest.find('/');
  location.bucket = rest.substr(0, slash);
  if (!is_word(location.bucket, ".-_") || location.bucket.size() > 255 ||
      location.bucket.find("..") != std::string::npos)
    return bad(composition, "'" + location.bucket + "' is not the name of a bucket");
  if (slash != std::string_view::npos) {
    STOKER_ASSIGN(location.prefix, decode(composition, rest.substr(slash + 1)));
    while (location.prefix.ends_with('/')) location.prefix.pop_back();
    if (!location.prefix.empty()) {
      if (const Status valid = check_key({}, location.prefix); !valid)
        return bad(composition, valid.error().what);
      location.prefix += '/';
    }
  }
  while (!options.empty()) {
    const size_t end = options.find('&');
    const std::string_view option = options.substr(0, end);
    const size_t equals = option.find('=');
    if (equals == std::string_view::npos)
      return bad(composition, "'" + std::string(option) + "' is not an option with a value");
    STOKER_ASSIGN(const std::string value, decode(composition, option.substr(equals + 1)));
    STOKER_TRY(set_option(composition, location, option.substr(0, equals), value));
    options = end == std::string_view::npos ? std::string_view() : options.substr(end + 1);
  }
  return location;
}

Status check_key(const Location& location, std::string_view key) {
  const auto refuse = [key](const std::string& why) {
    return fail(Code::invalid_argument, "'{}' is not a key of an object: {}", key.substr(0, 100),
                why);
  };
  if (key.empty()) return refuse("it is empty");
  if (location.prefix.size() + key.size() > kKeyMax)
    return refuse("with the store's prefix it has more than 1024 bytes");
  if (key.find('\0') != std::string_view::npos) return refuse("it holds a zero byte");
  for (std::string_view rest = key;;) {
    const size_t slash = rest.find('/');
    const std::string_view part = rest.substr(0, slash);
    if (part.empty() || part == "." || part == "..")
      return refuse(
          "a part between '/' is empty, '.' or '..', which servers on the way may take for another "
          "key");
    if (slash == std::string_view::npos) return {};
    rest.remove_prefix(slash + 1);
  }
}

}  // namespace stoker::s3
