// ShardLog: where the records of a node lie: the segments of its log, and the reserves behind its
// parity chunks.
//
// A segment is a file of its own, written front to back and begun anew when all its records are
// released. Records that wait are framed together and written by whoever flushes the node (group
// commit). Any thread queues, finds and releases; one at a time writes.
//
// The coded store's ShardLog hands out places in one file of a fixed number of segments, for frames
// of its items that are held by references. Here segments are added as the records ask for them, as
// how many there are is what is compared.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

#include "curm/mutation.h"
#include "curm/shard_format.h"
#include "stoker/io/loop.h"
#include "stoker/store/blocking_io.h"

namespace stoker::curm {

// A record that can be read.
struct StoredRecord {
  FramePlace place;
  FileId file = -1;
  uint64_t at = 0;     // of its payload in the file
  uint64_t bytes = 0;  // of it
  std::vector<uint32_t> crcs;
  Record::Kind kind = Record::Kind::value;
  uint8_t scheme = 0;
};

// Bytes on their way to a file.
struct ShardWrite {
  FileId file = -1;
  uint64_t offset = 0;
  AlignedBytes bytes;
};

class ShardLog {
 public:
  struct Segment {
    FileId file = -1;    // -1: there is none, or none of full size
    uint64_t count = 0;  // when it was begun; 0: it holds nothing
    uint64_t end = 0;    // behind its last frame
    size_t live = 0;
    // where its begin frame stands: in the first or the second block, by turns
    uint64_t begin = kShardBlock;
  };
  ShardLog(const ShardLayout& layout, Loop& loop, std::string path)
      : layout_(layout), loop_(loop), path_(std::move(path)) {}

  // Of another incarnation nothing is left. Segments that there are, are used again.
  void become(const NodeHead& head, FileId parity_file);
  // Whatever is there; load() tells what is not.
  Status open_segments();
  Status close();

  // Any thread. The record is readable once the node was flushed; so is one in a reserve, once what
  // is returned was written.
  uint64_t queue(Record record);
  // None: there is no room behind this parity (any more).
  std::optional<ShardWrite> reserve(const Chunk& parity, const Record& record, uint64_t& id);
  std::optional<StoredRecord> find(uint64_t id) const;
  void release(const std::vector<LogPlace>& places, uint64_t settled);

  // One thread at a time: frames what waits. Beginning a segment takes I/O of its own, done here.
  Status frame(std::vector<ShardWrite>& writes);
  // What frame() returned last is written and flushed.
  void durable();
  FileId current_file() const {
    return current_ < segments_.size() ? segments_[current_].file : -1;
  }

  // Opening. Records of this node as they are found; `damage` tells what is not there that was
  // durable.
  Status load(NodeState& state, std::string& damage);
  size_t live() const;  // records, epochs apart
  std::vector<FileId> files() const;

 private:
  struct Pending {
    uint64_t id;
    Record record;
  };
  struct Reserve {
    LogWriter writer;
    size_t live = 0;
  };
  Result<FileId> open_segment(size_t index, bool create);
  Result<FileId> lengthened(const FileInfo& file);
  Status begin_segment(std::vector<ShardWrite>& writes);
  Status write_now(std::vector<ShardWrite>& writes, Mutation unflushed);
  void close_frame(ShardFrame& frame, std::vector<std::pair<uint64_t, StoredRecord>>& inside,
                   std::vector<ShardWrite>& writes);
  void index(uint64_t id, StoredRecord record);
  void forget(uint64_t id);
  struct Found;
  Status load_segment(size_t index, Found& found);
  Status load_reserve(const Chunk& parity, NodeState& state, std::string& damage);
  void take(FrameContent content, FileId file, uint64_t frame_at, NodeState& state);

  const ShardLayout layout_;
  Loop& loop_;
  const std::string path_;
  StoreId id_{};
  NodeId node_ = 0;
  FileId parity_file_ = -1;
  // Of the thread that writes.
  LogWriter writer_;
  size_t current_ = SIZE_MAX;
  LogEnd durable_;
  uint64_t next_count_ = 1;
  uint32_t begun_ = 0;  // segments, from the first on, that were ever begun

  // guards what follows; `segments_` grows under it, by the thread that writes
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  std::deque<Pending> pending_;
  std::unordered_map<uint64_t, StoredRecord> records_;
  std::map<Chunk, Reserve> reserves_;
  std::map<uint8_t, std::vector<uint64_t>> epochs_;  // records of epochs, by scheme
  // not durable yet; then they stand for those, whose say they repeat
  std::vector<std::pair<uint8_t, uint64_t>> new_epochs_;
  uint64_t settled_ = 0, next_id_ = 1;
};

}  // namespace stoker::curm
