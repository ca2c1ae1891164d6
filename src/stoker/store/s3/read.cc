// S3Store: reads. Ranges of one read are fetched side by side; all of them must be of one object.
#include <algorithm>
#include <charconv>

#include "stoker/base/bytes.h"
#include "stoker/base/clock.h"
#include "stoker/store/s3/s3_store.h"

namespace stoker::s3 {
namespace {

constexpr uint64_t kRangeBytes = 8 * kMiB;
constexpr uint64_t kProgressBytes = 64 * kKiB;  // of one try, for which patience begins anew

// "bytes 0-9/100"
struct ContentRange {
  uint64_t first = 0, last = 0, total = 0;
};

std::optional<ContentRange> parse_content_range(std::string_view text) {
  ContentRange range;
  if (!text.starts_with("bytes ")) return {};
  const char* at = text.data() + 6;
  const char* const end = text.data() + text.size();
  for (auto& [value, behind] :
       {std::pair<uint64_t*, char>{&range.first, '-'}, {&range.last, '/'}, {&range.total, '\0'}}) {
    const auto [next, error] = std::from_chars(at, end, *value);
    if (error != std::errc()) return {};
    if (behind == '\0') return next == end ? std::optional(range) : std::nullopt;
    if (next == end || *next != behind) return {};
    at = next + 1;
  }
  return {};
}

}  // namespace

// One read. Its ranges' answers come on the thread of the Http, one after the other.
class S3Store::Reading : public std::enable_shared_from_this<Reading> {
 public:
  // tag: that the object must have; empty: any.
  Reading(S3Store& store, std::string key, uint64_t offset, Slice into, const ReadOptions& options,
          std::string_view tag)
      : store_(store),
        key_(std::move(key)),
        offset_(offset),
        into_(into),
        priority_(options.priority),
        deadline_ns_(options.deadline_ns),
        tag_(tag) {}

  Future<void> start() {
    Future<void> future = promise_.future();
    {
      MutexLock lock(mutex_);
      left_ = left_at_start();
    }
    for (uint64_t at = 0; at < into_.size; at += kRangeBytes)
      fetch({at, std::min(kRangeBytes, into_.size - at)}, 0);
    return future;
  }

 private:
  // What is still to come of a range.
  struct Rest {
    uint64_t at, bytes;  // in `into_`
    int tries = 0;
    int odd = 0;            // answers that broke a rule
    uint64_t until_ns = 0;  // patience ends; 0: all was well so far
  };

  void fetch(Rest rest, uint64_t delay_ms) {
    Command command;
    command.key = store_.whole(key_);
    const uint64_t first = offset_ + rest.at;
    command.headers = {
        {"range", "bytes=" + std::to_string(first) + "-" + std::to_string(first + rest.bytes - 1)}};
    command.into = into_.sub(rest.at, rest.bytes);
    command.priority = priority_;
    command.deadline_ns = deadline_ns_;
    command.hedged = true;
    {
      MutexLock lock(mutex_);
      if (!etag_.empty()) command.headers.emplace_back("if-match", etag_);
    }
    store_.client_->try_once(
        std::make_shared<const Command>(std::move(command)), delay_ms,
        [self = shared_from_this(), rest](Reply reply) { self->came(rest, std::move(reply)); });
  }

  void came(Rest rest, Reply reply) {
    const bool headed = reply.answer.status == 206 || reply.answer.status == 200;
    const Status of_us = headed ? check_answer(rest, reply.answer) : Status();
    if (!of_us && of_us.error().code != Code::io) return end(of_us);
    if (reply.verdict == Reply::Verdict::ok && of_us && reply.answer.landed == rest.bytes)
      return end({});
    if (reply.verdict == Reply::Verdict::refused) {
      if (reply.answer.status == 412) return end(replaced());
      if (reply.answer.status == 416) return end(too_short());
      return end(*reply.error);
    }
    // It goes on where it was cut, if what came was of our object and in its place. Without an ETag
    // the rest may be another's, so it begins anew.
    if (headed && of_us && !reply.answer.header("etag").empty()) {
      rest.at += reply.answer.landed;
      rest.bytes -= reply.answer.landed;
      if (reply.answer.landed >= kProgressBytes) rest.tries = 0, rest.until_ns = 0;
      if (rest.bytes == 0) return end({});
    }
    Error why =
        !of_us ? of_us.error()
        : reply.error
            ? *reply.error
            : fail(Code::io, "'{}' in the {}: the answer is shorter than it says; read it again",
                   key_, store_.client_->where());
    if (!of_us && ++rest.odd > 3) return end(why);
    const uint64_t pause = store_.client_->pause_ms(rest.tries++);
    const uint64_t now = Clock::real().now_ns();
    if (rest.until_ns == 0) rest.until_ns = now + store_.client_->patience_ns();
    if (now + pause * 1'000'000 >= rest.until_ns)
      return end(why.with("given up after " + std::to_string(rest.tries) + " tries"));
    store_.client_->tell_of_wait(why, rest.until_ns);
    fetch(rest, pause);
  }

  // That the answer is for the bytes we asked for, and of the object that the others are of. `io`:
  // another try may do better.
  Status check_answer(const Rest& rest, const net::HttpAnswer& answer) {
    const std::string what = "'" + key_ + "' in the " + store_.client_->where();
    const uint64_t first = offset_ + rest.at;
    uint64_t total = 0;
    if (answer.status == 206) {
      const auto range = parse_content_range(answer.header("content-range"));
      if (!range || range->first != first)
        return fail(Code::io,
                    "the server answers with another range of {} than it was asked for; use a "
                    "server that does ranges",
                    what);
      total = range->total;
      if (total < offset_ + into_.size) return too_short();
      if (range->last != first + rest.bytes - 1)
        return fail(Code::io,
                    "the server answers with a part of the range of {} that it was asked for; use "
                    "a server that does ranges",
                    what);
    } else {
      // The whole object: that is well if it is what we want.
      uint64_t length = 0;
      const std::string_view text = answer.header("content-length");
      const bool known = std::from_chars(text.data(), text.data() + text.size(), length).ptr ==
                             text.data() + text.size() &&
                         !text.empty();
      if (known && length < offset_ + into_.size) return too_short();
      if (!known || first != 0 || length != rest.bytes)
        return fail(
            Code::unsupported,
            "the server ignores ranges and answers with all of {}; use a server that does ranges",
            what);
      total = length;
    }
    const std::string etag(answer.header("etag"));
    if (etag.empty() && (left_at_start() > 1 || !tag_.empty()))
      return fail(Code::unsupported,
                  "the server gives no ETag for {}, so parts of it could belong to another object; "
                  "use a server that gives ETags",
                  what);
    // How the server wants the tag in If-Match is not known here: its answer is compared instead.
    if (!tag_.empty() && tag_of_etag(etag) != tag_) return replaced();
    MutexLock lock(mutex_);
    if (!known_) {
      known_ = true;
      etag_ = etag;
      total_ = total;
    }
    return etag == etag_ && total == total_ ? Status() : Status(replaced());
  }

  size_t left_at_start() const { return (into_.size + kRangeBytes - 1) / kRangeBytes; }
  Error replaced() const {
    return fail(Code::conflict, "'{}' in the {}{}", key_, store_.client_->where(),
                tag_.empty()
                    ? " was replaced while it was read; read it again"
                    : " was replaced since it was looked up; look it up and read it again");
  }
  Error too_short() const {
    return fail(Code::invalid_argument, "bytes {} to {} are beyond the end of '{}' in the {}",
                offset_, offset_ + into_.size, key_, store_.client_->where());
  }

  // Of one range. The read is done when all are: the memory is its owner's again then.
  void end(const Status& status) {
    std::optional<Status> all;
    {
      MutexLock lock(mutex_);
      if (!status && !failed_) failed_ = status.error();
      if (--left_ == 0) all = failed_ ? Status(*failed_) : Status();
    }
    if (!all) return;
    promise_.complete(std::move(*all));
    MutexLock lock(store_.idle_mutex_);
    --store_.reading_;
    store_.idle_.notify_all();
  }

  S3Store& store_;
  const std::string key_;
  const uint64_t offset_;
  const Slice into_;
  const Priority priority_;
  const uint64_t deadline_ns_;
  const std::string tag_;  // that the object must have; empty: any
  Promise<void> promise_;
  Mutex mutex_;
  size_t left_ GUARDED_BY(mutex_) = 0;
  bool known_ GUARDED_BY(mutex_) = false;  // what the first answer says
  std::string etag_ GUARDED_BY(mutex_);
  uint64_t total_ = 0;
  std::optional<Error> failed_;
};

Future<void> S3Store::read(std::string_view key, uint64_t offset, Slice into, ReadOptions options) {
  if (!options.snapshot.empty())
    return fail(Code::not_found, "there is no snapshot '{}': a bucket has none", options.snapshot);
  return read(key, offset, into, options, {});
}

Future<void> S3Store::read_tagged(std::string_view key, std::string_view tag, uint64_t offset,
                                  Slice into) {
  return read(key, offset, into, {}, tag);
}

// tag: that the object must have; empty: any.
Future<void> S3Store::read(std::string_view key, uint64_t offset, Slice into,
                           const ReadOptions& options, std::string_view tag) {
  if (const Status valid = check_key(location_, key); !valid) return valid.error();
  if (offset > UINT64_MAX - into.size)
    return fail(Code::invalid_argument, "byte {} is beyond the end of '{}'", offset, key);
  if (into.size == 0) {
    auto promise = std::make_shared<Promise<void>>();
    Future<void> future = promise->future();
    workers_->run([this, promise, offset, name = std::string(key)] {
      const auto there = stat(name, {});
      if (there && offset > there->bytes)
        promise->complete(fail(Code::invalid_argument,
                               "byte {} is beyond the end of '{}', which has {}", offset, name,
                               there->bytes));
      else
        promise->complete(there ? Status() : Status(there.error()));
    });
    return future;
  }
  ++reading_;
  return std::make_shared<Reading>(*this, std::string(key), offset, into, options, tag)->start();
}

}  // namespace stoker::s3
