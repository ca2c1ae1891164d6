#include "stoker/net/http.h"

#include <curl/curl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "stoker/base/check.h"
#include "stoker/base/mutex.h"

namespace stoker::net {
namespace {

constexpr size_t kBodyMax = 16 << 20;  // of an answer that goes into a string
constexpr size_t kHeadersMax = 64 << 10;
// The library's, one a request.
constexpr size_t kBufferMin = 64 << 10, kBufferMax = 512 << 10;

using Milliseconds = std::chrono::milliseconds;
using Time = std::chrono::steady_clock::time_point;

long buffer_for(size_t bytes) {
  return static_cast<long>(std::clamp(bytes, kBufferMin, kBufferMax));
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  });
  return out;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() &&
         (text.back() == ' ' || text.back() == '\t' || text.back() == '\r' || text.back() == '\n'))
    text.remove_suffix(1);
  return text;
}

// One request on its way. Of the thread alone once it was handed over.
struct Call {
  Http::Ticket ticket = 0;
  HttpRequest request;
  Http::Done done;
  Time begin_at;
  HttpAnswer answer;
  size_t sent = 0;  // of the body
  size_t header_bytes = 0;
  bool too_long = false, unwanted = false;
  CURL* easy = nullptr;
  curl_slist* headers = nullptr;
  char error[CURL_ERROR_SIZE] = {};

  ~Call() {
    curl_slist_free_all(headers);
    if (easy != nullptr) curl_easy_cleanup(easy);
  }
};

size_t on_header(char* data, size_t size, size_t count, void* context) {
  Call& call = *static_cast<Call*>(context);
  const std::string_view line(data, size * count);
  call.header_bytes += line.size();
  if (call.header_bytes > kHeadersMax) return 0;
  if (line.starts_with("HTTP/")) {  // an interim answer came before
    call.answer.headers.clear();
    return line.size();
  }
  const size_t colon = line.find(':');
  if (colon != std::string_view::npos)
    call.answer.headers.emplace_back(lower(trim(line.substr(0, colon))),
                                     trim(line.substr(colon + 1)));
  return line.size();
}

size_t on_body(char* data, size_t size, size_t count, void* context) {
  Call& call = *static_cast<Call*>(context);
  const size_t bytes = size * count;
  long status = 0;
  curl_easy_getinfo(call.easy, CURLINFO_RESPONSE_CODE, &status);
  if (status >= 200 && status < 300 && call.request.into.data != nullptr) {
    if (call.answer.landed == 0 && call.request.lands && !call.request.lands()) {
      call.unwanted = true;
      return 0;
    }
    if (bytes > call.request.into.size - call.answer.landed) {
      call.too_long = true;
      return 0;
    }
    std::memcpy(call.request.into.data + call.answer.landed, data, bytes);
    call.answer.landed += bytes;
    return bytes;
  }
  if (bytes > kBodyMax - call.answer.body.size()) {
    call.too_long = true;
    return 0;
  }
  call.answer.body.append(data, bytes);
  return bytes;
}

size_t on_send(char* into, size_t size, size_t count, void* context) {
  Call& call = *static_cast<Call*>(context);
  const size_t bytes = std::min(size * count, call.request.body.size - call.sent);
  if (bytes > 0) std::memcpy(into, call.request.body.data + call.sent, bytes);
  call.sent += bytes;
  return bytes;
}

// A body is sent once: the library would begin again on another connection without asking.
int on_seek(void* /*context*/, curl_off_t /*offset*/, int /*origin*/) { return CURL_SEEKFUNC_FAIL; }

bool nothing_sent(CURLcode code, CURL* easy) {
  long bytes = 0;
  curl_easy_getinfo(easy, CURLINFO_REQUEST_SIZE, &bytes);
  if (bytes > 0) return false;
  switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_OPERATION_TIMEDOUT:
      return true;  // all of them before a byte of the request
    default:
      return false;
  }
}

}  // namespace

std::string_view HttpAnswer::header(std::string_view name) const {
  const auto found = std::find_if(headers.begin(), headers.end(),
                                  [name](const auto& each) { return each.first == name; });
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

class Http::Impl {
 public:
  Impl(HttpOptions options, CURLM* multi)
      : options_(std::move(options)), multi_(multi), thread_([this] { run(); }) {}
  ~Impl() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    curl_multi_wakeup(multi_);
    thread_.join();
    curl_multi_cleanup(multi_);
  }

  Ticket send(HttpRequest request, Done done) {
    auto call = std::make_unique<Call>();
    call->begin_at = std::chrono::steady_clock::now() + Milliseconds(request.delay_ms);
    call->request = std::move(request);
    call->done = std::move(done);
    {
      MutexLock lock(mutex_);
      const Ticket ticket = call->ticket = next_++;
      if (!stopping_) {
        arrived_.push_back(std::move(call));
        curl_multi_wakeup(multi_);
        return ticket;
      }
    }
    finish_cancelled(*call);
    return call->ticket;
  }

  void cancel(Ticket ticket) {
    {
      MutexLock lock(mutex_);
      cancelled_.push_back(ticket);
    }
    curl_multi_wakeup(multi_);
  }

  void after(uint64_t delay_ms, std::function<void()> task) {
    {
      MutexLock lock(mutex_);
      timers_.emplace(std::chrono::steady_clock::now() + Milliseconds(delay_ms), std::move(task));
    }
    curl_multi_wakeup(multi_);
  }

  bool here() const { return std::this_thread::get_id() == thread_.get_id(); }

  HttpCounters counters_;

 private:
  void run() {
    std::map<Ticket, std::unique_ptr<Call>> waiting;  // for their time
    std::map<Ticket, std::unique_ptr<Call>> going;
    for (;;) {
      std::vector<std::unique_ptr<Call>> arrived;
      std::vector<Ticket> cancelled;
      bool stopping = false;
      {
        MutexLock lock(mutex_);
        arrived.swap(arrived_);
        cancelled.swap(cancelled_);
        stopping = stopping_;
      }
      for (auto& call : arrived) waiting.emplace(call->ticket, std::move(call));
      for (const Ticket ticket : cancelled) {
        end(waiting, ticket);
        end(going, ticket);
      }
      if (stopping) {
        while (!waiting.empty()) end(waiting, waiting.begin()->first);
        while (!going.empty()) end(going, going.begin()->first);
        return;  // send() takes nothing any more
      }
      const int wait_ms = std::min(run_timers(), begin_what_is_due(waiting, going));
      int running = 0;
      curl_multi_perform(multi_, &running);
      if (collect(going)) continue;  // what is done may have sent more
      curl_multi_poll(multi_, nullptr, 0, wait_ms, nullptr);
    }
  }

  // How long until the next one.
  int run_timers() {
    for (;;) {
      std::function<void()> task;
      {
        MutexLock lock(mutex_);
        if (timers_.empty()) return 1000;
        const Time now = std::chrono::steady_clock::now(), next = timers_.begin()->first;
        if (next > now)
          return static_cast<int>(std::chrono::duration_cast<Milliseconds>(next - now).count()) + 1;
        task = std::move(timers_.begin()->second);
        timers_.erase(timers_.begin());
      }
      task();
    }
  }

  int begin_what_is_due(std::map<Ticket, std::unique_ptr<Call>>& waiting,
                        std::map<Ticket, std::unique_ptr<Call>>& going) {
    const Time now = std::chrono::steady_clock::now();
    Time next = now + Milliseconds(1000);
    for (auto at = waiting.begin(); at != waiting.end();) {
      if (at->second->begin_at > now) {
        next = std::min(next, at->second->begin_at);
        ++at;
        continue;
      }
      std::unique_ptr<Call> call = std::move(at->second);
      at = waiting.erase(at);
      if (begin(*call)) {
        going.emplace(call->ticket, std::move(call));
      } else {
        call->answer.outcome = HttpAnswer::Outcome::unsent;
        call->answer.why = "no memory for another request";
        call->done(std::move(call->answer));
      }
    }
    return static_cast<int>(std::chrono::duration_cast<Milliseconds>(next - now).count()) + 1;
  }

  bool begin(Call& call) {
    const HttpRequest& request = call.request;
    CURL* easy = call.easy = curl_easy_init();
    if (easy == nullptr) return false;
    counters_.requests.add(1);
    for (const auto& [name, value] : request.headers) {
      std::string line = name;
      line.append(value.empty() ? ";" : ": ").append(value);
      call.headers = curl_slist_append(call.headers, line.c_str());
    }
    call.headers =
        curl_slist_append(call.headers, "Expect:");  // it would wait for an interim answer
    curl_easy_setopt(easy, CURLOPT_PRIVATE, &call);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, call.error);
    curl_easy_setopt(easy, CURLOPT_URL, request.url.c_str());
    curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(easy, CURLOPT_PROXY, "");  // else it is looked for in the environment
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
    // Each new connection asks anew and takes an address by lot, so that they spread over all that
    // the endpoint has. A kept answer would send all of them to one.
    curl_easy_setopt(easy, CURLOPT_DNS_SHUFFLE_ADDRESSES, 1L);
    curl_easy_setopt(easy, CURLOPT_DNS_CACHE_TIMEOUT, 0L);
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, buffer_for(request.into.size));
    curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, buffer_for(request.body.size));
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(request.connect_ms));
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME,
                     std::max(1L, static_cast<long>(request.stall_ms / 1000)));
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, call.headers);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, &on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, &call);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, &on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, &call);
    if (!options_.ca_file.empty()) curl_easy_setopt(easy, CURLOPT_CAINFO, options_.ca_file.c_str());
    if (request.once) curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, 1L);
    if (request.method == "HEAD") {
      curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    } else if (request.method == "PUT" || request.method == "POST") {
      curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
      curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request.body.size));
      curl_easy_setopt(easy, CURLOPT_READFUNCTION, &on_send);
      curl_easy_setopt(easy, CURLOPT_READDATA, &call);
      curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, &on_seek);
      curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, request.method.c_str());
    } else {
      curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, request.method.c_str());
    }
    return curl_multi_add_handle(multi_, easy) == CURLM_OK;
  }

  bool collect(std::map<Ticket, std::unique_ptr<Call>>& going) {
    bool any = false;
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      any = true;
      CURL* easy = message->easy_handle;
      const CURLcode code = message->data.result;  // the message is gone once the handle is removed
      void* owner = nullptr;
      curl_easy_getinfo(easy, CURLINFO_PRIVATE, &owner);
      auto at = going.find(static_cast<Call*>(owner)->ticket);
      STOKER_CHECK(at != going.end());
      const std::unique_ptr<Call> call = std::move(at->second);
      going.erase(at);
      tell(*call, code);
      curl_multi_remove_handle(multi_, easy);
      call->done(std::move(call->answer));
    }
    return any;
  }

  void tell(Call& call, CURLcode code) {
    long status = 0, connects = 0;
    curl_off_t received = 0;
    curl_easy_getinfo(call.easy, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(call.easy, CURLINFO_NUM_CONNECTS, &connects);
    curl_easy_getinfo(call.easy, CURLINFO_SIZE_DOWNLOAD_T, &received);
    counters_.connections.add(static_cast<uint64_t>(connects));
    counters_.bytes_received.add(static_cast<uint64_t>(received));
    counters_.bytes_sent.add(call.sent);
    HttpAnswer& answer = call.answer;
    answer.status = static_cast<int>(status);
    using Outcome = HttpAnswer::Outcome;
    if (code == CURLE_OK || call.unwanted) {
      answer.outcome = call.unwanted ? Outcome::cancelled : Outcome::answered;
      return;
    }
    answer.outcome = call.too_long                   ? Outcome::wrong
                     : nothing_sent(code, call.easy) ? Outcome::unsent
                                                     : Outcome::lost;
    answer.untrusted = code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE;
    answer.why = call.too_long           ? "the answer is longer than what was asked for"
                 : call.error[0] != '\0' ? call.error
                                         : curl_easy_strerror(code);
  }

  void end(std::map<Ticket, std::unique_ptr<Call>>& calls, Ticket ticket) {
    const auto at = calls.find(ticket);
    if (at == calls.end()) return;
    const std::unique_ptr<Call> call = std::move(at->second);
    calls.erase(at);
    if (call->easy != nullptr) curl_multi_remove_handle(multi_, call->easy);
    finish_cancelled(*call);
  }

  static void finish_cancelled(Call& call) {
    call.answer.outcome = HttpAnswer::Outcome::cancelled;
    call.answer.why = "it was cancelled";
    call.done(std::move(call.answer));
  }

  const HttpOptions options_;
  CURLM* const multi_;
  Mutex mutex_;
  std::vector<std::unique_ptr<Call>> arrived_ GUARDED_BY(mutex_);
  std::vector<Ticket> cancelled_ GUARDED_BY(mutex_);
  std::multimap<Time, std::function<void()>> timers_ GUARDED_BY(mutex_);
  Ticket next_ GUARDED_BY(mutex_) = 1;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last member
};

Http::Http(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Http::~Http() = default;

Result<std::unique_ptr<Http>> Http::make(HttpOptions options) {
  static const CURLcode ready =
      curl_global_init(CURL_GLOBAL_DEFAULT);  // once a process, before any thread uses it
  CURLM* multi = ready == CURLE_OK ? curl_multi_init() : nullptr;
  if (multi == nullptr)
    return fail(Code::io, "the HTTP library (libcurl) cannot be started; free some memory");
  curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, static_cast<long>(options.connections));
  curl_multi_setopt(multi, CURLMOPT_PIPELINING, static_cast<long>(CURLPIPE_NOTHING));
  return std::unique_ptr<Http>(new Http(std::make_unique<Impl>(std::move(options), multi)));
}

Http::Ticket Http::send(HttpRequest request, Done done) {
  return impl_->send(std::move(request), std::move(done));
}
void Http::cancel(Ticket ticket) { impl_->cancel(ticket); }
void Http::after(uint64_t delay_ms, std::function<void()> task) {
  impl_->after(delay_ms, std::move(task));
}
bool Http::here() const { return impl_->here(); }
const HttpCounters& Http::counters() const { return impl_->counters_; }

}  // namespace stoker::net
