// NamespaceFiles: an engine on a raw NVMe namespace as a folder of named files, so that the suite
// of all engines runs over it unchanged. A file is a range of the namespace.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/mutex.h"
#include "stoker/io/engine.h"

namespace stoker {

class NamespaceFiles final : public Engine {
 public:
  // What the namespace holds is lost: it is zeros from now on.
  static Result<std::unique_ptr<Engine>> make(std::unique_ptr<Engine> engine,
                                              const std::string& target) {
    STOKER_ASSIGN(const FileInfo whole, engine->open({.path = target}));
    Op trim;
    trim.kind = Op::Kind::trim;
    trim.file = whole.id;
    trim.bytes = Slice{nullptr, whole.bytes};
    trim.done = [](Op&) noexcept {};
    Op* ops[] = {&trim};
    if (engine->submit(ops) != 1) return fail(Code::busy, "the engine takes no op");
    while (engine->poll(1'000'000'000) == 0) {
    }
    if (!trim.result) return trim.result.error();
    STOKER_TRY(engine->close(whole.id));
    return std::unique_ptr<Engine>(new NamespaceFiles(std::move(engine), target, whole.bytes));
  }

  EngineTraits traits() const override { return engine_->traits(); }

  Result<FileInfo> open(const OpenFile& request) override {
    if (request.create && !request.write)
      return fail(Code::invalid_argument, "what is to be created must be written");
    MutexLock lock(mutex_);
    auto found = files_.find(request.path);
    if (found == files_.end() && !request.create)
      return fail(Code::not_found, "there is no '{}'", request.path);
    const bool empty = found == files_.end() || found->second.bytes == 0;
    if (empty && request.create) {
      const Range range{free_, request.reserve_bytes};
      if (range.bytes > bytes_ - free_) return fail(Code::out_of_space, "it does not fit");
      free_ += range.bytes;
      found = files_.insert_or_assign(request.path, range).first;
    }
    const Range range = found->second;
    const std::string part = "@" + std::to_string(range.at) + "+" +
                             std::to_string(std::max<uint64_t>(range.bytes, 4096));
    auto info = engine_->open({.path = target_ + part, .write = request.write});
    if (info) info->bytes = range.bytes;
    return info;
  }

  Status close(FileId file) override { return engine_->close(file); }
  Status adopt(const Arena& arena) override { return engine_->adopt(arena); }
  Status unadopt(const Arena& arena) override { return engine_->unadopt(arena); }
  size_t submit(std::span<Op* const> ops) override { return engine_->submit(ops); }
  size_t poll(uint64_t wait_ns) override {
    const size_t completed = engine_->poll(wait_ns);
    follow();
    return completed;
  }
  void wake() override { engine_->wake(); }

 private:
  struct Range {
    uint64_t at = 0, bytes = 0;
  };

  NamespaceFiles(std::unique_ptr<Engine> engine, std::string target, uint64_t bytes)
      : engine_(std::move(engine)),
        target_(std::move(target)),
        bytes_(bytes),
        submissions_(engine_->counters().submissions.get()) {}

  // What the suite counts is what the engine counted.
  void follow() {
    const IoCounters& theirs = engine_->counters();
    const auto copy = [](Counter& mine, const Counter& other, uint64_t before = 0) {
      mine.add(other.get() - before - mine.get());
    };
    copy(counters_.reads, theirs.reads);
    copy(counters_.read_bytes, theirs.read_bytes);
    copy(counters_.writes, theirs.writes);
    copy(counters_.written_bytes, theirs.written_bytes);
    copy(counters_.syncs, theirs.syncs);
    copy(counters_.submissions, theirs.submissions, submissions_);
    copy(counters_.retries, theirs.retries);
    copy(counters_.short_transfers, theirs.short_transfers);
  }

  const std::unique_ptr<Engine> engine_;
  const std::string target_;
  const uint64_t bytes_;
  const uint64_t submissions_;  // of making it
  Mutex mutex_;
  std::map<std::string, Range> files_ GUARDED_BY(mutex_);
  uint64_t free_ GUARDED_BY(mutex_) = 0;
};

}  // namespace stoker
