// Rebuilding a chunk: what a shard has of it is compared with what the headers of all say, and
// written where it differs.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/log.h"
#include "stoker/store/coded/rebuild/rebuilder.h"
#include "stoker/store/coded/rebuild/wrong_rows.h"

namespace stoker::coded {
namespace {

// at least, in a step, if the chunk has so many: commits wait for one
constexpr size_t kRowsRebuilt = 256;
constexpr size_t kChunksAtOnce = 4;

Error not_rebuilt(const std::string& path, const std::string& why) {
  return fail(Code::io, "a chunk on the shard '{}' cannot be rebuilt: {}", path, why);
}

bool all_known(const HeaderPage& page) {
  return std::all_of(page.data.begin(), page.data.end(),
                     [](const DataEntry& entry) { return entry.version != kUnknown; }) &&
         std::all_of(page.parity.begin(), page.parity.end(),
                     [](const ParityEntry& entry) { return entry.versions[0] != kUnknown; });
}

}  // namespace

// What the chunk's own intact entries say beyond what is known: they could not be read when the
// stripe's headers were. As in RawHeaders::merge the newest version counts, and a parity is sound
// if its entry is of these versions.
bool Rebuilder::adopt(Headers& headers, const RawHeaders& own, size_t position) const {
  bool adopted = false;
  for (size_t row = 0; row < shape_.rows(); ++row) {
    const auto offer = [&](size_t chunk, Stamp version, uint32_t crc) {
      Stamp& known = headers.versions[row * shape_.k + chunk];
      if (version == kUnknown || version == known || (known != kUnknown && version < known)) return;
      known = version;
      headers.crcs[row * shape_.n() + chunk] = crc;
      // until their own entries were looked at
      for (size_t j = 0; j < shape_.m; ++j) headers.unsound[row * shape_.m + j] = true;
      adopted = true;
    };
    if (position < shape_.k) {
      if (const auto& entry = own.data[position][row]) offer(position, entry->version, entry->crc);
      continue;
    }
    const auto& entry = own.parity[position - shape_.k][row];
    if (!entry) continue;
    for (size_t chunk = 0; chunk < shape_.k; ++chunk)
      offer(chunk, entry->versions[chunk], entry->crcs[chunk]);
  }
  return adopted;
}

// Nobody looks at the old ones while they change.
void Rebuilder::install(const StripePtr& stripe, Headers headers) {
  auto map = map_.lock();
  STOKER_CHECK(!stripe->folding);
  stripe->folding = true;
  map.wait([&] { return stripe->readers == 0; });
  stripe->headers = std::make_shared<Headers>(std::move(headers));
  stripe->folding = false;
  map_.changed();
}

// What the shard itself has of a piece of a chunk. Where the header pages of one that does not
// count are blank (it was just made, say) there is nothing in its blocks either, and they are not
// read.
Result<Rebuilder::Own> Rebuilder::read_own(const Stripe& stripe, size_t position,
                                           const Piece& piece, RawHeaders& raw) {
  const size_t shard = stripe.shards[position];
  const size_t slot = stripe.slots[position];
  const bool live = is_set(map_.live_positions(stripe), position);
  Own own{AlignedBytes(header_bytes(shape_)), std::vector<std::optional<uint32_t>>(piece.rows)};
  std::memset(own.pairs.data(), 0, own.pairs.size());
  Area pages{shard, shape_.slot_at(slot) + 2 * piece.first_page * kBlock,
             own.pairs.slice().sub(2 * piece.first_page * kBlock, 2 * piece.pages * kBlock)};
  pace_.spend(pages.into.size);
  if (!live) {
    const bool readable = read_areas(shards_, Priority::scrub, {&pages, 1}).empty();
    const auto bytes = pages.into.span();
    if (readable && std::all_of(bytes.begin(), bytes.end(),
                                [](std::byte byte) { return byte == std::byte{0}; }))
      return own;
  }
  for (size_t first = 0; first < piece.rows;) {
    STOKER_ASSIGN(const ScratchPtr memory,
                  reader_.take_scratch(reader_.rows_of_share(piece.rows - first, 1), 1,
                                       "comparing a chunk of a coded store"));
    std::vector<Area> areas = {
        {shard, shape_.block_at(slot, piece.first + first), memory->bytes.slice()}};
    if (live && first == 0) areas.push_back(pages);
    read_areas(shards_, Priority::scrub, areas);
    for (size_t row = 0; row < memory->rows; ++row) {
      if (areas[0].readable[row])
        own.crcs[first + row] = crc32c(memory->bytes.data() + row * kBlock, kBlock);
    }
    pace_.spend(memory->rows * kBlock);
    first += memory->rows;
  }
  raw.take(shape_, shards_.store(), stripe.id, position, own.pairs.span());
  return own;
}

Result<Compared> Rebuilder::compare(const StripePtr& stripe, size_t position, const Piece& piece) {
  const HeaderPins pins(map_, stripe);
  STOKER_TRY(load_headers_paced(stripe));
  RawHeaders raw(shape_);
  STOKER_ASSIGN(const Own own, read_own(*stripe, position, piece, raw));
  Headers next = *stripe->headers;
  // Of a shard that is not live nothing is believed: it may be old.
  if ((map_.live_positions(*stripe) >> position & 1) != 0 && adopt(next, raw, position))
    install(stripe, next);
  return judge(*stripe, position, piece, own, raw, std::move(next));
}

Compared Rebuilder::judge(const Stripe& stripe, size_t position, const Piece& piece, const Own& own,
                          const RawHeaders& raw, Headers headers) const {
  Compared found;
  found.next = std::move(headers);
  Headers& next = found.next;
  const bool data = position < shape_.k;
  for (size_t row = piece.first; row < piece.first + piece.rows; ++row) {
    const Stamp* versions = &next.versions[row * shape_.k];
    const bool blank = is_blank(next, position, row);
    uint32_t& crc = next.crcs[row * shape_.n() + position];
    bool known =
        data ? versions[position] != kUnknown : !next.unsound[row * shape_.m + position - shape_.k];
    bool entry_right = false;
    if (data) {
      const auto& entry = raw.data[position][row];
      entry_right = entry ? entry->version == versions[position] && entry->crc == crc : !known;
    } else if (const auto& entry = raw.parity[position - shape_.k][row]; entry) {
      entry_right = std::equal(versions, versions + shape_.k, entry->versions.begin()) &&
                    (!known || entry->crc == crc);
      if (entry_right && !known) crc = entry->crc;  // it was not live when the headers were read
      known = known || entry_right;
      // its block may be wrong yet: by its CRC
      if (entry_right) next.unsound[row * shape_.m + position - shape_.k] = false;
    }
    if (!data && blank) {
      next.unsound[row * shape_.m + position - shape_.k] = false;  // zeros that are not written
      crc = 0;
    }
    if (!entry_right && raw.counters[position * shape_.pages() + row / shape_.rows_per_page()] != 0)
      found.wrong_pages.insert(row / shape_.rows_per_page());
    if (blank) continue;
    if (known && own.crcs[row - piece.first] == crc) {
      if (!data) next.unsound[row * shape_.m + position - shape_.k] = false;
    } else {
      found.wrong_rows.push_back(row);
    }
  }
  for (size_t page = piece.first_page; page < piece.first_page + piece.pages; ++page) {
    // of the newest intact copy; the next write goes over the other
    const uint64_t count = raw.counters[position * shape_.pages() + page];
    uint64_t& counter = next.counters[position * shape_.pages() + page];
    if (count == 0) {
      found.lost_pages.insert(page);  // or never written on this disk
      continue;
    }
    // A stripe begins with one copy of each page, so only with the second write there must be two.
    const auto other = own.pairs.span().subspan((2 * page + ((count + 1) & 1)) * kBlock, kBlock);
    if ((count > 1 || counter > count) &&
        !decode_page(shape_, shards_.store(), stripe.id, position, page, other))
      found.bad_copies.insert(page);
    counter = std::max(counter, count);
    if ((counter & 1) != (count & 1)) ++counter;
  }
  return found;
}

// All live chunks at once, each block compared with its checksum on its shard's threads.
std::unique_ptr<StripeLook> Rebuilder::begin_look(const StripePtr& stripe) {
  if (shape_.rows() > kRowsRebuilt ||
      reader_.rows_of_share(shape_.rows(), shape_.n()) < shape_.rows())
    return nullptr;
  const HeaderPins pins(map_, stripe);
  if (!load_headers_paced(stripe) || !stripe->overrides.empty()) return nullptr;
  auto memory = reader_.take_scratch(shape_.rows(), shape_.n(), "a scrub of a coded store");
  if (!memory || (*memory)->rows < shape_.rows()) return nullptr;
  auto look = std::make_unique<StripeLook>(shards_, std::move(*memory), *stripe->headers);
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (is_set(map_.live_positions(*stripe), c) && is_known(look->headers, c))
      read_chunk(*stripe, c, *look);
  }
  look->batch.start();
  return look;
}

void Rebuilder::read_chunk(const Stripe& stripe, size_t position, StripeLook& look) {
  StripeLook::Chunk& chunk =
      look.chunks.emplace_back(StripeLook::Chunk{position, AlignedBytes(header_bytes(shape_))});
  const size_t shard = stripe.shards[position], slot = stripe.slots[position];
  chunk.reads.emplace_back(look.batch.read(shard, shape_.slot_at(slot), chunk.pairs.slice()), 0);
  pace_.spend(chunk.pairs.size());
  const Slice blocks = look.memory->bytes.slice();
  for (size_t row = 0; row < shape_.rows();) {
    std::vector<uint32_t> crcs;
    for (size_t r = row; r < shape_.rows() && !is_blank(look.headers, position, r); ++r)
      crcs.push_back(look.headers.crcs[r * shape_.n() + position]);
    const size_t count = crcs.size();
    if (count > 0) {
      const Slice into = blocks.sub((position * shape_.rows() + row) * kBlock, count * kBlock);
      chunk.reads.emplace_back(
          look.batch.read(shard, shape_.block_at(slot, row), into, std::move(crcs)), count);
      pace_.spend(count * kBlock);
    }
    row += count + 1;
  }
}

uint32_t Rebuilder::right_chunks(const Stripe& stripe, StripeLook& look) const {
  look.batch.finish();
  RawHeaders raw(shape_);
  uint32_t right = 0;
  for (StripeLook::Chunk& chunk : look.chunks) {
    const bool came = std::all_of(chunk.reads.begin(), chunk.reads.end(), [&](const auto& read) {
      for (size_t block = 0; block < read.second; ++block) {
        if (!look.batch.right(read.first, block)) return false;
      }
      return look.batch.ok(read.first);
    });
    if (!came) continue;
    raw.take(shape_, shards_.store(), stripe.id, chunk.position, chunk.pairs.span());
    Headers next = look.headers;
    if (adopt(next, raw, chunk.position)) continue;
    Own own{std::move(chunk.pairs), {}};
    for (size_t row = 0; row < shape_.rows(); ++row)
      own.crcs.emplace_back(look.headers.crcs[row * shape_.n() + chunk.position]);
    const Compared found = judge(stripe, chunk.position, {0, shape_.pages(), 0, shape_.rows()}, own,
                                 raw, std::move(next));
    if (found.right() && found.next.counters == look.headers.counters)
      right |= uint32_t{1} << chunk.position;
  }
  return right;
}

bool Rebuilder::is_blank(const Headers& headers, size_t position, size_t row) const {
  return position < shape_.k ? headers.versions[row * shape_.k + position] == 0
                             : row_is_blank(shape_, headers, row);
}

// What each of its blocks should be.
bool Rebuilder::is_known(const Headers& headers, size_t position) const {
  for (size_t row = 0; row < shape_.rows(); ++row) {
    const bool known = position < shape_.k ? headers.versions[row * shape_.k + position] != kUnknown
                                           : !headers.unsound[row * shape_.m + position - shape_.k];
    if (!known) return false;
  }
  return true;
}

// Blocks first, durable, then the header pages, durable: as in a fold. Of a shard that does not
// count nothing is believed until its admission, which flushes it: nothing else does.
Status Rebuilder::rebuild_piece(const StripePtr& stripe, size_t position, const Piece& piece,
                                Rebuilt& done) {
  const HeaderPins pins(map_, stripe);
  STOKER_ASSIGN(Compared found, compare(stripe, position, piece));
  const size_t shard = stripe->shards[position];
  const std::string& path = shards_[shard].path;
  const bool live = is_set(map_.live_positions(*stripe), position);
  const auto durable = [&]() -> Status {
    if (!live) return {};
    ShardBatch sync(shards_, Priority::scrub);
    sync.flush(shard_bit(shard));
    return sync.run() == 0 ? Status() : not_rebuilt(path, sync.why());
  };
  STOKER_TRY(WrongRows(map_, shards_, reader_, pace_, *stripe, position, found, done).run());
  if (!found.wrong_rows.empty()) STOKER_TRY(durable());
  // A page that cannot be read, and of which the others do not know all, may be read again: it is
  // not written over.
  if (live)
    std::erase_if(found.lost_pages, [&](size_t page) {
      return !all_known(page_of(shape_, stripe->id, found.next, position, page));
    });
  std::set<size_t> pages = found.lost_pages;
  pages.insert(found.wrong_pages.begin(), found.wrong_pages.end());
  pages.insert(found.bad_copies.begin(), found.bad_copies.end());
  ShardBatch headers(shards_, Priority::scrub);
  std::vector<AlignedBytes> memory;
  const auto write_page = [&](size_t page) {
    const HeaderPage header = page_of(shape_, stripe->id, found.next, position, page);
    found.next.counters[position * shape_.pages() + page] = header.counter;
    encode_page(shape_, shards_.store(), header, memory.emplace_back(kBlock).span());
    headers.write(shard, shape_.page_at(stripe->slots[position], page, header.counter),
                  memory.back().slice());
  };
  for (const size_t page : pages) {
    write_page(page);
    // both copies: there is none that a torn write could spoil
    if (found.lost_pages.contains(page)) write_page(page);
  }
  pace_.spend((found.wrong_rows.size() + memory.size()) * kBlock);
  if (!headers.empty()) {
    if (live) headers.flush(shard_bit(shard));
    if (headers.run() != 0) return not_rebuilt(path, headers.why());
  }
  install(stripe, std::move(found.next));
  done.blocks += found.wrong_rows.size();
  done.pages += pages.size();
  return {};
}

// Whole header pages, as each is written at once.
Result<bool> Rebuilder::rebuild_step(Rebuilding& chunk) {
  const StripePtr stripe = chunk.stripe.lock();
  if (!stripe) return false;
  STOKER_CHECK(chunk.page < shape_.pages() && chunk.position < shape_.n());
  const size_t at_once = (kRowsRebuilt + shape_.rows_per_page() - 1) / shape_.rows_per_page();
  Piece piece{chunk.page, std::min(at_once, shape_.pages() - chunk.page),
              chunk.page * shape_.rows_per_page(), 0};
  piece.rows = std::min(piece.pages * shape_.rows_per_page(), shape_.rows() - piece.first);
  STOKER_CHECK(piece.rows > 0 && piece.first + piece.rows <= shape_.rows());
  STOKER_TRY(rebuild_piece(stripe, chunk.position, piece, chunk.done));
  chunk.page += piece.pages;
  if (chunk.page < shape_.pages()) return true;
  if (chunk.done.lost > 0) {
    note_loss(stripe, chunk.position, chunk.done.why);
  } else {
    const auto map = map_.lock();
    map->lost.erase({stripe->id, chunk.position});
    if (chunk.done.blocks > 0) map->stuck.erase(stripe->id);
  }
  return false;
}

size_t Rebuilder::at_once() const {
  const size_t rows = kChunksAtOnce * WrongRows::kRowsMost;
  const bool fits =
      shape_.rows() <= kRowsRebuilt && reader_.rows_of_share(rows, shape_.n()) == rows;
  return fits && pace_.free() ? kChunksAtOnce : 1;
}

Result<Rebuilt> Rebuilder::rebuild(const StripePtr& stripe, size_t position) {
  Rebuilding chunk{stripe, position};
  for (;;) {
    STOKER_ASSIGN(const bool more, rebuild_step(chunk));
    if (!more) return std::move(chunk.done);
  }
}

// Before a page is written whose copies could not be read: on the disk they may have higher
// counters than the next one, and count again when the others are gone.
Status Rebuilder::mend_unread(const StripePtr& stripe) {
  uint32_t unread = 0;
  {
    const auto map = map_.lock();
    unread = map->unread_positions(shape_, *stripe);
  }
  for (size_t position = 0; position < shape_.n(); ++position) {
    if (!is_set(unread, position)) continue;
    const auto mended = rebuild(stripe, position);
    if (mended) continue;
    const ShardSet shard = shard_bit(stripe->shards[position]);
    if (mended.error().code == Code::over_budget || !shape_.writable(map_.live() & ~shard))
      return mended.error();
    STOKER_TRY(logs_.drop_shards(shard, mended.error().what));  // it cannot be written
  }
  if (map_.lock()->unread_positions(shape_, *stripe) == 0) return {};
  return fail(Code::corruption,
              "header pages of stripe {} can neither be read nor computed from the others: bring "
              "missing disks back",
              stripe->id);
}

Status Rebuilder::load_headers_paced(const StripePtr& stripe) {
  {
    const auto map = map_.lock();
    if (stripe->has_whole_headers()) return {};
  }
  pace_.spend(static_cast<uint64_t>(std::popcount(map_.live_positions(*stripe))) *
              header_bytes(shape_));
  return reader_.load_headers(stripe, Priority::scrub);
}

void Rebuilder::note_loss(const StripePtr& stripe, size_t position, const std::string& why) {
  {
    const auto map = map_.lock();
    Loss& loss = map->lost[{stripe->id, position}];
    if (std::exchange(loss.why, why) == why) return;  // every scrub finds it again
    loss.stripe = stripe;
  }
  log().warn("{}", why);
}

}  // namespace stoker::coded
