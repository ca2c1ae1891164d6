// Store: named objects of bytes, changed only by atomic transactions. Everything that holds bytes
// is one, and stores compose.
//
// Objects are cut into chunks (a size fixed when the object is made); each chunk carries a CRC32C
// that every read verifies. All methods may be called by any thread. Futures complete on a Store
// thread: continuations must not block.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/future.h"
#include "stoker/base/result.h"
#include "stoker/classes/class.h"
#include "stoker/io/op.h"
#include "stoker/memory/slice.h"

namespace stoker {

struct Plan;  // plan.h

// of the whole store; grows by one a commit; 0 = a store never committed to
using Version = uint64_t;

enum class Durability : uint8_t {
  deferred,  // visible now; durable with the next durable commit, or lost with it
  durable,   // visible and survives power loss when the future completes
};

// What becomes visible at one moment.
enum class AtomicUnit : uint8_t {
  object,       // a transaction holds one object; a second one is `unsupported`
  transaction,  // several objects change together or not at all
};

// What a store promises beside its methods. Who needs one of these asks when it opens the store.
struct Features {
  AtomicUnit atomic = AtomicUnit::object;
  // Writes go to an offset of an existing object, and resize() keeps its bytes. Without it resize()
  // begins the object anew, and no object is written that the transaction has not resized:
  // `unsupported`.
  bool update = false;
  bool snapshots = false;
  bool conditional = false;  // Transaction::require()
  bool verified = false;     // bytes that differ from what was written are the error `corruption`
  bool versions = false;     // ObjectInfo and StoreInfo number the commits, over all openings
};

// In place of a tag: the object is not there.
inline constexpr std::string_view kAbsent;

struct ObjectInfo {
  std::string key;
  uint64_t bytes = 0;
  uint32_t chunk_bytes = 0;
  Version version = 0;  // the commit that last changed it; 0 without features().versions
  // what the store takes it for, if it makes a difference and anything is known
  std::optional<Class> expected = {};
  // Tells one content of this object from another, within one store; never empty.
  std::string tag = {};
};

// What stands directly below a prefix, both sorted.
struct Level {
  std::vector<ObjectInfo> objects;   // without a '/' behind the prefix
  std::vector<std::string> folders;  // of all others: the key up to its next '/', which it has
};

struct SnapshotInfo {
  std::string name;
  Version version = 0;
};

// One of several volumes, since the store was opened.
struct VolumeInfo {
  std::string path;
  uint64_t read_bytes = 0, written_bytes = 0;  // of data
  // while it was busy, of about the last gigabyte; 0: nothing moved yet
  double bytes_per_second = 0;
  uint64_t capacity_bytes = 0, free_bytes = 0;  // for data, now
  // of data that went to the others while this one had no room for it in one piece
  uint64_t refused_bytes = 0;
};

// Of a cached store, since it was opened. Bytes are those that callers asked for, except where
// whole blocks are meant.
struct CacheInfo {
  uint64_t usable_bytes = 0;      // of slots
  uint64_t held_bytes = 0;        // in slots
  uint64_t hit_bytes = 0;         // came from a slot
  uint64_t memory_hit_bytes = 0;  // came from memory: it stays there or waits for a commit
  uint64_t merged_bytes = 0;      // came with a block that somebody else was fetching
  uint64_t fetched_bytes = 0;     // moved from the slow store: whole blocks, and ranges
  uint64_t admitted_bytes = 0;    // of whole blocks
  uint64_t commits = 0;           // to the fast store
  uint64_t damaged_blocks = 0;    // that the fast store could not verify
  uint64_t plans = 0;             // that are followed now
  // Epochs of plans: one is over when as many bytes were read as its ranges have. What the last one
  // fetched, and the least that it had to fetch.
  uint64_t epochs = 0, epoch_fetched_bytes = 0, epoch_bound_bytes = 0;
  // Fetched ahead of the readers of plans, of fetched_bytes. Blocks that may be so at a time; what
  // was not read so far; all; what was dropped before somebody read it.
  uint64_t ahead_depth_bytes = 0, ahead_bytes = 0, prefetched_bytes = 0,
           prefetched_in_vain_bytes = 0;
  uint64_t stalls = 0;  // reads of such plans that waited for the slow store
  std::string off;      // why the fast store is not used now; empty if it is
};

struct StoreInfo {
  std::string composition;      // the string that opens it, e.g. "local:/nvme0,/nvme1"
  Version committed = 0;        // current version (deferred commits included)
  Version durable = 0;          // the version a crash returns to
  uint64_t capacity_bytes = 0;  // for data; 0 = unbounded
  uint64_t used_bytes = 0;      // named by the current version, a snapshot or an open transaction
  uint64_t map_bytes = 0;       // memory of the map
  std::string read_only;        // why it refuses writes; empty if it does not
  std::vector<SnapshotInfo> snapshots;
  std::vector<VolumeInfo> volumes;      // of a local store
  std::optional<CacheInfo> cache = {};  // of a cached store
};

struct ReadOptions {
  std::string_view snapshot = {};  // empty: the current version
  Priority priority = Priority::demand;
  uint64_t deadline_ns = 0;
};

// A range of an object, and its place in memory.
struct Piece {
  uint64_t object = 0;  // which of the keys
  uint64_t offset = 0;  // in the object
  uint64_t bytes = 0;
  uint64_t into = 0;  // in the memory
};

// Bytes that stay as they are until the last copy is gone, which may be later than the store.
// Writing to them is a mistake that stays in this process.
struct View {
  std::shared_ptr<const std::byte> data;
  size_t size = 0;
};

// Owns the objects it wrote until it is committed or destroyed. Methods may be called by any
// thread, but not commit() beside others.
class Transaction {
 public:
  // Abandons what is not committed, without blocking; buffers handed to write() must still live
  // until their futures are done.
  virtual ~Transaction() = default;

  // Makes the object, of zeros, or changes its size. `chunk_bytes` of a new object is a multiple of
  // 4 KiB from 64 KiB to 8 MiB; 0 is the store's default. To change the size it must be 0 or what
  // the object has. New bytes read as zeros and cost no I/O until written.
  virtual Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes = 0) = 0;
  // Stages bytes at `offset` (inside the size). CRCs are computed on the calling thread; `from`
  // stays untouched until the future is done. Whole chunks from memory aligned to 4 KiB move
  // without a copy; a part of a chunk is merged with the verified rest. Errors: busy (another open
  // transaction owns the object), not_found, invalid_argument, out_of_space, read_only.
  virtual Future<void> write(std::string_view key, uint64_t offset, Slice from,
                             Priority priority = Priority::write_back) = 0;
  virtual Status remove(std::string_view key) = 0;
  // Says what the object, which is there or was made here, is for: a data set is read_only, a
  // checkpoint write_only, offloaded state read_write. A store to which all are alike ignores it;
  // one to which they are not finds out by itself what nobody said. Being wrong costs speed only.
  virtual Status expect(std::string_view /*key*/, Class /*expected*/) { return {}; }
  // Sees the staged bytes, and the committed ones elsewhere; also after commit() was called, until
  // destruction. What a later transaction has changed of them by then may be seen as it is now.
  virtual Future<void> read(std::string_view key, uint64_t offset, Slice into,
                            ReadOptions options = {}) = 0;
  // The commit fails with `conflict` unless the object has this tag then, or is kAbsent. It need
  // not be one that the transaction changes, where the atomic unit is the transaction. A second
  // call for the same object takes the place of the first.
  // unsupported without features().conditional.
  virtual Status require(std::string_view key, std::string_view tag);
  // The commit, which must be durable, names the version that it makes, as snapshot() does, with no
  // write or flush of its own. It fails with already_exists where there is such a name by then.
  // unsupported without features().snapshots.
  virtual Status name(std::string_view snapshot);
  // Everything or nothing. The version that holds it; the first failed write's error if one failed;
  // `conflict`; `in_doubt` where nobody can know: the library never commits such a thing again by
  // itself. Call once.
  virtual Future<Version> commit(Durability durability) = 0;
};

class Store {
 public:
  virtual ~Store() = default;  // no transaction may be open, no future pending

  virtual Features features() const = 0;
  // Whether memory at a multiple of 4 KiB spares a copy.
  virtual bool wants_aligned() const { return true; }
  virtual Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot = {}) = 0;
  // What stat() would say, where that is known without asking or waiting for anybody; else none.
  virtual std::optional<ObjectInfo> stat_at_once(std::string_view) { return {}; }
  // sorted by key
  virtual Result<std::vector<ObjectInfo>> list(std::string_view prefix,
                                               std::string_view snapshot = {}) = 0;
  // What list() would give, folded at the next '/'. Costs as much as stands there, and not as what
  // lies below it, where the store can do without.
  virtual Result<Level> list_level(std::string_view prefix, std::string_view snapshot = {});
  // All bytes of `into`, verified; not_found, invalid_argument (beyond the end), corruption (names
  // key and chunk), io.
  virtual Future<void> read(std::string_view key, uint64_t offset, Slice into,
                            ReadOptions options = {}) = 0;
  // Reads every piece into its place; pieces may be of any order and length, their places must not
  // overlap. All are asked for at once, and the memory stays untouched by others until the future
  // is done. The error is that of the first piece that failed, in the order given; no read is going
  // on any more then. invalid_argument: a piece of a key that is not there, or outside the memory;
  // nothing was read then. `keys` and `pieces` are copied.
  virtual Future<void> read_many(std::span<const std::string> keys, std::span<const Piece> pieces,
                                 Slice into, ReadOptions options = {});
  // The bytes that read() would give; without a copy where the store holds them in one piece of
  // memory that it can lend. Errors as read(), over_budget.
  virtual Future<View> view(std::string_view key, uint64_t offset, size_t bytes,
                            ReadOptions options = {});
  // Whether a process that was forked may go on using it. Futures and transactions of before the
  // fork stay with the one that forked.
  virtual bool works_after_fork() const { return false; }
  virtual Result<std::unique_ptr<Transaction>> begin() = 0;
  // Makes `to` what `from` is, as one durable commit, and replaces it if it is there. Moves no
  // bytes where the store can do without. Waits for it. conflict: `from` changed meanwhile.
  virtual Result<Version> copy(std::string_view from, std::string_view to);
  // Drops what caches hold of these bytes, durably: who finds a wrong hash calls it and reads once
  // more. Nothing where there is no cache. Waits for it.
  virtual Status forget(std::string_view /*key*/, uint64_t /*offset*/, uint64_t /*bytes*/) {
    return {};
  }
  // Says what will be read, so that caches keep what is read soonest. It takes the place of the
  // plan of the same name; a plan without ranges ends it. Being wrong costs speed only. Nothing
  // where there is no cache. Asks for the objects, and waits for that.
  virtual Status follow(const Plan& /*plan*/) { return {}; }
  // Removes objects, durably: all or none where the atomic unit is the transaction; else the first
  // that cannot be removed ends it. `keys` names each once. Waits for it.
  virtual Status remove(const std::vector<std::string>& keys);
  // Says that objects are removed to make room for others like them. The store may then keep so
  // many bytes of removed ones, to write into them again, until it is closed; 0 ends that. Nothing
  // where that gains nothing.
  virtual void keep_space(uint64_t /*bytes*/) {}
  // names the current version, durably; already_exists
  virtual Future<void> snapshot(std::string_view name) = 0;
  // Forgets a snapshot; not_found. Deferred, the next durable commit carries it, and its space is
  // free then.
  virtual Future<void> drop(std::string_view name, Durability durability = Durability::durable) = 0;
  virtual StoreInfo info() const = 0;
};

}  // namespace stoker
