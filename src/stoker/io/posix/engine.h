// PosixEngine: pread and pwrite on a fixed set of threads, for machines that refuse io_uring.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/io/engine.h"
#include "stoker/io/file_table.h"
#include "stoker/io/op_list.h"
#include "stoker/io/posix/carrier.h"

namespace stoker {

class PosixEngine final : public Engine {
 public:
  // A thread carries one op at a time. There come to be as many threads as ops were ever under way
  // at once. So those of a disk that hangs hold up no others.
  static Result<std::unique_ptr<PosixEngine>> make(uint32_t depth,
                                                   std::unique_ptr<Carrier> carrier = nullptr);
  ~PosixEngine() override;

  EngineTraits traits() const override {
    return {carrier_ ? carrier_->name() : "posix", depth_, carrier_ != nullptr};
  }
  Result<FileInfo> open(const OpenFile& file) override { return files_.open(file); }
  Status close(FileId file) override;
  Status adopt(const Arena& arena) override { return carrier_ ? carrier_->adopt(arena) : Status{}; }
  Status unadopt(const Arena& arena) override {
    return carrier_ ? carrier_->unadopt(arena) : Status{};
  }
  size_t submit(std::span<Op* const> ops) override;
  size_t poll(uint64_t wait_ns) override;
  void wake() override;

 private:
  PosixEngine(uint32_t depth, std::unique_ptr<Carrier> carrier)
      : depth_(depth), carrier_(std::move(carrier)) {}
  Status add_thread();
  void work();
  void carry(Op& op);

  const uint32_t depth_;
  const std::unique_ptr<Carrier> carrier_;  // null: all memory is the host's
  FileTable files_;
  Mutex mutex_;
  CondVar work_;      // for the threads: something queued, or stopping
  CondVar progress_;  // for poll(): something done, or woken
  OpList queued_ GUARDED_BY(mutex_);
  OpList done_ GUARDED_BY(mutex_);
  bool woken_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  uint32_t working_ GUARDED_BY(mutex_) = 0;  // queued or carried
  uint32_t in_flight_ = 0;                   // of the polling thread
  std::vector<std::thread> threads_;
};

}  // namespace stoker
