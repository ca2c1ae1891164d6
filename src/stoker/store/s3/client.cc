#include "stoker/store/s3/client.h"

#include <curl/curl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>

#include "stoker/base/clock.h"
#include "stoker/base/log.h"
#include "stoker/io/loop.h"
#include "stoker/store/s3/credentials.h"
#include "stoker/store/s3/xml.h"

namespace stoker::s3 {
namespace {

// At the percentile itself one request in twenty is hedged whatever the server does, and nothing
// is left of the allowance for those that hang.
constexpr uint64_t kHedgeFactor = 2;
constexpr int64_t kRefreshBefore_s = 300;           // AWS has the next ones ready by then
constexpr int64_t kRefreshPause_s = 10;             // between two looks
constexpr uint64_t kQuiet_ns = 1'500'000'000;       // of a wait that is not told of yet
constexpr uint64_t kTellPause_ns = 30'000'000'000;  // between two that are
constexpr int kTurnsMax = 3;                        // redirects, clocks and refreshes of one try

using Verdict = Reply::Verdict;
using Outcome = net::HttpAnswer::Outcome;

// S3's own words for "not now": it did nothing.
bool is_throttle(std::string_view code) {
  constexpr std::array<std::string_view, 8> codes = {
      "SlowDown",        "SlowDownRead",         "SlowDownWrite", "ServiceUnavailable",
      "TooManyRequests", "RequestLimitExceeded", "Throttling",    "RequestTimeout"};
  return std::find(codes.begin(), codes.end(), code) != codes.end();
}

// The body that came is not the one that we signed: it was damaged on its way, and not taken.
bool is_damaged(std::string_view code) {
  return code == "BadDigest" || code == "XAmzContentSHA256Mismatch" ||
         code == "XAmzContentChecksumMismatch";
}

std::string name_of(const Credentials& credentials) {
  return credentials.access_key + " " + credentials.session_token;
}

// A short line of what a server says of itself.
std::string tidy(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 200)) out += c >= ' ' && c < 127 ? c : ' ';
  return out;
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

}  // namespace

// Of others that were signed for the same, one may have put it right meanwhile.
struct Client::Signed {
  std::string host, region;
  std::string by;  // the credentials' name
  int64_t skew_s = 0;
};

struct Client::Try : Op {
  std::shared_ptr<const Command> command;
  std::shared_ptr<Try> waits;  // itself, while the scheduler has it
  uint64_t delay_ms = 0;
  Done done;
  int turns = 0;
  std::string sha256;
  std::optional<Signed> was;  // of the first request of this turn
};

// The request has lane 0, the one beside it lane 1. Callbacks run on the thread of the Http.
struct Client::Race {
  uint64_t begun_ns = 0;
  Mutex mutex;
  std::array<net::Http::Ticket, 2> tickets GUARDED_BY(mutex){};  // 0: not sent
  std::optional<size_t> landed GUARDED_BY(mutex);                // the lane whose bytes are `into`
  size_t going GUARDED_BY(mutex) = 1;
  bool over GUARDED_BY(mutex) = false;
};

struct Client::Sending {
  std::shared_ptr<const Command> command;
  Done done;
  uint64_t until_ns = 0;  // from the first try that failed
  int tries = 0;
  std::optional<Error> lost;  // why a try was
};

Client::Client(Location location, Target target, std::unique_ptr<net::Http> http)
    : location_(std::move(location)),
      where_("bucket '" + location_.bucket + "' at " + target.endpoint.url()),
      tls_(target.endpoint.tls),
      target_(std::move(target)),
      waiting_(LoopOptions().floor_percent),
      random_(std::random_device{}()),
      http_(std::move(http)) {}

Result<std::unique_ptr<Client>> Client::make(const Location& location) {
  Target target;
  target.region = location.region.empty() ? find_region() : location.region;
  if (!location.anonymous) {
    STOKER_ASSIGN(target.credentials, find_credentials());
  }
  const bool china = target.region.starts_with("cn-");
  const std::string named = location.endpoint.empty() ? find_endpoint() : location.endpoint;
  auto endpoint = parse_endpoint(!named.empty() ? named
                                                : "https://s3." + target.region + ".amazonaws.com" +
                                                      (china ? ".cn" : ""));
  if (!endpoint)  // an endpoint may hold a password: it is not printed
    return endpoint.error().with(named.empty() ? "the region '" + target.region + "'"
                                               : std::string("the endpoint of the environment"));
  target.endpoint = std::move(*endpoint);
  const bool dotted = location.bucket.find('.') != std::string::npos;  // no certificate is for it
  target.host_style = location.style == Style::host || (location.style == Style::chosen &&
                                                        is_amazon(target.endpoint.host) && !dotted);
  STOKER_ASSIGN(auto http, net::Http::make({.ca_file = location.ca_file}));
  return std::unique_ptr<Client>(new Client(location, std::move(target), std::move(http)));
}

uint64_t Client::pause_ms(int tries) {
  const double top = std::min(5'000.0, 50.0 * std::pow(2.0, std::min(tries, 10)));
  MutexLock lock(mutex_);
  return static_cast<uint64_t>(std::uniform_real_distribution<double>(top / 2, top)(random_));
}

// ---- one try

void Client::try_once(std::shared_ptr<const Command> command, uint64_t delay_ms, Done done) {
  auto each = std::make_shared<Try>();
  each->delay_ms = delay_ms;
  each->done = std::move(done);
  // Here, on the caller's thread: the one of the Http has others to serve.
  if (!http_->here()) refresh_if_due();
  each->sha256 = !command->sha256.empty() ? command->sha256
                 : !command->text.empty() ? sha256_hex(command->text.data(), command->text.size())
                                          : sha256_hex(command->body.data, command->body.size);
  each->priority = command->priority;
  each->deadline_ns = command->deadline_ns;
  each->command = std::move(command);
  launch(std::move(each));
}

void Client::launch(std::shared_ptr<Try> each) {
  {
    MutexLock lock(mutex_);
    if (!pace_.admits(active_)) {
      Try& last = *each;
      last.waits = std::move(each);
      waiting_.push(last);
      return;
    }
    ++active_;
  }
  begin(each);
}

void Client::begin(const std::shared_ptr<Try>& each) {
  const uint64_t delay_ms = std::exchange(each->delay_ms, 0);
  each->was.reset();
  if (!each->command->hedged) {
    net::HttpRequest request = sign(*each);
    request.delay_ms = delay_ms;
    http_->send(std::move(request),
                [this, each](net::HttpAnswer answer) { came(each, std::move(answer)); });
    return;
  }
  auto race = std::make_shared<Race>();
  race->begun_ns = Clock::real().now_ns() + delay_ms * 1'000'000;
  std::optional<uint64_t> usual;
  {
    MutexLock lock(mutex_);
    usual = pace_.usual_ns();
  }
  run(each, race, 0, delay_ms);
  if (!usual) return;
  http_->after(delay_ms + kHedgeFactor * *usual / 1'000'000 + 1, [this, each, race] {
    {
      MutexLock racing(race->mutex);
      MutexLock lock(mutex_);
      if (race->over || race->landed || !pace_.take_hedge()) return;
      ++race->going;
    }
    run(each, race, 1, 0);
  });
}

void Client::run(const std::shared_ptr<Try>& each, const std::shared_ptr<Race>& race, size_t lane,
                 uint64_t delay_ms) {
  net::HttpRequest request = sign(*each);
  request.delay_ms = delay_ms;
  request.lands = [this, race, lane] { return lands(*race, lane); };
  const auto ticket =
      http_->send(std::move(request), [this, each, race, lane](net::HttpAnswer answer) {
        {
          MutexLock lock(race->mutex);
          --race->going;
          // An answer without bytes says nothing while the other may bring some.
          if (race->over || (race->landed ? *race->landed != lane : race->going > 0)) return;
          race->over = true;
        }
        came(each, std::move(answer));
      });
  MutexLock lock(race->mutex);
  race->tickets[lane] = ticket;
}

// The first that brings a byte keeps the memory.
bool Client::lands(Race& race, size_t lane) {
  uint64_t wait = 0;
  {
    MutexLock lock(race.mutex);
    if (race.landed || race.over) return race.landed == lane;
    race.landed = lane;
    if (race.tickets[1 - lane] != 0) http_->cancel(race.tickets[1 - lane]);
    const uint64_t now = Clock::real().now_ns();
    wait = now - std::min(now, race.begun_ns);
  }
  MutexLock lock(mutex_);
  pace_.waited(wait);
  return true;
}

// One caller waits for new credentials, while the old ones still hold for the others.
void Client::refresh_if_due() {
  const auto now = static_cast<int64_t>(std::time(nullptr));
  {
    MutexLock lock(mutex_);
    const int64_t expires = target_.credentials.expires_s;
    if (expires == 0 || now < expires - kRefreshBefore_s || now < refresh_at_s_) return;
    refresh_at_s_ = now + kRefreshPause_s;
  }
  const auto found = find_credentials();
  MutexLock lock(mutex_);
  if (found) target_.credentials = *found;
}

net::HttpRequest Client::sign(Try& each) {
  const Command& command = *each.command;
  Target target;
  int64_t now = 0;
  {
    MutexLock lock(mutex_);
    target = target_;
    now = static_cast<int64_t>(std::time(nullptr)) + skew_s_;
    if (!each.was)
      each.was = {target.endpoint.host, target.region, name_of(target.credentials), skew_s_};
  }
  ToSign signed_request{command.method, "/", command.query, command.headers, each.sha256};
  std::string host = target.endpoint.host;
  if (target.host_style) {
    host = location_.bucket + "." + host;
  } else {
    signed_request.path += uri_encode(location_.bucket, false) + (command.key.empty() ? "" : "/");
  }
  signed_request.path += uri_encode(command.key, true);
  auto& headers = signed_request.headers;
  headers.emplace_back("host", host);
  if (!target.credentials.anonymous()) {
    const std::string time = amz_time(now);
    headers.emplace_back("x-amz-date", time);
    headers.emplace_back("x-amz-content-sha256", each.sha256);
    if (!target.credentials.session_token.empty())
      headers.emplace_back("x-amz-security-token", target.credentials.session_token);
    const std::string proof =
        authorization(signed_request, target.credentials, target.region, "s3", time);
    headers.emplace_back("authorization", proof);
  }
  net::HttpRequest request;
  request.method = command.method;
  request.url = (target.endpoint.tls ? "https://" : "http://") + host + signed_request.path;
  if (!command.query.empty()) request.url += "?" + encode_query(command.query);
  request.headers = std::move(headers);
  request.body = command.text.empty()
                     ? command.body
                     : Slice{reinterpret_cast<std::byte*>(const_cast<char*>(command.text.data())),
                             command.text.size()};
  request.into = command.into;
  request.stall_ms = std::clamp<uint64_t>(location_.patience_s * 1000 / 3, 1'000, 20'000);
  request.once = !command.repeatable && request.body.size == 0;
  return request;
}

void Client::came(const std::shared_ptr<Try>& each, net::HttpAnswer answer) {
  Reply reply = judge(*each->command, std::move(answer));
  if (see_to(*each, reply)) {
    begin(each);  // it keeps its place
    return;
  }
  if (may_have_expired(*each, reply)) {
    each->turns = kTurnsMax;
    // Elsewhere: a metadata service takes its time, and other requests go on here meanwhile.
    finder_.run([this, each, reply = std::move(reply)]() mutable {
      const bool fresh = renew(each->was->by);
      http_->after(0, [this, each, fresh, reply = std::move(reply)]() mutable {
        if (fresh)
          begin(each);
        else
          end(each, std::move(reply));
      });
    });
    return;
  }
  end(each, std::move(reply));
}

void Client::end(const std::shared_ptr<Try>& each, Reply reply) {
  const uint64_t now = Clock::real().now_ns();
  std::vector<std::shared_ptr<Try>> next;
  {
    MutexLock lock(mutex_);
    if (reply.verdict == Verdict::ok) pace_.well(now);
    if (reply.verdict == Verdict::later || reply.verdict == Verdict::lost) pace_.refused(now);
    --active_;
    while (waiting_.size() > 0 && pace_.admits(active_)) {
      ++active_;
      next.push_back(std::move(static_cast<Try*>(waiting_.pop())->waits));
    }
  }
  for (const auto& one : next) begin(one);
  each->done(std::move(reply));
}

// Whether the same request is worth sending at once with something put right. The server did
// nothing so far.
bool Client::see_to(Try& each, const Reply& reply) {
  if (reply.answer.outcome != Outcome::answered || each.turns == kTurnsMax) return false;
  const int status = reply.answer.status;
  // The answer to HEAD has no body, so no code either: what may have been wrong is looked at.
  const bool bare = each.command->method == "HEAD" && (status == 400 || status == 403);
  if (status == 301 || status == 302 || status == 307 || status == 308 ||
      (status == 400 && (bare || reply.code == "AuthorizationHeaderMalformed"))) {
    ++each.turns;
    if (redirect(*each.was, reply)) return true;
    if (!bare) return false;
  }
  if (reply.code == "RequestTimeTooSkewed" || bare) {
    const time_t theirs = curl_getdate(std::string(reply.answer.header("date")).c_str(), nullptr);
    const auto skew = static_cast<int64_t>(theirs) - static_cast<int64_t>(std::time(nullptr));
    MutexLock lock(mutex_);
    if (theirs == -1 || std::abs(skew - each.was->skew_s) < 60) return false;
    if (std::abs(skew - skew_s_) >= 60) {
      log().warn(
          "the clocks of {} and of this machine differ by {} s, so requests are signed with the "
          "server's time; set the clock of this machine",
          target_.endpoint.host, skew);
      skew_s_ = skew;
    }
    ++each.turns;
    return true;
  }
  return false;
}

bool Client::may_have_expired(const Try& each, const Reply& reply) const {
  if (location_.anonymous || reply.answer.outcome != Outcome::answered || each.turns == kTurnsMax)
    return false;
  const bool bare =
      each.command->method == "HEAD" && (reply.answer.status == 400 || reply.answer.status == 403);
  return bare || reply.code == "ExpiredToken" || reply.code == "TokenRefreshRequired";
}

// Whether there are others than those of this name. Of many requests that met their end, the first
// one looks.
bool Client::renew(const std::string& name) {
  {
    MutexLock lock(mutex_);
    if (name_of(target_.credentials) != name) return true;
  }
  const auto found = find_credentials();
  if (!found || name_of(*found) == name) return false;
  MutexLock lock(mutex_);
  target_.credentials = *found;
  return true;
}

// To another region, or another host that may have our signature and token.
bool Client::redirect(const Signed& from, const Reply& reply) {
  MutexLock lock(mutex_);
  if (from.host != target_.endpoint.host || from.region != target_.region) return true;
  std::string region(reply.answer.header("x-amz-bucket-region"));
  if (region.empty()) region = reply.region;
  if (is_region(region) && region != target_.region) {
    const std::string old = "s3." + target_.region + ".";
    if (target_.endpoint.host.starts_with(old) && is_amazon(target_.endpoint.host))
      target_.endpoint.host = "s3." + region + target_.endpoint.host.substr(old.size() - 1);
    target_.region = region;
    return true;
  }
  std::string location(reply.answer.header("location"));
  const size_t scheme = location.find("://");
  if (scheme == std::string::npos) return false;
  location.resize(std::min(location.size(), location.find_first_of("/?", scheme + 3)));
  auto to = parse_endpoint(location);
  if (!to || (target_.endpoint.tls && !to->tls)) return false;
  if (target_.host_style && to->host.starts_with(location_.bucket + "."))
    to->host.erase(0, location_.bucket.size() + 1);
  if (!is_same_party(target_.endpoint.host, to->host) || to->host == target_.endpoint.host)
    return false;
  target_.endpoint = *to;
  return true;
}

Reply Client::judge(const Command& command, net::HttpAnswer answer) const {
  Reply reply;
  reply.answer = std::move(answer);
  const net::HttpAnswer& got = reply.answer;
  std::string message;
  const auto xml = is_blank(got.body) ? Result<Xml>(Xml()) : parse_xml(got.body);
  if (got.status >= 200 && xml && xml->name == "Error") {
    reply.code = tidy(xml->text_of("Code"));
    message = tidy(xml->text_of("Message"));
    reply.region = xml->text_of("Region");
  } else if (got.status >= 200 && got.status < 300 &&
             ((!command.tells.empty() && (!xml || xml->name != command.tells)) ||
              (command.tagged && got.header("etag").empty()))) {
    reply.code = "an answer that does not say what came of it";
  }
  switch (got.outcome) {
    case Outcome::unsent:
      reply.verdict = got.untrusted ? Verdict::refused : Verdict::later;
      break;
    case Outcome::lost:
    case Outcome::wrong:
      reply.verdict = Verdict::lost;
      break;
    case Outcome::cancelled:
      reply.verdict = Verdict::refused;
      break;
    case Outcome::answered: {
      const bool throttled = is_throttle(reply.code) || got.status == 429;
      if (got.status >= 200 && got.status < 300)
        reply.verdict = reply.code.empty() ? Verdict::ok : Verdict::lost;
      else if (throttled || got.status == 409 || is_damaged(reply.code))
        reply.verdict = Verdict::later;
      else if (got.status >= 500 && got.status != 501)
        reply.verdict = Verdict::lost;
      else
        reply.verdict = Verdict::refused;
    }
  }
  if (reply.verdict != Verdict::ok) reply.error = error_of(command, got, reply.code, message);
  return reply;
}

Error Client::error_of(const Command& command, const net::HttpAnswer& answer,
                       const std::string& code, const std::string& message) const {
  const std::string what =
      command.key.empty() ? "the " + where_ : "'" + command.key + "' in the " + where_;
  const std::string said = code.empty() ? "status " + std::to_string(answer.status)
                                        : code + (message.empty() ? "" : ": " + message);
  if (answer.outcome == Outcome::cancelled)
    return fail(Code::cancelled, "the request for {} was cancelled", what);
  if (answer.untrusted)
    return fail(Code::io,
                "{}: no answer, as its certificate is not trusted ({}); check endpoint=, or name "
                "the file of its authority by ca=",
                what, tidy(answer.why));
  if (answer.outcome != Outcome::answered)
    return fail(
        Code::io,
        "{}: the server gave no answer ({}); check that it runs and that endpoint= names it", what,
        tidy(answer.why));
  if (code == "NoSuchBucket")
    return fail(Code::not_found, "there is no {}; check its name, region= and endpoint=", where_);
  switch (answer.status) {
    case 404:
      return fail(Code::not_found, "there is no {}",
                  command.key.empty() ? where_ : "object " + what);
    case 401:
    case 403:
      return fail(
          Code::no_permission,
          "the server refuses {} of {} ({}); check that the credentials are right, have not "
          "expired and allow this",
          command.method, what, said);
    case 412:
      return fail(Code::conflict,
                  "{} does not meet the condition: it was changed meanwhile; read it and try again",
                  what);
    case 416:
      return fail(Code::invalid_argument,
                  "{} has fewer bytes than were asked for; ask for its size, then for less", what);
    case 501:
      return fail(Code::unsupported, "the server cannot do {} of {} ({}); use another server",
                  command.method, what, said);
    case 301:
    case 302:
    case 307:
    case 308:
      return fail(Code::io,
                  "the server redirects {}, and Stoker does not follow; give the right endpoint= "
                  "and region=",
                  what);
    default:
      return fail(answer.status == 507 ? Code::out_of_space : Code::io, "{}: the server says {}",
                  what, said);
  }
}

// ---- until it is known

void Client::send(std::shared_ptr<const Command> command, Done done) {
  auto sending = std::make_shared<Sending>();
  sending->command = std::move(command);
  sending->done = std::move(done);
  next_of(sending, 0);
}

void Client::next_of(const std::shared_ptr<Sending>& sending, uint64_t delay_ms) {
  const auto command = sending->command;
  try_once(command, delay_ms, [this, sending](Reply reply) {
    const bool lost = reply.verdict == Verdict::lost;
    const bool again = reply.verdict == Verdict::later || (lost && sending->command->repeatable);
    reply.lost_before = sending->lost;
    if (lost) sending->lost = reply.error;
    const uint64_t pause = pause_ms(sending->tries++);
    const uint64_t now = Clock::real().now_ns();
    if (sending->until_ns == 0) sending->until_ns = now + patience_ns();
    if (again && now + pause * 1'000'000 < sending->until_ns) {
      tell_of_wait(*reply.error, sending->until_ns);
      next_of(sending, pause);
      return;
    }
    if (again)
      reply.error =
          reply.error->with("given up after " + std::to_string(sending->tries) + " tries");
    sending->done(std::move(reply));
  });
}

void Client::tell_of_wait(const Error& why, uint64_t until_ns) {
  const uint64_t now = Clock::real().now_ns();
  if (now + patience_ns() < until_ns + kQuiet_ns || now > until_ns) return;
  {
    MutexLock lock(mutex_);
    if (told_at_ns_ != 0 && now - told_at_ns_ < kTellPause_ns) return;
    told_at_ns_ = now;
  }
  log().warn("{}; trying again, for {} s more at most (patience=)", why.message(),
             (until_ns - now) / 1'000'000'000);
}

Future<Reply> Client::send(Command command) {
  if (http_->here()) {
    Reply reply;
    reply.verdict = Verdict::refused;
    reply.error = fail(Code::unsupported,
                       "the {} cannot be waited for on the thread that completes its futures; wait "
                       "on another thread",
                       where_);
    return Result<Reply>(std::move(reply));
  }
  auto promise = std::make_shared<Promise<Reply>>();
  Future<Reply> future = promise->future();
  send(std::make_shared<const Command>(std::move(command)),
       [promise](Reply reply) { promise->complete(std::move(reply)); });
  return future;
}

}  // namespace stoker::s3
