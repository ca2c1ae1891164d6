// Http: requests over HTTP/1.1 with TLS, many at once, on one thread (libcurl's multi interface).
//
// It moves bytes and tells what came. It follows no redirect, repeats nothing and reads no
// environment: whoever knows what a request means decides.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stoker/base/counters.h"
#include "stoker/base/result.h"
#include "stoker/memory/slice.h"

namespace stoker::net {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method = "GET";
  std::string url = {};  // complete and encoded; taken as it is
  Headers headers = {};
  Slice body = {};  // of PUT and POST; alive until done
  // Where the body of a 2xx answer goes; alive until done. More than fits is an error.
  Slice into = {};
  // Takes a new connection: on a kept one the library would send it again if that broke at the
  // wrong moment.
  bool once = false;
  uint64_t connect_ms = 5'000;
  uint64_t stall_ms = 20'000;  // without a byte, either way
  uint64_t delay_ms = 0;       // before it begins
  // On the thread of the Http, before the first byte goes `into`: false ends it as cancelled. So
  // two requests may have one memory.
  std::function<bool()> lands = {};
};

struct HttpAnswer {
  enum class Outcome : uint8_t {
    answered,  // with `status`, and all of the body that its length announced
    unsent,    // nothing of the request has left this machine
    lost,      // anything else: the server may have done what was asked
    wrong,     // the answer broke a rule: longer than announced or than what there was room for
    cancelled,
  };
  Outcome outcome = Outcome::lost;
  int status = 0;          // 0: none came
  Headers headers = {};    // names in lower case
  std::string body = {};   // of an answer that did not go `into`, its first 16 MiB
  size_t landed = 0;       // bytes that are in `into`, from its start
  std::string why = {};    // of what was not answered: the library's sentence, without the URL
  bool untrusted = false;  // unsent, as the server's certificate is not to be trusted

  std::string_view header(std::string_view name) const;  // empty if it has none
};

struct HttpOptions {
  std::string ca_file = {};  // empty: the system's certificates
  size_t connections = 64;   // kept at most
};

struct HttpCounters {
  Counter requests, connections, bytes_received, bytes_sent;
};

// Any thread, but from within `done` nothing that waits.
class Http {
 public:
  using Done = std::function<void(HttpAnswer)>;  // on the thread of this Http, once
  using Ticket = uint64_t;

  static Result<std::unique_ptr<Http>> make(HttpOptions options);
  ~Http();  // ends what is under way as cancelled
  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;

  Ticket send(HttpRequest request, Done done);
  void cancel(Ticket ticket);  // its `done` hears of it; too late: nothing
  // On the thread of this Http, unless it ends before.
  void after(uint64_t delay_ms, std::function<void()> task);
  const HttpCounters& counters() const;
  bool here() const;  // the calling thread is the one of this Http

 private:
  class Impl;
  explicit Http(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace stoker::net
