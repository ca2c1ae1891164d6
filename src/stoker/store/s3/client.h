// Client: S3 requests, signed, and tried again where that can do no harm. docs/stores/s3.md has the
// rules.
//
// Any thread sends; `done` runs on the thread of the Http and must not wait.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/io/scheduler.h"
#include "stoker/net/http.h"
#include "stoker/store/s3/location.h"
#include "stoker/store/s3/pace.h"
#include "stoker/store/s3/sigv4.h"

namespace stoker::s3 {

// In place of a body's SHA-256: TLS and a checksum of its own protect it.
inline constexpr const char* kUnsigned = "UNSIGNED-PAYLOAD";

struct Command {
  std::string method = "GET";
  std::string key = {};  // whole, with the prefix; empty: the bucket itself
  Query query = {};
  Fields headers = {};      // names in lower case
  Slice body = {};          // alive until done
  std::string text = {};    // a small body of its own, instead
  std::string sha256 = {};  // of `body`, if somebody has it already; or kUnsigned
  Slice into = {};
  Priority priority = Priority::demand;  // among those that wait for their turn
  uint64_t deadline_ns = 0;
  // Whether a try whose answer was lost may be followed by another: it changes nothing, or nothing
  // else when it is done twice.
  bool repeatable = true;
  // Of a request that brings nothing for longer than is usual: another beside it, and the first to
  // bring a byte has `into`. For requests that change nothing.
  bool hedged = false;
  // The element that a 2xx answer is, where its body tells whether it was done: another is no
  // answer.
  std::string_view tells = {};
  // A 2xx answer without an ETag is none.
  bool tagged = false;
};

// What a try came to.
struct Reply {
  enum class Verdict : uint8_t {
    ok,       // 2xx
    refused,  // definitely not done: `error` says why
    later,    // definitely not done, and worth another try
    lost,     // nobody knows
  };
  Verdict verdict = Verdict::lost;
  net::HttpAnswer answer;
  std::string code;                  // S3's, of an answer that has one
  std::string region;                // where the error says that the bucket is
  std::optional<Error> error;        // unless ok
  std::optional<Error> lost_before;  // why an earlier try of the same command was lost
};

class Client {
 public:
  using Done = std::function<void(Reply)>;

  static Result<std::unique_ptr<Client>> make(const Location& location);

  // Tries until it is known what came of it, or patience ends, which begins with the first failure.
  // If the request is not repeatable, the first lost answer ends it.
  void send(std::shared_ptr<const Command> command, Done done);
  // For who waits: from the thread that completes it, an error.
  Future<Reply> send(Command command);
  // One try, after `delay_ms`. Redirects, the server's clock and expired credentials are seen to.
  void try_once(std::shared_ptr<const Command> command, uint64_t delay_ms, Done done);

  bool here() const { return http_->here(); }  // the calling thread is the one that completes
  uint64_t pause_ms(int tries);                // before the next one: grows, drawn at random
  uint64_t patience_ns() const { return location_.patience_s * 1'000'000'000; }
  // Of what is tried again until then: tells of it once in a while, lest it looks like a hang.
  void tell_of_wait(const Error& why, uint64_t until_ns);
  const std::string& where() const {
    return where_;
  }                                  // "bucket 'b' at https://host", for sentences
  bool tls() const { return tls_; }  // never left for plain HTTP
  const net::HttpCounters& counters() const { return http_->counters(); }

 private:
  struct Sending;  // of send()
  struct Try;
  struct Signed;  // for what a try was signed
  struct Race;    // of a request and the one beside it
  // Where requests go, and by what they are signed; changed by redirects and refreshes.
  struct Target {
    Endpoint endpoint;
    bool host_style = false;
    std::string region;
    Credentials credentials;
  };

  Client(Location location, Target target, std::unique_ptr<net::Http> http);
  void launch(std::shared_ptr<Try> each);
  void begin(const std::shared_ptr<Try>& each);
  void run(const std::shared_ptr<Try>& each, const std::shared_ptr<Race>& race, size_t lane,
           uint64_t delay_ms);
  bool lands(Race& race, size_t lane);
  void refresh_if_due();
  net::HttpRequest sign(Try& each);
  void came(const std::shared_ptr<Try>& each, net::HttpAnswer answer);
  void end(const std::shared_ptr<Try>& each, Reply reply);
  bool see_to(Try& each, const Reply& reply);
  bool may_have_expired(const Try& each, const Reply& reply) const;
  bool renew(const std::string& name);
  bool redirect(const Signed& from, const Reply& reply);
  Reply judge(const Command& command, net::HttpAnswer answer) const;
  Error error_of(const Command& command, const net::HttpAnswer& answer, const std::string& code,
                 const std::string& message) const;
  void next_of(const std::shared_ptr<Sending>& sending, uint64_t delay_ms);

  const Location location_;
  const std::string where_;
  const bool tls_;
  mutable Mutex mutex_;
  Target target_ GUARDED_BY(mutex_);
  int64_t skew_s_ GUARDED_BY(mutex_) = 0;        // the server's clock before ours
  int64_t refresh_at_s_ GUARDED_BY(mutex_) = 0;  // not before
  Pace pace_ GUARDED_BY(mutex_);
  size_t active_ GUARDED_BY(mutex_) = 0;        // requests in flight
  uint64_t told_at_ns_ GUARDED_BY(mutex_) = 0;  // when the last wait was told of
  // Tries that came while enough were in flight. Empty in the end: who sends waits for the answer.
  Scheduler waiting_ GUARDED_BY(mutex_);
  std::mt19937_64 random_ GUARDED_BY(mutex_);
  Pool finder_{1};                   // looks for credentials, for requests that are not done before
  std::unique_ptr<net::Http> http_;  // the last member: its thread uses the others
};

}  // namespace stoker::s3
