#include "stoker/store/coded/file_shard.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

// What the Loop holds of a request. Both go by themselves when it is done.
struct ReadFlight {
  Op op;
  ShardRead& request;

  static void on_done(Op& op) noexcept {
    const std::unique_ptr<ReadFlight> flight(static_cast<ReadFlight*>(op.context));
    ShardRead& request = flight->request;
    request.status = op.result ? Status() : Status(op.result.error());
    request.done(request);
  }
};

// Steps: the first wave, its flush, the second wave, and so on.
class PutFlight {
 public:
  PutFlight(Loop& loop, FileId file, ShardPut& request)
      : loop_(loop), file_(file), request_(request) {}

  // The ops of the next step that has any; empty: that was the last.
  std::vector<Op*> next() {
    ops_.clear();
    const size_t waves = std::max<size_t>(1, request_.waves.size());
    for (; ops_.empty() && step_ < 2 * waves; ++step_) {
      const size_t wave = step_ / 2;
      if (step_ % 2 != 0) {
        if (wave + 1 < waves || request_.flush) add(Op::Kind::sync, 0, {});
      } else if (wave < request_.waves.size()) {
        for (const auto& [offset, from] : request_.waves[wave]) add(Op::Kind::write, offset, from);
      }
    }
    left_ = ops_.size();
    std::vector<Op*> ops;
    ops.reserve(ops_.size());
    for (Op& op : ops_) ops.push_back(&op);
    return ops;
  }

  static void on_done(Op& op) noexcept {
    auto* const flight = static_cast<PutFlight*>(op.context);
    if (!op.result && flight->request_.status) flight->request_.status = op.result.error();
    if (--flight->left_ == 0) flight->stepped();
  }

 private:
  void add(Op::Kind kind, uint64_t offset, Slice bytes) {
    Op& op = ops_.emplace_back();
    op.kind = kind;
    op.priority = request_.priority;
    op.file = file_;
    op.offset = offset;
    op.bytes = bytes;
    op.done = &PutFlight::on_done;
    op.context = this;
  }

  // On the Loop's thread, like all that ends here: only one at a time.
  void stepped() {
    if (request_.status) {
      const std::vector<Op*> ops = next();
      if (!ops.empty()) request_.status = loop_.submit(ops);
      if (!ops.empty() && request_.status) return;
    }
    const std::unique_ptr<PutFlight> self(this);
    request_.done(request_);
  }

  Loop& loop_;
  const FileId file_;
  ShardPut& request_;
  std::deque<Op> ops_;  // of the step that is under way; do not move
  size_t step_ = 0, left_ = 0;
};

}  // namespace

void Plug::release() {
  const std::vector<Op*> ops = std::exchange(ops_, {});
  if (ops.empty()) return;
  // Busy, the only error there is: the queue is full of others' work, which ends.
  while (!loop_.submit(ops)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void FileShard::read(ShardRead& request, Plug& plug) {
  STOKER_CHECK(request.done != nullptr);
  auto* const flight = new ReadFlight{{}, request};
  flight->op.kind = Op::Kind::read;
  flight->op.priority = request.priority;
  flight->op.file = file_;
  flight->op.offset = request.offset;
  flight->op.bytes = request.into;
  flight->op.done = &ReadFlight::on_done;
  flight->op.context = flight;
  plug.hold(flight->op);
}

void FileShard::put(ShardPut& request, Plug& plug) {
  auto flight = std::make_unique<PutFlight>(loop_, file_, request);
  request.status = {};
  const std::vector<Op*> ops = flight->next();
  // what writes nothing and makes nothing durable would never be done
  STOKER_CHECK(request.done != nullptr && !ops.empty());
  for (Op* op : ops) plug.hold(*op);
  static_cast<void>(flight.release());  // until it is done
}

}  // namespace stoker::coded
