// ShardTransfers: transfers on several shards that start together and are told one by one as they
// end. A ShardBatch is waited for as a whole; of this one its owner may stop waiting once it has
// enough.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "stoker/store/coded/shards/shards.h"

namespace stoker::coded {

// Use once. One thread, its owner's; each transfer ends on the Loop's.
class ShardTransfers {
 public:
  // `memory` is what the reads go into. Whoever destroys this while reads are under way leaves them
  // behind: they keep `memory` alive until the last of them has ended, and the shards know of them
  // as Stragglers, without whom they do not close. What they bring is dropped. None: nothing is
  // left behind, the end of this waits for all of them. So with writes, which must not come late.
  ShardTransfers(Shards& shards, Priority priority, std::shared_ptr<const void> memory);
  ~ShardTransfers();
  ShardTransfers(const ShardTransfers&) = delete;
  ShardTransfers& operator=(const ShardTransfers&) = delete;

  // Before start(). The index of the transfer.
  size_t read(size_t shard, uint64_t offset, Slice into) { return add(false, shard, offset, into); }
  size_t write(size_t shard, uint64_t offset, Slice from) { return add(true, shard, offset, from); }
  bool empty() const;
  void start();
  // Waits for one at least: those that have ended and were not told yet. Empty: all were told.
  std::vector<size_t> next();
  // Whether all have ended.
  bool ended() const;
  // Of one that was told.
  const Status& result(size_t index) const;
  // Waits for all that are left. Why the first of them failed; empty: none did.
  std::string finish();

 private:
  struct State;
  size_t add(bool write, size_t shard, uint64_t offset, Slice bytes);
  template <typename Request>
  static void on_done(Request& request) noexcept;
  static void ended(State& state, size_t index) noexcept;

  Shards& shards_;
  const Priority priority_;
  const std::shared_ptr<State> state_;
};

}  // namespace stoker::coded
