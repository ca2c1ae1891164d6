// PackedObjects: objects that are compressed as a whole are fetched whole, unpacked on the reader's
// threads, and kept as long as there is memory for them: samples of one object are mostly used
// about the same time.
//
// Memory is reserved before an object is asked for. Objects wait for it in one queue over all
// sources. What is under way, or kept, makes room for the first one sooner or later. Where nothing
// is left that could, it is the error over_budget. So nothing waits for ever.
//
// Several may share the memory of a store. One with nothing under way gets what the others keep, or
// else waits for what they have under way. They start nothing more before it had its turn.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
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

// All outlive the reads. Objects of different sources are different ones.
struct PackedSource {
  const TaggedObjects* stored = nullptr;
  std::shared_ptr<const SampleTable> table;
  Budget* budget = nullptr;  // that the source's store draws on as well; null: none
};

// Any thread. Destroy it when all reads are done, and after the tasks.
class PackedObjects {
 public:
  // most: bytes of each source for what is kept and for what is on its way, compressed and
  // unpacked.
  PackedObjects(std::vector<PackedSource> sources, uint64_t most, PipelineTasks& tasks);
  ~PackedObjects();
  PackedObjects(const PackedObjects&) = delete;
  PackedObjects& operator=(const PackedObjects&) = delete;

  // As Store::read_many() of that source, of the unpacked bytes; when the last object had come, in
  // the nanoseconds of Clock::real(). Errors name the object: over_budget, corruption, those of
  // TaggedObjects.
  Future<uint64_t> read(uint32_t source, std::span<const Piece> pieces, Slice into);

  // Bytes that its store was asked for, and by how many reads, since the last call.
  std::pair<uint64_t, uint64_t> take_asked(uint32_t source);

 private:
  class Rest;  // of one read()
  struct Waiter {
    std::vector<Piece> pieces;
    Slice into;
    std::shared_ptr<Rest> rest;
  };
  using Waiters = std::vector<Waiter>;
  // Of the memory of one source, and of its store's.
  struct Reserved {
    Grant of_source, of_store;
  };
  struct Object {
    Reserved packed_memory, raw_memory;
    AlignedBytes packed, raw;
    bool there = false;  // unpacked
    size_t used_by = 0;  // copies that are going on
    uint64_t last_used = 0, fetched = 0;
    Waiters waiters;
  };
  struct Id {
    uint32_t source = 0;
    uint64_t number = 0;
    bool operator<(const Id& other) const {
      return std::tie(source, number) < std::tie(other.source, other.number);
    }
  };
  using Objects = std::map<Id, std::shared_ptr<Object>>;
  struct Start {
    Id id;
    std::shared_ptr<Object> object;
  };
  struct Failed {
    Waiters waiters;
    Error error;
  };
  // What is to be done once the mutex is free.
  struct Todo {
    PackedObjects* of = nullptr;
    std::vector<Start> starts;
    std::vector<Failed> failed;
  };

  static std::vector<PackedObjects*>& all() REQUIRES(common_mutex);  // of this process
  const SampleTable& table(const Id& id) const { return *sources_[id.source].table; }
  std::string name(const Id& id) const { return "'" + table(id).keys()[id.number] + "'"; }
  void go_on(std::optional<Failed> failed = {});
  Todo admit() REQUIRES(common_mutex);
  bool room_for(const Id& id, Object& object) REQUIRES(common_mutex);
  bool is_before(const PackedObjects& other) const REQUIRES(common_mutex);
  bool has_to_wait(const Budget* budget) REQUIRES(common_mutex);
  std::vector<PackedObjects*> sharing(const Budget* budget) const REQUIRES(common_mutex);
  void start(const std::vector<Start>& starts);
  std::optional<Error> too_large(const Id& id) const;
  bool make_room(const Id& id, uint64_t bytes, Reserved& reserved) REQUIRES(common_mutex);
  bool forget_oldest(const Id& of, bool of_store) REQUIRES(common_mutex);
  bool forget_oldest_of_others(const Budget* budget) REQUIRES(common_mutex);
  void forget(Objects::iterator object) REQUIRES(common_mutex);
  void fetched(const Id& id, const std::shared_ptr<Object>& object, const Result<uint64_t>& when);
  void unpack_one(const Id& id, const std::shared_ptr<Object>& object);
  Failed give_up(const Id& id, Error error) REQUIRES(common_mutex);
  void copy(const std::shared_ptr<Object>& object, const Waiters& waiters);

  const std::vector<PackedSource> sources_;
  std::vector<std::unique_ptr<Budget>> limits_;  // of each source
  PipelineTasks& tasks_;
  static inline Mutex common_mutex;  // of all in this process
  static inline uint64_t use_count GUARDED_BY(common_mutex) = 0, turn_count
                                                                 GUARDED_BY(common_mutex) = 0;
  uint64_t turn_ GUARDED_BY(common_mutex) = 0;  // it waits for the others' memory; 0: it does not
  Objects objects_ GUARDED_BY(common_mutex);
  std::deque<Id> queue_ GUARDED_BY(common_mutex);  // objects that wait for memory
  size_t under_way_ GUARDED_BY(common_mutex) = 0;  // fetches and copies: go_on() follows each
  std::vector<std::pair<uint64_t, uint64_t>> asked_ GUARDED_BY(common_mutex);  // bytes, requests
};

}  // namespace stoker::data
