#include "stoker/store/coded/commit/early.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/store/coded/format/rows.h"
#include "stoker/store/coded/read/row_reads.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kTaskBytes = kMiB;  // of a stripe, from which on it is a task of the pool
constexpr size_t kRowsAtOnce = 256;    // that are read back

}  // namespace

EarlyStripe::EarlyStripe(const EarlyParts& parts, StripePtr stripe, EarlyBlocks blocks,
                         Grant parity, Grant headers)
    : parts_(parts),
      shape_(parts.shards.shape()),
      stripe_(std::move(stripe)),
      blocks_(std::move(blocks)),
      parity_grant_(std::move(parity)),
      headers_grant_(std::move(headers)),
      parity_(parts.spare.take(parity_bytes(shape_))),
      headers_(blank_headers(shape_)) {
  STOKER_CHECK(blocks_.chunks.size() == shape_.k);
  {
    const auto map = parts_.map.lock();
    to_write_ = stripe_->positions_on(map->to_write());
    for (const size_t shard : stripe_->shards) joinings_.push_back(map->joinings[shard]);
    // any that is known: the commit has its own
    std::fill(headers_.versions.begin(), headers_.versions.end(), make_stamp(map->epoch, 1));
  }
  if (shape_.stripe_bytes() < kTaskBytes) {
    await_begun();
  } else {
    // we are there as long as nobody has taken it
    parts.pool.run([this, taken = taken_] {
      if (!taken->exchange(true)) begin();
    });
  }
}

EarlyStripe::~EarlyStripe() {
  if (taken_->exchange(true)) await_begun();
}

void EarlyStripe::begin() noexcept {
  const size_t rows = shape_.rows();
  std::vector<uint32_t> crcs(shape_.n() * rows);  // chunk * rows + row
  const auto crcs_of = [&](size_t chunk) { return std::span(crcs).subspan(chunk * rows, rows); };
  std::vector<codec::Source> sources;
  for (size_t c = 0; c < shape_.k; ++c) sources.push_back({chunk(c).span(), crcs_of(c)});
  std::vector<codec::Target> targets;
  for (size_t c = shape_.k; c < shape_.n(); ++c) targets.push_back({chunk(c).span(), crcs_of(c)});
  if (!parts_.code.encode(sources, targets)) to_write_ = 0;
  for (size_t c = 0; c < shape_.n(); ++c) {
    for (size_t row = 0; row < rows; ++row)
      headers_.crcs[row * shape_.n() + c] = crcs[c * rows + row];
  }
  written_ = to_write_;
  write(to_write_);
  // held while notifying: the waiter may destroy us as soon as it has the lock
  const MutexLock lock(mutex_);
  begun_ = true;
  changed_.notify_all();
}

bool EarlyStripe::begun() const {
  const MutexLock lock(mutex_);
  return begun_;
}

// Where no thread of the pool has come to it yet it is done here: those may be waiting for us.
void EarlyStripe::await_begun() {
  if (!taken_->exchange(true)) begin();
  MutexLock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return begun_; });
}

uint64_t EarlyStripe::held_bytes() const {
  return blocks_.chunks.size() * shape_.chunk_bytes + parity_grant_.bytes();
}

bool EarlyStripe::settle() {
  if (settled_) return true;
  if (!begun() || !transfers_->ended()) return false;
  finish();
  return true;
}

void EarlyStripe::finish() {
  if (settled_) return;
  await_transfers();
  const uint32_t readable = written() & parts_.map.live_positions(*stripe_);
  if (static_cast<size_t>(std::popcount(readable)) < shape_.k) return;
  blocks_ = {};
  const auto map = parts_.map.lock();
  stripe_->headers = std::make_shared<Headers>(std::move(headers_));
  stripe_->headers_grant = std::move(headers_grant_);
}

// What failed is written once more: a disk that failed once need not fail for ever.
void EarlyStripe::await_transfers() {
  await_begun();
  note_failed();
  const uint32_t failed =
      stripe_->positions_on(parts_.map.lock()->to_write()) & to_write_ & ~written_;
  if (failed != 0) {
    write(failed);
    written_ |= failed;
    note_failed();
  }
  settled_ = true;
  transfers_.reset();
  parity_ = SparePiece();
  parity_grant_ = Grant();
  for (size_t j = 0; j < shape_.m; ++j) {
    if (is_set(written_, shape_.k + j)) continue;
    for (size_t row = 0; row < shape_.rows(); ++row) headers_.unsound[row * shape_.m + j] = true;
  }
}

// Begins to write the chunks at these positions.
void EarlyStripe::write(uint32_t positions) {
  transfers_ = std::make_unique<ShardTransfers>(parts_.shards, Priority::write_back, nullptr);
  position_of_.clear();
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (!is_set(positions, c)) continue;
    transfers_->write(stripe_->shards[c], shape_.block_at(stripe_->slots[c], 0), chunk(c));
    position_of_.push_back(c);
  }
  transfers_->start();
}

// Waits for them.
void EarlyStripe::note_failed() {
  for (;;) {
    const std::vector<size_t> ended = transfers_->next();
    if (ended.empty()) return;
    for (const size_t each : ended) {
      if (!transfers_->result(each)) written_ &= ~(uint32_t{1} << position_of_[each]);
    }
  }
}

// A piece that was used before may be larger.
Slice EarlyStripe::chunk(size_t c) const {
  const SparePiece& piece = c < shape_.k ? blocks_.chunks[c] : parity_;
  return piece.slice().sub(c < shape_.k ? 0 : (c - shape_.k) * shape_.chunk_bytes,
                           shape_.chunk_bytes);
}

uint32_t EarlyStripe::written() const {
  STOKER_CHECK(settled_);
  uint32_t written = written_;
  const auto map = parts_.map.lock();
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (map->joinings[stripe_->shards[c]] != joinings_[c]) written &= ~(uint32_t{1} << c);
  }
  return written;
}

// Those of the stripe change under the map's mutex only by its owner's hand, before the commit.
const Headers& EarlyStripe::headers() const { return in_memory() ? headers_ : *stripe_->headers; }

void EarlyStripe::tell(Headers& to, uint32_t positions) const {
  to.crcs = headers().crcs;
  for (size_t row = 0; row < shape_.rows(); ++row) {
    for (size_t j = 0; j < shape_.m; ++j)
      to.unsound[row * shape_.m + j] = !is_set(positions, shape_.k + j);
  }
}

// From shards that are in use and surely have it. If these have too little, from whichever may have
// it: a shard that has joined again since may be a new one, and the checksums tell.
Status EarlyStripe::read_wanted(RowsWanted& rows, const std::shared_ptr<const void>& memory,
                                Priority priority) {
  const RowsWanted asked = rows;
  ShardSet from = parts_.map.lock()->to_write();
  for (const uint32_t right : {written(), written_}) {
    rows = asked;
    rows.avoid = ~right;
    RowReads reads(parts_.shards, from, {&rows, 1}, memory, priority);
    parts_.reader.finish_rows(reads);
    if (rows.status) break;
    from = parts_.shards.present();
  }
  return rows.status;
}

Status EarlyStripe::read(size_t chunk, size_t first, size_t count, std::byte* into,
                         Priority priority) {
  STOKER_CHECK(chunk < shape_.k && first + count <= shape_.rows());
  if (in_memory()) {
    std::memcpy(into, blocks_.chunks[chunk].data() + first * kBlock, count * kBlock);
    return {};
  }
  for (size_t done = 0; done < count;) {
    STOKER_ASSIGN(const ScratchPtr memory,
                  parts_.reader.take_scratch(std::min(kRowsAtOnce, count - done), shape_.n(),
                                             "reading what a transaction has written"));
    RowsWanted rows{stripe_.get(), first + done, memory->rows, uint32_t{1} << chunk,
                    memory->bytes.span()};
    Status status = read_wanted(rows, memory, priority);
    // else again, in other memory: a disk was given up, and refuses from then on
    if (memory->bytes.lost()) continue;
    if (!status) return status;
    std::memcpy(into + done * kBlock, rows.blocks.data() + chunk * rows.count * kBlock,
                rows.count * kBlock);
    done += rows.count;
  }
  return {};
}

Status EarlyStripe::read_rows(size_t first, size_t count, std::span<std::byte> into,
                              Priority priority) {
  if (!in_memory()) {
    RowsWanted rows{stripe_.get(), first, count, (uint32_t{1} << shape_.k) - 1, into};
    return read_wanted(rows, nullptr, priority);
  }
  for (size_t c = 0; c < shape_.k; ++c)
    std::memcpy(into.data() + c * count * kBlock, blocks_.chunks[c].data() + first * kBlock,
                count * kBlock);
  return {};
}

Result<EarlyBlocks> EarlyStripe::take_back(Grant memory, Priority priority) {
  if (!settled_) await_transfers();
  if (in_memory()) return std::move(blocks_);
  EarlyBlocks blocks;
  for (size_t c = 0; c < shape_.k; ++c) {
    blocks.chunks.push_back(parts_.spare.take(shape_.chunk_bytes));
    STOKER_TRY(read(c, 0, shape_.rows(), blocks.chunks.back().data(), priority));
  }
  blocks.grants.push_back(std::move(memory));
  const auto map = parts_.map.lock();
  stripe_->headers.reset();
  stripe_->headers_grant = Grant();
  return blocks;
}

}  // namespace stoker::coded
