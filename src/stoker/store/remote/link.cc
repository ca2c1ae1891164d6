#include "stoker/store/remote/link.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

namespace stoker::remote {
namespace {

constexpr size_t kMemory = 16 * kMiB;
constexpr size_t kGranule = 64 * kKiB;
constexpr size_t kAtOnce = kUnderWayMax / 2;  // so the server always reads
constexpr size_t kUnpinAt = 16;
// How long run() leaves the socket to those who wait, while none of them comes.
constexpr std::chrono::milliseconds kAside{2};

}  // namespace

Link::Link(Fd socket, std::string path, Fd memory, Mapping mapping)
    : socket_(std::move(socket)),
      wake_(eventfd(0, EFD_CLOEXEC)),
      turn_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      path_(std::move(path)),
      memory_fd_(std::move(memory)),
      memory_(std::move(mapping)),
      taken_(kMemory / kGranule) {}

Result<std::shared_ptr<Link>> Link::make(const std::string& path, bool read_only) {
  STOKER_ASSIGN(Fd socket, connect_to(path));
  STOKER_ASSIGN(Fd memory, make_memory("stoker client", kMemory));
  STOKER_ASSIGN(Mapping mapping, Mapping::make(memory.get(), 0, kMemory, Mapping::How::shared));
  auto link =
      std::make_shared<Link>(std::move(socket), path, std::move(memory), std::move(mapping));
  if (!link->wake_ || !link->turn_) return fail(errno, "cannot make an eventfd");
  STOKER_TRY(link->greet(read_only));
  return link;
}

Status Link::greet(bool read_only) {
  Request request{.kind = Kind::hello};
  request.bytes = kMemory;
  request.number = read_only ? 1 : 0;
  STOKER_ASSIGN(const Outgoing message,
                outgoing({Kind::hello, false, 0}, encode(request), Fd(dup(memory_fd_.get()))));
  const bool sent = send(socket_.get(), message, true) == Sent::all;
  pollfd polled{socket_.get(), POLLIN, 0};
  constexpr int kPatience = 30'000;
  int ready = 0;
  do {
    ready = sent ? poll(&polled, 1, kPatience) : 1;
  } while (ready < 0 && errno == EINTR);
  if (ready <= 0) return gone("it does not answer");
  auto packet = receive(socket_.get(), kAnswerMax);
  // A server that closes at once has still said why.
  if (!packet && packet.error().sys_errno == ECONNRESET)
    packet = receive(socket_.get(), kAnswerMax);
  if (!packet && packet.error().code == Code::mismatch) return packet.error();
  if (!packet || !*packet) return gone("it closed the connection");
  STOKER_ASSIGN(const Answer answer, decode_answer(std::as_bytes(std::span((*packet)->body))));
  if (answer.error) return *answer.error;
  STOKER_ASSIGN(welcome_, Welcome::decode(answer.blob));
  blocks_fd_ = std::move((*packet)->fd);
  STOKER_ASSIGN(const uint64_t bytes, check_memory(blocks_fd_.get(), UINT64_MAX / 2));
  if (bytes != welcome_.blocks_bytes)
    return fail(Code::corruption,
                "the shared memory of `stoker serve` has another size than it said; restart "
                "`stoker serve`, with the same version of Stoker as here");
  STOKER_ASSIGN(blocks_, Mapping::make(blocks_fd_.get(), 0, bytes, Mapping::How::read_only));
  return {};
}

Error Link::gone(const char* what) const {
  return fail(
      Code::unavailable,
      "the server of 'unix:{}' is gone: {}; try again when it serves, and begin transactions again",
      path_, what);
}

bool Link::waiter_receives() const {
  MutexLock lock(mutex_);
  return waiter_;
}

uint64_t Link::received_by_waiters() const {
  MutexLock lock(mutex_);
  return received_;
}

bool Link::lost() const {
  MutexLock lock(mutex_);
  return lost_;
}

uint64_t Link::place_of(const std::byte* memory) const {
  return static_cast<uint64_t>(memory - memory_.data());
}

bool Link::lent(const Span& span) const {
  return span.slot != kNoSlot && span.offset <= blocks_.size() &&
         span.bytes <= blocks_.size() - span.offset;
}

void Link::run() {
  heard_ = pinged_ = std::chrono::steady_clock::now();
  while (wait_for_one()) {
    {
      MutexLock lock(mutex_);
      if (receiving_) {
        aside_ = true;
        continue;
      }
      receiving_ = true;
    }
    const Received received = receive_one();
    MutexLock lock(mutex_);
    receiving_ = false;
    // Who waited for it was faster: the next one that is waited for is none of run()'s, too.
    if (received == Received::none) aside_ = under_way_.size() + queue_.size() <= 1;
    if (received == Received::end) break;
  }
  lose();
  MutexLock lock(mutex_);
  left_.wait(lock, [this] { return !receiving_; });
  over_ = true;
  if (lent_ == 0) shutdown(socket_.get(), SHUT_RDWR);
}

// For run(): something is there to be received. False: the link is lost.
bool Link::wait_for_one() {
  using Clock = std::chrono::steady_clock;
  const auto heartbeat = std::chrono::milliseconds(welcome_.heartbeat_ms);
  bool long_wait = false;  // of one who waits, and calls attend() when it ends
  for (uint64_t received = 0;;) {
    bool aside = false, waiter = false;
    {
      MutexLock lock(mutex_);
      aside = aside_;
      waiter = waiter_;
      long_wait = long_wait && waiter && received == received_;
      received = received_;
    }
    // The end of the connection is told whatever is asked for.
    pollfd polled[3] = {{socket_.get(), static_cast<short>(aside ? 0 : POLLIN), 0},
                        {wake_.get(), POLLIN, 0},
                        {turn_.get(), POLLIN, 0}};
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(pinged_ + heartbeat / 3 -
                                                                      Clock::now());
    if (aside && !long_wait) left = std::min(left, kAside);
    const int ready = poll(polled, 3, static_cast<int>(std::max<int64_t>(0, left.count() + 1)));
    if (ready < 0 && errno != EINTR) return false;
    if (polled[1].revents != 0) return false;
    uint64_t turn = 0;
    if (polled[2].revents != 0) (void)!::read(turn_.get(), &turn, sizeof turn);
    if (Clock::now() >= pinged_ + heartbeat / 3) {
      if (Clock::now() > heard_.load() + heartbeat && ready == 0) return false;
      pinged_ = Clock::now();
      ping();
      MutexLock lock(mutex_);
      aside_ = false;  // for its answer
    }
    if (ready > 0 && polled[0].revents != 0) {
      if (!aside) return true;
      MutexLock lock(mutex_);
      aside_ = false;  // the connection ended
      continue;
    }
    if (!aside || ready != 0) continue;
    MutexLock lock(mutex_);
    if (!receiving_ && received == received_) aside_ = false;
    long_wait = waiter && waiter_ && received == received_;
  }
}

Link::Received Link::receive_one() {
  auto packet = receive(socket_.get(), kAnswerMax, false);
  if (!packet && packet.error().sys_errno == EAGAIN) return Received::none;
  if (!packet || !*packet || (*packet)->header.kind != Kind::answer) return Received::end;
  heard_ = std::chrono::steady_clock::now();
  auto answer = decode_answer(std::as_bytes(std::span((*packet)->body)));
  if (!answer) return Received::end;
  UnderWay one;
  {
    MutexLock lock(mutex_);
    const auto at = under_way_.find((*packet)->header.id);
    if (at == under_way_.end()) return Received::one;
    one = std::move(at->second);
    under_way_.erase(at);
  }
  const auto error = answer->error;
  finish(one, error ? Result<Answer>(*error) : Result<Answer>(std::move(*answer)));
  pump();
  return Received::one;
}

void Link::receive_until(const std::function<bool()>& done, Time deadline) {
  using Clock = std::chrono::steady_clock;
  if (made_ != forks()) return;
  const auto begun = Clock::now();
  {
    MutexLock lock(mutex_);
    if (lost_ || receiving_) return;
    if (under_way_.size() + queue_.size() != 1) return attend();
    receiving_ = waiter_ = true;
  }
  bool going = true;
  while (going && !done()) {
    pollfd polled[2] = {{socket_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    int patience = -1;
    if (deadline != Time::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() <= 0) break;
      patience = static_cast<int>(std::min<int64_t>(left.count(), 1'000'000));
    }
    if (poll(polled, 2, patience) < 0 && errno != EINTR) break;
    if (polled[1].revents != 0) break;
    if (polled[0].revents != 0) going = receive_one() != Received::end;
  }
  if (!going) lose();
  MutexLock lock(mutex_);
  receiving_ = waiter_ = false;
  ++received_;
  // After a long wait run() looks no more whether anybody comes.
  if (!under_way_.empty() || !queue_.empty() || Clock::now() > begun + kAside) attend();
  if (lost_) left_.notify_all();
}

void Link::attend() {
  if (!std::exchange(aside_, false)) return;
  const uint64_t turn = 1;
  (void)!::write(turn_.get(), &turn, sizeof turn);
}

// Waits for room until the link is lost; run() sees that the other side closed it.
void Link::send_out(const Outgoing& message) {
  while (send(socket_.get(), message, false) == Sent::later) {
    pollfd polled[2] = {{socket_.get(), POLLOUT, 0}, {wake_.get(), POLLIN, 0}};
    (void)poll(polled, 2, -1);
    if (polled[1].revents != 0) return;
    // Room there is, but too many descriptors are on their way.
    if (send(socket_.get(), message, false) != Sent::later) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Link::lend() {
  MutexLock lock(mutex_);
  ++lent_;
}

void Link::give_back(const Span& span) {
  if (made_ != forks()) return;  // it is the parent's
  {
    MutexLock lock(mutex_);
    --lent_;
    if (over_ && lent_ == 0) shutdown(socket_.get(), SHUT_RDWR);
    if (lost_) return;
  }
  unpin({span});
}

// Past the queue, which may wait for a slow store for longer than the heartbeat. Where there is no
// room for it now, others are sending, or the server is silent, which run() finds out.
void Link::ping() {
  if (!sending_.try_lock()) return;
  if (const auto message = outgoing({Kind::ping, false, 0}, encode(Request{.kind = Kind::ping})))
    (void)send(socket_.get(), *message, false);
  sending_.unlock();
}

void Link::lose() {
  std::unordered_map<uint64_t, UnderWay> under_way;
  std::deque<Call> queue;
  {
    MutexLock lock(mutex_);
    lost_ = true;
  }
  const uint64_t wake = 1;
  (void)!::write(wake_.get(), &wake, sizeof wake);  // whoever is sending is done soon
  {
    MutexLock order(sending_);
    MutexLock lock(mutex_);
    under_way.swap(under_way_);
    queue.swap(queue_);
  }
  for (auto& [id, one] : under_way) {
    Error error = gone("it ended, or the connection broke");
    if (changes_the_store(one.call.request.kind)) {
      error.code = Code::in_doubt;
      error.what =
          "the server of 'unix:" + path_ +
          "' is gone, and its answer is lost: the change may be there or not. Look before you "
          "make it again";
    }
    one.call.after(error, nullptr);
  }
  for (Call& call : queue) call.after(gone("nothing was sent"), nullptr);
}

void Link::finish(UnderWay& one, const Result<Answer>& answer) {
  one.call.after(answer, memory_.data() + one.place);
  MutexLock lock(mutex_);
  give_memory(one.place, one.call.memory);
}

void Link::ask(Call call) {
  if (!take(call)) {
    call.after(gone("the connection is closed"), nullptr);
    return;
  }
  pump();
}

// False where the connection is lost, or of another process: the call stays as it is.
bool Link::take(Call& call) {
  if (made_ != forks()) return false;
  MutexLock lock(mutex_);
  if (lost_) return false;
  if (!WillReceive::here()) attend();
  queue_.push_back(std::move(call));
  return true;
}

void Link::pump() {
  MutexLock order(sending_);
  for (;;) {
    Request request;
    std::function<void(std::byte*)> before;
    uint64_t id = 0;
    size_t place = 0;
    std::vector<uint32_t> unpinned;
    bool going = false;
    {
      MutexLock lock(mutex_);
      if (unpinned_.size() >= kUnpinAt || (short_of_pins_ && !queue_.empty()))
        unpinned.swap(unpinned_);
      going = !lost_ && !queue_.empty() && under_way_.size() < kAtOnce &&
              take_memory(queue_.front().memory, place);
      if (going) {
        Call call = std::move(queue_.front());
        queue_.pop_front();
        request = std::move(call.request);
        before = std::move(call.before);
        call.request.kind = request.kind;
        id = next_id_++;
        if (request.kind != Kind::abandon) under_way_.emplace(id, UnderWay{std::move(call), place});
      }
    }
    if (!unpinned.empty()) {
      const Request pins{.kind = Kind::unpin, .numbers = std::move(unpinned)};
      if (const auto message = outgoing({Kind::unpin, false, 0}, encode(pins))) send_out(*message);
    }
    if (!going) return;
    if (before) before(memory_.data() + place);
    request.place = place;
    const auto message = outgoing({request.kind, false, id}, encode(request));
    if (message) {
      send_out(*message);
      continue;
    }
    UnderWay refused;
    {
      MutexLock lock(mutex_);
      refused = std::move(under_way_.at(id));
      under_way_.erase(id);
    }
    finish(refused, message.error());
  }
}

void Link::unpin(const std::vector<Span>& spans) {
  if (made_ != forks()) return;  // it is the parent's
  bool enough = false;
  {
    MutexLock lock(mutex_);
    for (const Span& span : spans) {
      if (span.slot != kNoSlot)
        unpinned_.push_back(span.slot);
      else if (!unpinned_.empty())
        short_of_pins_ = true;
    }
    enough = unpinned_.size() >= kUnpinAt;
  }
  if (enough) pump();
}

bool Link::take_memory(size_t bytes, size_t& place) {
  const size_t need = align_up(bytes, kGranule) / kGranule;
  size_t run = 0;
  for (size_t at = 0; need > 0 && at < taken_.size(); ++at) {
    run = taken_[at] ? 0 : run + 1;
    if (run < need) continue;
    const size_t first = at + 1 - need;
    std::fill_n(taken_.begin() + static_cast<ptrdiff_t>(first), need, true);
    place = first * kGranule;
    return true;
  }
  return need == 0;
}

void Link::give_memory(size_t place, size_t bytes) {
  const size_t count = align_up(bytes, kGranule) / kGranule;
  std::fill_n(taken_.begin() + static_cast<ptrdiff_t>(place / kGranule), count, false);
}

}  // namespace stoker::remote
