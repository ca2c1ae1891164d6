// StagedTransaction: an open transaction of a coded store. Blocks stay in memory until the commit
// hands them to the writer thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/codec/erasure.h"
#include "stoker/store/coded/commit/staged.h"
#include "stoker/store/coded/read/reader.h"
#include "stoker/store/coded/shards/pace.h"
#include "stoker/store/coded/write/writer.h"

namespace stoker::coded {

// What a transaction works with.
struct TransactionParts {
  Store& store;  // what the transaction has not changed is read there
  CommittedMap& map;
  Shards& shards;
  Reader& reader;
  const codec::ErasureCode& code;
  Budget& budget;
  SpareMemory& spare;
  Pool& pool;  // of CPU threads
  Paces& paces;
  Pool& readers;
  Writer& writer;
};

class StagedTransaction final : public Transaction {
 public:
  explicit StagedTransaction(const TransactionParts& parts)
      : parts_(parts),
        map_(parts.map),
        shape_(parts.shards.shape()),
        reader_(parts.reader),
        state_(std::make_shared<TransactionState>()) {}
  ~StagedTransaction() override;

  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override;
  Future<void> write(std::string_view key, uint64_t offset, Slice from, Priority priority) override;
  Status remove(std::string_view key) override;
  Status expect(std::string_view key, Class expected) override;
  Status require(std::string_view key, std::string_view tag) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Future<Version> commit(Durability durability) override;

 private:
  void abandon();
  // The staged object, owned from now on; busy if another transaction owns it. With the state's
  // mutex held, as all that follow.
  Result<StagedObject*> own(std::string_view key);
  Status write_locked(std::string_view key, StagedObject& object, uint64_t offset, Slice from,
                      Priority priority);
  Result<StripePtr> make_stripe(Class expected);
  Result<StagedStripe*> stage_stripe(StagedObject& object, size_t index);
  Status read_halves(std::string_view key, const StagedObject& object, uint64_t offset,
                     size_t bytes, Priority priority);
  void start_full(StagedObject& object, uint64_t end);
  void start_early(StagedStripe& stripe);
  void finish_oldest();
  Result<Grant> take(uint64_t bytes, std::string_view who);
  Status take_back(StagedStripe& stripe, Priority priority);
  StagedChunk& stage_chunk(StagedStripe& stripe, size_t position, bool whole);
  Status stage(const StagedObject& object, StagedStripe& stripe, size_t index, uint64_t in_stripe,
               Slice from, Priority priority);
  Status room_for_block(StagedStripe& stripe);
  Status old_block(const StagedObject& object, const StagedStripe& stripe, size_t index,
                   size_t block, std::byte* into, Priority priority);
  Status zero_to(std::string_view key, StagedObject& object, uint64_t from, uint64_t to);
  bool reads_as_zeros(const StagedObject& object, size_t index, uint64_t in_stripe) const;
  Status read_locked(std::string_view key, StagedObject& object, uint64_t offset, Slice into,
                     Priority priority);
  Status read_staged(StagedStripe& stripe, uint64_t in_stripe, Slice into, Priority priority);

  // Two blocks of the object that is being written, as they were; size 0: none.
  struct Halves {
    std::vector<std::byte> blocks = std::vector<std::byte>(2 * kBlock);
    uint64_t at = 0;
    size_t size = 0;
  };

  const TransactionParts parts_;
  CommittedMap& map_;
  const Shape& shape_;
  Reader& reader_;
  Halves halves_;
  std::shared_ptr<TransactionState> state_;
};

}  // namespace stoker::coded
