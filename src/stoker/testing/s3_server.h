// The small S3 server of tests/python/s3_server.py as a process of its own, with faults on order.
#pragma once

#include <gtest/gtest.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "stoker/base/future.h"
#include "stoker/net/http.h"

namespace stoker {

class S3Server {
 public:
  S3Server() {
    int in[2], out[2];
    STOKER_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    std::string python = "python3", script = STOKER_SOURCE_DIR "/tests/python/s3_server.py";
    std::array<char*, 3> arguments = {python.data(), script.data(), nullptr};
    STOKER_CHECK(posix_spawnp(&process_, "python3", &actions, nullptr, arguments.data(), environ) ==
                 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(in[0]);
    ::close(out[1]);
    stdin_ = in[1];
    std::string line;
    for (char c = 0; ::read(out[0], &c, 1) == 1 && c != '\n';) line += c;
    ::close(out[0]);
    endpoint_ = "http://127.0.0.1:" + line;
    http_ = std::move(*net::Http::make({}));
    setenv("AWS_ACCESS_KEY_ID", "AKIDTEST", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "secret/of+the=test", 1);
    unsetenv("AWS_SESSION_TOKEN");
    std::string state = ::testing::TempDir() + "/stoker_s3_state_XXXXXX";
    STOKER_CHECK(mkdtemp(state.data()) != nullptr);
    state_ = state;
    setenv("XDG_STATE_HOME", state.c_str(), 1);
  }
  ~S3Server() {
    ::close(stdin_);  // it ends with that
    waitpid(process_, nullptr, 0);
    std::filesystem::remove_all(state_);
  }
  S3Server(const S3Server&) = delete;
  S3Server& operator=(const S3Server&) = delete;

  std::string store(const std::string& options = "") const {
    return "s3://bucket/some/prefix?endpoint=" + endpoint_ + "&patience=20" + options;
  }
  // Sets the faults anew and forgets the log.
  void control(const nlohmann::json& control) { tell("/_control", control); }
  // Makes so many empty objects.
  void fill(const std::string& prefix, size_t count) {
    tell("/_fill", {{"prefix", "some/prefix/" + prefix}, {"count", count}});
  }
  void fault(const nlohmann::json& fault) { control({{"faults", {fault}}}); }
  // [method, path, status, address, host, region] of each request that was answered since then.
  nlohmann::json log() { return nlohmann::json::parse(ask("GET", "/_log", {}).body); }
  // {arrived, peak}: requests since then, answered or not, and the most at once.
  nlohmann::json seen() { return nlohmann::json::parse(ask("GET", "/_seen", {}).body); }
  const std::string& endpoint() const { return endpoint_; }
  // Where writers write down their uploads.
  std::filesystem::path uploads() const { return state_ / "stoker/uploads"; }
  size_t count(const std::string& method, const std::string& part) {
    size_t found = 0;
    for (const auto& each : log())
      found +=
          each[0] == method && each[1].get<std::string>().find(part) != std::string::npos ? 1 : 0;
    return found;
  }

 private:
  void tell(const std::string& path, const nlohmann::json& what) {
    std::string body = what.dump();
    EXPECT_EQ(ask("POST", path, {reinterpret_cast<std::byte*>(body.data()), body.size()}).status,
              200);
  }
  net::HttpAnswer ask(const std::string& method, const std::string& path, Slice body) {
    auto promise = std::make_shared<Promise<net::HttpAnswer>>();
    const auto future = promise->future();
    net::HttpRequest request;
    request.method = method;
    request.url = endpoint_ + path;
    request.body = body;
    http_->send(std::move(request),
                [promise](net::HttpAnswer answer) { promise->complete(std::move(answer)); });
    return *future.wait();
  }

  std::filesystem::path state_;
  pid_t process_ = -1;
  int stdin_ = -1;
  std::string endpoint_;
  std::unique_ptr<net::Http> http_;
};

}  // namespace stoker
