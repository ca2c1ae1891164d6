// PackedObjects: objects that are compressed as a whole are fetched whole, unpacked on the reader's
// threads, and kept as long as there is memory for them: samples of one object are mostly used
// about the same time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/mutex.h"
#include "stoker/data/pipeline_threads.h"
#include "stoker/data/sample_table.h"
#include "stoker/data/tagged_objects.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/store.h"

namespace stoker::data {

// Any thread. Destroy it when all reads are done, and after the tasks.
class PackedObjects {
 public:
  // most: bytes for what is kept and for what is on its way, compressed and unpacked.
  PackedObjects(const TaggedObjects& objects, std::shared_ptr<const SampleTable> table,
                uint64_t most, PipelineTasks& tasks)
      : stored_(objects), table_(std::move(table)), budget_(most), tasks_(tasks) {}
  PackedObjects(const PackedObjects&) = delete;
  PackedObjects& operator=(const PackedObjects&) = delete;

  // As Store::read_many(), of the unpacked bytes; when the last object had come, in the nanoseconds
  // of Clock::real(). Errors name the object: over_budget, corruption, those of TaggedObjects.
  Future<uint64_t> read(std::span<const Piece> pieces, Slice into);

  // Bytes that the store was asked for, and by how many reads, since the last call.
  std::pair<uint64_t, uint64_t> take_asked();
  uint64_t peak_bytes() const { return budget_.peak(); }

 private:
  class Rest;  // of one read()
  struct Waiter {
    std::vector<Piece> pieces;
    Slice into;
    std::shared_ptr<Rest> rest;
  };
  using Waiters = std::vector<Waiter>;
  struct Object {
    Grant packed_grant, raw_grant;
    AlignedBytes packed, raw;
    bool there = false;  // unpacked
    size_t used_by = 0;  // copies that are going on
    uint64_t last_used = 0, fetched = 0;
    Waiters waiters;
  };
  using Objects = std::map<uint64_t, std::shared_ptr<Object>>;
  struct Start {
    uint64_t number;
    std::shared_ptr<Object> object;
  };
  struct Failed {
    Waiters waiters;
    Error error;
  };

  std::string name(uint64_t number) const { return "'" + table_->keys()[number] + "'"; }
  void go_on(std::optional<Failed> failed = {});
  std::optional<Failed> admit(std::vector<Start>& starts) REQUIRES(mutex_);
  bool make_room(uint64_t bytes, Grant& grant) REQUIRES(mutex_);
  void forget(Objects::iterator object) REQUIRES(mutex_);
  void fetched(uint64_t number, const std::shared_ptr<Object>& object,
               const Result<uint64_t>& when);
  void unpack_one(uint64_t number, const std::shared_ptr<Object>& object);
  Failed fail(uint64_t number, Error error) REQUIRES(mutex_);
  void copy(const std::shared_ptr<Object>& object, const Waiters& waiters);

  const TaggedObjects& stored_;
  const std::shared_ptr<const SampleTable> table_;
  Budget budget_;
  PipelineTasks& tasks_;
  Mutex mutex_;
  Objects objects_ GUARDED_BY(mutex_);
  std::deque<uint64_t> queue_ GUARDED_BY(mutex_);  // objects that wait for memory
  uint64_t uses_ GUARDED_BY(mutex_) = 0;
  uint64_t asked_ GUARDED_BY(mutex_) = 0, requests_ GUARDED_BY(mutex_) = 0;
};

}  // namespace stoker::data
