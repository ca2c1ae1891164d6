#include "stoker/store/coded/write/writer.h"

#include <algorithm>
#include <chrono>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

// without a commit, before the background works by itself
constexpr auto kIdle = std::chrono::milliseconds(100);

}  // namespace

Writer::Writer(const Shape& shape, Committer& committer, Background& background, bool by_itself)
    : shape_(shape),
      committer_(committer),
      background_(background),
      by_itself_(by_itself),
      thread_([this] { run(); }) {}

Writer::~Writer() {
  stop();
  thread_.join();
}

void Writer::stop() {
  const MutexLock lock(mutex_);
  stopping_ = true;
  queued_.notify_all();
}

Future<Version> Writer::commit(std::shared_ptr<TransactionState> state) {
  Request request;
  request.commit.state = std::move(state);
  Future<Version> future = request.commit.committed.future();
  push(std::move(request));
  return future;
}

Future<void> Writer::work(std::function<Status()> work) {
  Request request;
  request.work = std::move(work);
  Future<void> future = request.done.future();
  push(std::move(request));
  return future;
}

void Writer::push(Request request) {
  const MutexLock lock(mutex_);
  queue_.push_back(std::move(request));
  queued_.notify_all();
}

void Writer::run() {
  for (;;) {
    std::vector<Request> batch;
    std::optional<Job> job;
    bool idle = false;
    uint64_t bytes = 0;  // in each log
    {
      MutexLock lock(mutex_);
      const auto called = [this]() REQUIRES(mutex_) { return stopping_ || !queue_.empty(); };
      const auto ready = [&, this]() REQUIRES(mutex_) { return called() || !jobs_.empty(); };
      if (!jobs_.empty()) {
        if (const uint64_t wait_ns = jobs_.front().pace->wait_ns(); wait_ns > 0) {
          // by then nobody may use it any more
          queued_.wait_for(
              lock, std::min<std::chrono::nanoseconds>(std::chrono::nanoseconds(wait_ns), kIdle),
              called);
        }
      } else if (by_itself_) {
        idle = !queued_.wait_for(lock, kIdle, ready);
      } else {
        queued_.wait(lock, ready);
      }
      if (queue_.empty() && stopping_) break;
      while (!queue_.empty()) {
        Request& next = queue_.front();
        if (!next.commit.state && !batch.empty()) break;
        if (!batch.empty() && !next.commit.state->required.empty())
          break;  // its conditions are of what the commits before it leave
        if (next.commit.state) bytes += committer_.log_bytes(*next.commit.state);
        if (!batch.empty() && bytes > shape_.segment_bytes / 2) break;  // a frame holds a batch
        const bool alone = !next.commit.state;
        batch.push_back(std::move(next));
        queue_.pop_front();
        if (alone) break;
      }
      if (!jobs_.empty()) {
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
    }
    if (!batch.empty()) serve(std::move(batch));
    const auto waits = [&] {
      const MutexLock lock(mutex_);
      return stopping_ || !queue_.empty() || !jobs_.empty();
    };
    if (job) {
      work_on(*job);
      if (by_itself_) background_.relieve_log(bytes);
    } else if (idle) {
      while (!waits() && background_.step(true, 0)) {
      }
    } else if (by_itself_) {
      background_.step(false, bytes);
    }
  }
  std::deque<Job> left;
  {
    const MutexLock lock(mutex_);
    STOKER_CHECK(stopping_);
    left.swap(jobs_);
  }
  for (Job& job : left)
    job.done.complete(fail(Code::cancelled, "the store was closed before this was done"));
}

void Writer::serve(std::vector<Request> batch) {
  if (batch.size() == 1 && !batch[0].commit.state) {
    batch[0].done.complete(batch[0].work());
    return;
  }
  std::vector<CommitRequest> commits;
  commits.reserve(batch.size());
  for (Request& request : batch) {
    STOKER_CHECK(request.commit.state && !request.work);
    commits.push_back(std::move(request.commit));
  }
  committer_.commit(std::move(commits));
}

// A step if its rate allows; then it stands first in the line again.
void Writer::work_on(Job& job) {
  Result<bool> more = true;
  if (job.pace->wait_ns() == 0) more = job.step();
  if (!more || !*more) {
    job.done.complete(more ? Status() : Status(more.error()));
    return;
  }
  const MutexLock lock(mutex_);
  jobs_.push_front(std::move(job));
}

Future<void> Writer::add_job(std::function<Result<bool>()> step, Pace& pace) {
  Job job{std::move(step), &pace, {}};
  Future<void> future = job.done.future();
  const MutexLock lock(mutex_);
  jobs_.push_back(std::move(job));
  queued_.notify_all();
  return future;
}

}  // namespace stoker::coded
