// BatchReader: samples into one piece of memory, several batches under way at once.
//
// A batch costs one call to each store it touches. Where the order keeps neighbours together
// (Sequence::reads), these come by one read for all batches of their window, and are copied from
// there. Tokens are widened to int64 on threads of the pipeline; everything else is left as the
// stores give it. Objects that are compressed as a whole are fetched whole and unpacked on these
// threads (packed_objects.h). A batch does not depend on how many there are. Memory of batches that
// nobody has any more is used again: fresh memory is slow to touch.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stoker/data/pipeline_threads.h"
#include "stoker/data/sample_table.h"
#include "stoker/data/sequence.h"
#include "stoker/data/spares.h"
#include "stoker/data/widen.h"
#include "stoker/memory/arena.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/store.h"

namespace stoker::data {

struct BatchSource {
  Store* store = nullptr;  // outlives the reader
  std::shared_ptr<const SampleTable> table;
  // Samples are such integers, of equal bytes, and come as int64.
  std::optional<Integer> integers;
  // Of each object, where the store compares them (TaggedReads); or nothing.
  std::vector<std::string> tags = {};
  // That the store draws on as well: compressed objects take their memory from it. Null: from none.
  Budget* budget = nullptr;
};

// Bytes of one object that a batch needed.
struct Asked {
  uint64_t source = 0, object = 0, bytes = 0;
};

// When each stage of a batch was over, in the nanoseconds of Clock::real(). A stage that it did
// not need ends when it begins.
struct StageTimes {
  uint64_t begun = 0;
  uint64_t read = 0;      // all stores have answered
  uint64_t unpacked = 0;  // what was compressed
  uint64_t taken = 0;     // a thread of the reader was free for it
  uint64_t verified = 0, assembled = 0;
};

// What was read. Any thread; it may outlive its reader.
struct Batch {
  ~Batch();  // gives the memory back

  Slot memory;
  uint64_t bytes = 0;  // of it that the batch takes
  std::vector<Pick> picks;
  // Of pick i: parts [starts[i], starts[i + 1]), places in the memory. Of records: their columns.
  std::vector<Place> parts;
  std::vector<uint64_t> starts;
  // Bytes that each source's store was asked for, and by how many ranges. What is read for several
  // batches counts for the first.
  std::vector<uint64_t> asked, ranges;
  std::vector<Asked> objects;  // that it needed, in the order of their numbers
  StageTimes times;
  std::shared_ptr<Spares> spares;
};
using BatchPtr = std::shared_ptr<const Batch>;

// A batch on its way.
struct BatchRead {
  Future<BatchPtr> batch;
  // What was asked of the stores for this batch and for later ones, by source: no store may end
  // before that is done. It does not hold what is read for this batch alone.
  std::vector<std::pair<uint32_t, Future<uint64_t>>> begun;
};

struct ReaderLimits {
  // Memory of each source for compressed objects: those on their way, and those that are kept.
  uint64_t unpacked_bytes = uint64_t{256} << 20;
  // Where batches lie as far as there is room, as long as any of them is there; or null.
  std::shared_ptr<Arena> arena = {};
};

// Any thread.
class BatchReader {
 public:
  // spares: pieces of memory kept for the next batches. threads: of the pipeline; null: one of its
  // own. invalid_argument: integers of unequal samples, or samples that are no whole number of
  // them.
  static Result<std::unique_ptr<BatchReader>> make(std::vector<BatchSource> sources, size_t spares,
                                                   const ReaderLimits& limits = {},
                                                   std::shared_ptr<PipelineThreads> threads = {});
  ~BatchReader();  // waits for what is under way
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;

  // The samples in this order. Where all sources have equal samples of one size in memory, one
  // follows the other without a gap. Else each begins at a multiple of 64 bytes. Errors are those
  // of Store::read_many, and `mismatch` for an object with another tag; invalid_argument names a
  // sample that is not there.
  BatchRead read(Reads reads);

 private:
  class State;
  explicit BatchReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace stoker::data
