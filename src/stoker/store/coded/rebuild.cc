// Rebuilding a chunk: what a shard has of it is compared with what the headers of all say, and written where it differs.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "stoker/base/crc32c.h"
#include "stoker/store/coded/coded_store.h"
#include "stoker/store/coded/headers.h"

namespace stoker::coded {
namespace {

constexpr size_t kRowsRebuilt = 256;  // at least, in a step, if the chunk has so many: commits wait for one

Error failing(const std::string& path, const std::string& why) { return make_error(Code::io, "a chunk on the shard '" + path + "' cannot be rebuilt: " + why, "store/coded/rebuild"); }

// Header pages and blocks of a piece of a chunk, as far as they can be read. What cannot is zeros among the pages, like those of other pieces, and not
// `readable` among the blocks.
struct PieceBytes {
  AlignedBytes pairs, blocks;
  std::vector<bool> readable;
};

PieceBytes read_piece(Shards& shards, size_t shard, size_t slot, size_t first_page, size_t pages, size_t first, size_t rows) {
  const Shape& shape = shards.shape();
  PieceBytes piece{AlignedBytes(header_bytes(shape)), AlignedBytes(rows * kBlock), {}};
  std::memset(piece.pairs.data(), 0, piece.pairs.size());
  const Slice pairs = piece.pairs.slice().sub(2 * first_page * kBlock, 2 * pages * kBlock);
  std::array<Area, 2> areas = {Area{shard, shape.slot_at(slot) + 2 * first_page * kBlock, pairs}, Area{shard, shape.block_at(slot, first), piece.blocks.slice()}};
  read_areas(shards, Priority::scrub, areas);
  piece.readable = std::move(areas[1].readable);
  return piece;
}

}  // namespace

// What the chunk's own intact entries say beyond what is known: they could not be read when the stripe's headers were. As in RawHeaders::merge the newest
// version counts, and a parity is sound if its entry is of these versions.
bool CodedStore::adopt(Headers& headers, const RawHeaders& own, size_t position) const {
  bool adopted = false;
  for (size_t row = 0; row < shape_.rows(); ++row) {
    const auto offer = [&](size_t chunk, Stamp version, uint32_t crc) {
      Stamp& known = headers.versions[row * shape_.k + chunk];
      if (version == kUnknown || version == known || (known != kUnknown && version < known)) return;
      known = version;
      headers.crcs[row * shape_.n() + chunk] = crc;
      for (size_t j = 0; j < shape_.m; ++j) headers.unsound[row * shape_.m + j] = true;  // until their own entries were looked at
      adopted = true;
    };
    if (position < shape_.k) {
      if (const auto& entry = own.data[position][row]) offer(position, entry->version, entry->crc);
      continue;
    }
    const auto& entry = own.parity[position - shape_.k][row];
    if (!entry) continue;
    for (size_t chunk = 0; chunk < shape_.k; ++chunk) offer(chunk, entry->versions[chunk], entry->crcs[chunk]);
  }
  return adopted;
}

// Nobody looks at the old ones while they change.
void CodedStore::install(const StripePtr& stripe, Headers headers) {
  std::unique_lock lock(mutex_);
  stripe->folding = true;
  unpinned_.wait(lock, [&] { return stripe->readers == 0; });
  stripe->headers = std::move(headers);
  stripe->folding = false;
  unpinned_.notify_all();
}

Status CodedStore::load_headers_paced(const StripePtr& stripe) {
  {
    std::lock_guard lock(mutex_);
    if (stripe->headers) return {};
  }
  pace_.spend(static_cast<uint64_t>(std::popcount(live_positions(*stripe))) * header_bytes(shape_));
  return load_headers(stripe, Priority::scrub);
}

// Every row of this piece of the chunk with what the headers of all say.
Result<CodedStore::Compared> CodedStore::compare(const StripePtr& stripe, size_t position, const Piece& piece) {
  STOKER_TRY(load_headers_paced(stripe));
  const PieceBytes own = read_piece(*shards_, stripe->shards[position], stripe->slots[position], piece.first_page, piece.pages, piece.first, piece.rows);
  pace_.spend((2 * piece.pages + piece.rows) * kBlock);
  RawHeaders raw(shape_);
  raw.take(shape_, shards_->store(), stripe->id, position, own.pairs.span());
  Compared found;
  found.next = *stripe->headers;
  // Of a shard that is not live nothing is believed: it may be old.
  if ((live_positions(*stripe) >> position & 1) != 0 && adopt(found.next, raw, position)) install(stripe, found.next);
  Headers& next = found.next;
  const bool data = position < shape_.k;
  for (size_t row = piece.first; row < piece.first + piece.rows; ++row) {
    const Stamp* versions = &next.versions[row * shape_.k];
    const bool blank = data ? versions[position] == 0 : row_is_blank(shape_, next, row);
    uint32_t& crc = next.crcs[row * shape_.n() + position];
    bool known = data ? versions[position] != kUnknown : !next.unsound[row * shape_.m + position - shape_.k];
    bool entry_right = false;
    if (data) {
      const auto& entry = raw.data[position][row];
      entry_right = entry ? entry->version == versions[position] && entry->crc == crc : !known;
    } else if (const auto& entry = raw.parity[position - shape_.k][row]; entry) {
      entry_right = std::equal(versions, versions + shape_.k, entry->versions.begin()) && (!known || entry->crc == crc);
      if (entry_right && !known) crc = entry->crc;  // it was not live when the headers were read
      known = known || entry_right;
      if (entry_right) next.unsound[row * shape_.m + position - shape_.k] = false;  // its block may be wrong yet: by its CRC
    }
    if (!data && blank) {
      next.unsound[row * shape_.m + position - shape_.k] = false;  // zeros that are not written
      crc = 0;
    }
    if (!entry_right && raw.counters[position * shape_.pages() + row / shape_.rows_per_page()] != 0) found.wrong_pages.insert(row / shape_.rows_per_page());
    if (blank) continue;
    if (known && own.readable[row - piece.first] && crc32c(own.blocks.data() + (row - piece.first) * kBlock, kBlock) == crc) {
      if (!data) next.unsound[row * shape_.m + position - shape_.k] = false;
    } else {
      found.wrong_rows.push_back(row);
    }
  }
  for (size_t page = piece.first_page; page < piece.first_page + piece.pages; ++page) {
    const uint64_t count = raw.counters[position * shape_.pages() + page];  // of the newest intact copy; the next write goes over the other
    uint64_t& counter = next.counters[position * shape_.pages() + page];
    if (count == 0) {
      found.lost_pages.insert(page);  // or never written on this disk
      continue;
    }
    // A stripe begins with one copy of each page, so only with the second write there must be two.
    const auto other = own.pairs.span().subspan((2 * page + ((count + 1) & 1)) * kBlock, kBlock);
    if ((count > 1 || counter > count) && !decode_page(shape_, shards_->store(), stripe->id, position, page, other)) found.bad_copies.insert(page);
    counter = std::max(counter, count);
    if ((counter & 1) != (count & 1)) ++counter;
  }
  return found;
}

// The wrong rows, by decoding, into `blocks` of the piece; those that cannot be stay erasures, and no reason to go without the rest.
Status CodedStore::decode_wrong(const Stripe& stripe, size_t position, const Piece& piece, Compared& found, AlignedBytes& blocks, Rebuilt& done) {
  const uint32_t wanted = uint32_t{1} << position;
  std::vector<size_t> right;
  const auto decode = [&](size_t first, size_t count) -> Status {
    AlignedBytes all(shape_.n() * count * kBlock);
    RowsWanted rows{&stripe, first, count, wanted, all.span(), wanted};
    read_rows({&rows, 1}, Priority::scrub);
    pace_.spend(rows.blocks_read * kBlock);
    STOKER_TRY(rows.status);
    std::memcpy(blocks.data() + (first - piece.first) * kBlock, all.data() + position * count * kBlock, count * kBlock);
    for (size_t row = first; row < first + count; ++row) right.push_back(row);
    return {};
  };
  for (size_t i = 0; i < found.wrong_rows.size();) {
    const size_t first = found.wrong_rows[i];
    size_t count = 1;
    while (i + count < found.wrong_rows.size() && found.wrong_rows[i + count] == first + count) ++count;
    i += count;
    if (decode(first, count)) continue;
    for (size_t row = first; row < first + count; ++row) {
      const Status one = decode(row, 1);
      if (one) continue;
      if (done.lost++ == 0) done.why = one.error().what;
    }
  }
  for (const size_t row : right) {
    uint32_t& crc = found.next.crcs[row * shape_.n() + position];
    const uint32_t now = crc32c(blocks.data() + (row - piece.first) * kBlock, kBlock);
    if (crc != now) found.wrong_pages.insert(row / shape_.rows_per_page());
    crc = now;
    if (position >= shape_.k) found.next.unsound[row * shape_.m + position - shape_.k] = false;
  }
  found.wrong_rows = std::move(right);
  return {};
}

// Blocks first, durable, then the header pages, durable: as in a fold.
Status CodedStore::rebuild_piece(const StripePtr& stripe, size_t position, const Piece& piece, Rebuilt& done) {
  STOKER_ASSIGN(Compared found, compare(stripe, position, piece));
  const size_t shard = stripe->shards[position];
  const std::string& path = (*shards_)[shard].path;
  const size_t slot = stripe->slots[position];
  AlignedBytes decoded(piece.rows * kBlock);
  STOKER_TRY(decode_wrong(*stripe, position, piece, found, decoded, done));
  std::set<size_t> pages = found.lost_pages;
  pages.insert(found.wrong_pages.begin(), found.wrong_pages.end());
  pages.insert(found.bad_copies.begin(), found.bad_copies.end());
  const auto durable = [&](ShardBatch& batch) -> Status {
    if (batch.empty()) return {};
    if (batch.run() != 0) return failing(path, batch.why());
    ShardBatch sync(*shards_, Priority::scrub);
    sync.sync(shard_bit(shard));
    return sync.run() == 0 ? Status() : failing(path, sync.why());
  };
  ShardBatch blocks(*shards_, Priority::scrub);
  const std::vector<size_t>& rows = found.wrong_rows;
  for (size_t i = 0; i < rows.size();) {
    size_t count = 1;
    while (i + count < rows.size() && rows[i + count] == rows[i] + count) ++count;
    blocks.write(shard, shape_.block_at(slot, rows[i]), decoded.slice().sub((rows[i] - piece.first) * kBlock, count * kBlock));
    i += count;
  }
  pace_.spend((rows.size() + pages.size()) * kBlock);
  STOKER_TRY(durable(blocks));
  ShardBatch headers(*shards_, Priority::scrub);
  std::vector<AlignedBytes> memory;
  const auto write_page = [&](size_t page) {
    const HeaderPage header = page_of(shape_, stripe->id, found.next, position, page);
    found.next.counters[position * shape_.pages() + page] = header.counter;
    encode_page(shape_, shards_->store(), header, memory.emplace_back(kBlock).span());
    headers.write(shard, shape_.page_at(slot, page, header.counter), memory.back().slice());
  };
  for (const size_t page : pages) {
    write_page(page);
    if (found.lost_pages.contains(page)) write_page(page);  // both copies: there is none that a torn write could spoil
  }
  STOKER_TRY(durable(headers));
  install(stripe, std::move(found.next));
  done.blocks += rows.size();
  done.pages += pages.size();
  return {};
}

// Whole header pages, as each is written at once.
Result<bool> CodedStore::rebuild_step(Rebuilding& chunk) {
  const StripePtr stripe = chunk.stripe.lock();
  if (!stripe) return false;
  const size_t at_once = (kRowsRebuilt + shape_.rows_per_page() - 1) / shape_.rows_per_page();
  Piece piece{chunk.page, std::min(at_once, shape_.pages() - chunk.page), chunk.page * shape_.rows_per_page(), 0};
  piece.rows = std::min(piece.pages * shape_.rows_per_page(), shape_.rows() - piece.first);
  STOKER_TRY(rebuild_piece(stripe, chunk.position, piece, chunk.done));
  chunk.page += piece.pages;
  if (chunk.page < shape_.pages()) return true;
  if (chunk.done.lost > 0) {
    note_loss(stripe, chunk.position, chunk.done.why);
  } else {
    std::lock_guard lock(mutex_);
    lost_.erase({stripe->id, chunk.position});
    if (chunk.done.blocks > 0) stuck_.erase(stripe->id);
  }
  return false;
}

Result<CodedStore::Rebuilt> CodedStore::rebuild(const StripePtr& stripe, size_t position) {
  Rebuilding chunk{stripe, position};
  for (;;) {
    STOKER_ASSIGN(const bool more, rebuild_step(chunk));
    if (!more) return std::move(chunk.done);
  }
}

}  // namespace stoker::coded
