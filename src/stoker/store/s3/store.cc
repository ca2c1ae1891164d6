// S3Store: opening, telling, listing.
#include "stoker/store/s3/store.h"

#include <algorithm>
#include <charconv>

#include "stoker/base/log.h"
#include "stoker/store/s3/credentials.h"
#include "stoker/store/s3/s3_store.h"
#include "stoker/store/s3/xml.h"

namespace stoker::s3 {
namespace {

constexpr std::string_view kProbePrefix = ".stoker-probe-";

Error no_snapshot(std::string_view name) {
  return fail(Code::not_found, "there is no snapshot '{}': a bucket has none", name);
}

std::optional<uint64_t> number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

// %XX and '+' of a listing with encoding-type=url.
std::string url_decode(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    if (text[i] == '%' && i + 3 <= text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16).ptr ==
            text.data() + i + 3) {
      out += static_cast<char>(static_cast<unsigned char>(value));
      i += 2;
    } else {
      out += text[i] == '+' ? ' ' : text[i];
    }
  }
  return out;
}

}  // namespace

std::string tag_of_etag(std::string_view etag) {
  if (etag.size() >= 2 && etag.front() == '"' && etag.back() == '"')
    return std::string(etag.substr(1, etag.size() - 2));
  return std::string(etag);
}

std::string etag_of_tag(std::string_view tag) {
  return tag.starts_with("W/") ? std::string(tag) : "\"" + std::string(tag) + "\"";
}

Result<std::unique_ptr<Store>> S3Store::open(const std::string& composition, const Runtime& runtime,
                                             const StoreOptions& options) {
  STOKER_ASSIGN(Location location, parse_location(composition));
  auto client = Client::make(location);
  if (!client) return client.error().with("the store '" + location.composition() + "'");
  std::unique_ptr<S3Store> store(
      new S3Store(std::move(location), std::move(*client), runtime, options));
  // A bucket that is not there, or that we may not see, shows now.
  const auto reply = store->client_
                         ->send({.query = {{"list-type", "2"},
                                           {"max-keys", "1"},
                                           {"prefix", store->location_.prefix}}})
                         .wait();
  if (reply->error) return reply->error->with("the store '" + store->location_.composition() + "'");
  if (const auto page = store->listing_of(*reply); !page)
    return page.error().with("the store '" + store->location_.composition() + "'");
  store->uploads_.sweep([&](const std::string& key, const std::string& id) {
    const Status aborted = store->abort_now(key, id);
    if (aborted)
      log().info("an upload of '{}' that a dead writer left in the {} is aborted", key,
                 store->client_->where());
    else
      log().warn(
          "an unfinished upload of '{}', left by a writer that died, cannot be removed and takes "
          "space: {}",
          key, aborted.error().message());
    return static_cast<bool>(aborted);
  });
  return std::unique_ptr<Store>(std::move(store));
}

S3Store::S3Store(Location location, std::unique_ptr<Client> client, const Runtime& runtime,
                 const StoreOptions& options)
    : location_(std::move(location)),
      runtime_(runtime),
      read_only_(options.read_only),
      client_(std::move(client)),
      uploads_(options.read_only ? std::string() : find_state_folder(), client_->where()) {}

S3Store::~S3Store() {
  {
    MutexLock lock(idle_mutex_);
    idle_.wait(lock, [this] { return reading_ == 0; });
  }
  workers_.reset();  // they abort uploads
  for (const auto& [key, id] : left_) {
    if (const Status aborted = abort_now(key, id); aborted)
      uploads_.ended(id);
    else
      log().warn(
          "an unfinished upload of '{}' stays in the {} and takes space, until the next writer on "
          "this machine removes it: {}",
          key, client_->where(), aborted.error().message());
  }
}

Features S3Store::features() const {
  Features features{.atomic = AtomicUnit::object};
  if (read_only_) return features;
  const auto found = conditions();
  features.conditional = found && *found != Match::none;
  return features;
}

// Probed once; a probe that nobody answered is made again.
Result<S3Store::Match> S3Store::conditions() const {
  MutexLock lock(probe_mutex_);
  if (conditions_ == Match::unknown) {
    STOKER_ASSIGN(conditions_, probe_conditions());
  }
  return conditions_;
}

Error S3Store::read_only_error() const {
  return fail(Code::read_only, "the store '{}' was opened read-only; open it for writing",
              location_.composition());
}

Result<ObjectInfo> S3Store::head(std::string_view key, std::string* attempt) const {
  const Reply reply = *client_->send({.method = "HEAD", .key = whole(key)}).wait();
  if (reply.error) return *reply.error;
  const auto bytes = number(reply.answer.header("content-length"));
  const std::string tag = tag_of_etag(reply.answer.header("etag"));
  if (!bytes || tag.empty())
    return fail(Code::io,
                "the answer to HEAD for '{}' in the {} lacks content-length or ETag: the server, "
                "or a proxy before it, does not do as S3 does",
                key, client_->where());
  if (attempt != nullptr) *attempt = reply.answer.header(kAttemptHeader);
  ObjectInfo info;
  info.key = key;
  info.bytes = *bytes;
  info.tag = tag;
  return info;
}

Result<ObjectInfo> S3Store::stat(std::string_view key, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  STOKER_TRY(check_key(location_, key));
  return head(key, nullptr);
}

Result<std::vector<ObjectInfo>> S3Store::list(std::string_view prefix, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  Level all;
  STOKER_TRY(list_into(prefix, "", all));
  return std::move(all.objects);
}

Result<Level> S3Store::list_level(std::string_view prefix, std::string_view snapshot) {
  if (!snapshot.empty()) return no_snapshot(snapshot);
  Level level;
  STOKER_TRY(list_into(prefix, "/", level));
  return level;
}

// Anybody may answer 200; a page of a proxy is no empty bucket.
Result<Xml> S3Store::listing_of(const Reply& reply) const {
  auto page = parse_xml(reply.answer.body);
  if (page && page->name == "ListBucketResult") return page;
  return fail(Code::io,
              "the answer for the {} does not come from an S3 server: it is a success without a "
              "listing, as from a proxy. Check endpoint=",
              client_->where());
}

// All pages. Keys, and folders where there is a delimiter, come in order: a server that repeats
// itself does not keep us for ever.
Status S3Store::list_into(std::string_view prefix, std::string_view delimiter, Level& found) const {
  std::string token, last_key, last_folder, unusable;
  size_t left_out = 0;
  const std::string wanted = whole(prefix);
  const auto leave_out = [&](const std::string& name) {
    if (left_out++ == 0) unusable = name;
  };
  const auto broken = [this](const std::string& why) {
    return fail(Code::io, "the listing of the {} {}; check that endpoint= is an S3 server",
                client_->where(), why);
  };
  for (;;) {
    Query query = {{"list-type", "2"}, {"encoding-type", "url"}, {"prefix", wanted}};
    if (!delimiter.empty()) query.emplace_back("delimiter", delimiter);
    if (!token.empty()) query.emplace_back("continuation-token", token);
    const Reply reply = *client_->send({.query = std::move(query)}).wait();
    if (reply.error) return *reply.error;
    STOKER_ASSIGN(const Xml page, listing_of(reply));
    const bool encoded = page.text_of("EncodingType") == "url";
    const auto take = [&](std::string_view text, std::string& last) -> Result<std::string> {
      std::string name = encoded ? url_decode(text) : std::string(text);
      if (!name.starts_with(wanted)) return broken("holds what was not asked for");
      if (!last.empty() && name <= last)
        return broken(std::string("is not in order: '")
                          .append(name)
                          .append("' after '")
                          .append(last)
                          .append("'"));
      last = name;
      return name.substr(location_.prefix.size());
    };
    for (const Xml& each : page.children) {
      if (each.name == "CommonPrefixes") {
        STOKER_ASSIGN(const std::string folder, take(each.text_of("Prefix"), last_folder));
        if (check_key(location_, std::string_view(folder).substr(0, folder.size() - 1)))
          found.folders.push_back(folder);
        else
          leave_out(folder);
      }
      if (each.name != "Contents") continue;
      const auto bytes = number(each.text_of("Size"));
      if (!bytes) return broken("names no size of an object");
      ObjectInfo info;
      STOKER_ASSIGN(info.key, take(each.text_of("Key"), last_key));
      info.bytes = *bytes;
      info.tag = tag_of_etag(each.text_of("ETag"));
      if (info.key.starts_with(kProbePrefix)) continue;
      if (check_key(location_, info.key))
        found.objects.push_back(std::move(info));
      else if (info.bytes > 0 || !info.key.ends_with('/'))  // else it is a folder of a console
        leave_out(info.key);
    }
    if (page.text_of("IsTruncated") != "true") {
      if (left_out > 0)
        log().warn(
            "{} names in the {} cannot be used and are left out, the first is '{}': no part "
            "between "
            "'/' may be empty, '.' or '..'; rename them with another tool",
            left_out, client_->where(), unusable);
      return {};
    }
    if (page.text_of("NextContinuationToken") == token ||
        page.text_of("NextContinuationToken").empty())
      return broken("does not go on where it ended");
    token = page.text_of("NextContinuationToken");
  }
}

Result<std::unique_ptr<Transaction>> S3Store::begin() {
  if (read_only_) return read_only_error();
  return std::unique_ptr<Transaction>(std::make_unique<S3Transaction>(*this));
}

Future<void> S3Store::snapshot(std::string_view) {
  if (read_only_) return read_only_error();
  return fail(Code::unsupported, "a bucket has no snapshots; use local: for them");
}

Future<void> S3Store::drop(std::string_view name, Durability) { return no_snapshot(name); }

StoreInfo S3Store::info() const {
  StoreInfo info;
  info.composition = location_.composition();
  info.committed = info.durable = commits_;
  if (read_only_) info.read_only = "it was opened read-only";
  return info;
}

}  // namespace stoker::s3

namespace stoker {

Result<std::unique_ptr<Store>> open_s3_store(const std::string& composition, const Runtime& runtime,
                                             const StoreOptions& options) {
  return s3::S3Store::open(composition, runtime, options);
}

}  // namespace stoker
