#include "stoker/store/remote/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <list>
#include <thread>
#include <utility>

#include "stoker/store/remote/session.h"

namespace stoker {
namespace remote {
namespace {

// The socket's file, for the life of this object: nobody else serves there.
class Listener {
 public:
  static Result<std::unique_ptr<Listener>> make(const std::string& path, uint32_t mode) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.empty() || path.size() >= sizeof address.sun_path)
      return fail(Code::invalid_argument, "the path of a socket has 1 to {} bytes; '{}' has {}",
                  sizeof address.sun_path - 1, path, path.size());
    std::memcpy(address.sun_path, path.data(), path.size());
    std::unique_ptr<Listener> made(new Listener(path));
    made->lock_ = Fd(open((path + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    if (!made->lock_) return fail(errno, "cannot make '{}.lock'", path);
    if (flock(made->lock_.get(), LOCK_EX | LOCK_NB) != 0)
      return fail(Code::busy,
                  "another process serves at '{}' already; end it, or name another socket", path);
    struct stat there {};
    if (lstat(path.c_str(), &there) == 0) {
      if (!S_ISSOCK(there.st_mode))
        return fail(Code::already_exists, "'{}' is there, and is not a socket; name another path",
                    path);
      unlink(path.c_str());  // of a server that died: its lock was free
    }
    made->socket_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!made->socket_ ||
        bind(made->socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      return fail(errno, "cannot make the socket '{}'", path);
    made->bound_ = true;
    // Nobody can connect before it listens, hence before the mode is right.
    if (chmod(path.c_str(), static_cast<mode_t>(mode)) != 0 ||
        listen(made->socket_.get(), 128) != 0)
      return fail(errno, "cannot listen at '{}'", path);
    return made;
  }
  ~Listener() {
    if (bound_) unlink(path_.c_str());
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int get() const { return socket_.get(); }

 private:
  explicit Listener(std::string path) : path_(std::move(path)) {}
  const std::string path_;
  Fd lock_, socket_;
  bool bound_ = false;
};

class ServerOf final : public Server {
 public:
  ServerOf(Store& store, const Runtime& runtime, const ServeOptions& options,
           std::unique_ptr<Listener> listener, std::unique_ptr<Blocks> blocks)
      : served_{store, runtime.budget, options, std::move(blocks), {}, {}, {}, {}, {}},
        listener_(std::move(listener)),
        wake_(eventfd(0, EFD_CLOEXEC)),
        thread_([this] { listen_for_clients(); }) {}

  ~ServerOf() override {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
    thread_.join();
    for (const Client& client : clients_)
      if (const auto session = client.session.lock()) session->end();
    for (Client& client : clients_) client.thread.join();
    // What the store does for them holds the sessions.
    while (served_.sessions_ended.get() != begun_)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  ServeCounts counts() const override {
    const Blocks::Counts blocks = served_.blocks->counts();
    ServeCounts counts;
    counts.clients = begun_ - served_.sessions_ended.get();
    counts.transactions = served_.transactions_begun.get() - served_.transactions_ended.get();
    counts.requests = served_.requests.get();
    counts.lists = served_.lists.get();
    counts.hits = blocks.hits;
    counts.fills = blocks.fills;
    counts.pins = blocks.pins;
    return counts;
  }

 private:
  struct Client {
    std::weak_ptr<Session> session;
    std::thread thread = {};
    std::shared_ptr<std::atomic<bool>> ended = std::make_shared<std::atomic<bool>>(false);
  };

  void listen_for_clients() {
    for (;;) {
      pollfd polled[2] = {{listener_->get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      (void)poll(polled, 2, 1000);
      if ((polled[1].revents & POLLIN) != 0) return;
      clients_.remove_if([](Client& client) {
        if (!*client.ended) return false;
        client.thread.join();
        return true;
      });
      if ((polled[0].revents & POLLIN) == 0) continue;
      Fd socket(accept4(listener_->get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) {
        // Without descriptors it would be asked again at once.
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM)
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        continue;
      }
      if (clients_.size() >= served_.options.clients) {
        const Error full = fail(
            Code::busy,
            "{} clients use '{}', and no more are served: give `stoker serve` a larger --clients",
            clients_.size(), served_.options.path);
        if (auto message = outgoing({}, encode(Answer{.error = full})))
          (void)send(socket.get(), *message, false);
        continue;
      }
      ++begun_;
      auto session = std::make_shared<Session>(served_, std::move(socket));
      Client& client = clients_.emplace_back(Client{session});
      client.thread = std::thread([session = std::move(session), ended = client.ended]() mutable {
        session->run();
        session.reset();
        *ended = true;
      });
    }
  }

  Served served_;
  const std::unique_ptr<Listener> listener_;
  const Fd wake_;
  std::atomic<uint64_t> begun_{0};
  std::list<Client> clients_;  // of the thread, and of the destructor after it
  std::thread thread_;
};

}  // namespace
}  // namespace remote

Result<std::unique_ptr<Server>> serve(Store& store, const Runtime& runtime,
                                      const ServeOptions& options) {
  STOKER_ASSIGN(auto listener, remote::Listener::make(options.path, options.mode));
  STOKER_ASSIGN(auto blocks,
                remote::Blocks::make(options.memory_bytes, options.block_bytes, runtime.budget));
  return std::unique_ptr<Server>(
      new remote::ServerOf(store, runtime, options, std::move(listener), std::move(blocks)));
}

}  // namespace stoker
