#include "stoker/store/coded/commit/committer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"
#include "stoker/store/coded/format/headers.h"
#include "stoker/store/coded/format/rows.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

constexpr size_t kFreshRows = 256;           // of a stripe that is written anew, in memory at once
constexpr size_t kPagesMax = 2 * kMiB;       // of header pages that wait for the VALs
constexpr size_t kPagesUnderWay = 6 * kMiB;  // or as many as one stripe has

// An update of blocks in one chunk that changes no size: one VAL a shard says it all.
bool is_update(const TransactionState& state) {
  if (state.objects.size() != 1) return false;
  const StagedObject& object = state.objects.begin()->second;
  if (!object.exists || object.made || !object.base || object.stated ||
      object.bytes != object.base->bytes || object.kept != object.bytes ||
      object.stripes.size() != 1)
    return false;
  const StagedStripe& stripe = object.stripes.begin()->second;
  return !stripe.fresh && stripe.chunks.size() == 1;
}

void put_items(ByteWriter& out, const Shape& shape, std::string_view key,
               const StagedObject& object, Version number) {
  const auto stripes_of = [&](uint64_t bytes) {
    return (bytes + shape.stripe_bytes() - 1) / shape.stripe_bytes();
  };
  if (object.base && (!object.exists || object.made)) put_remove(out, key);
  if (!object.exists) return;
  const bool cut =
      object.base && !object.made && stripes_of(object.kept) < object.base->stripes.size();
  // the stripes behind go, although it grew again
  if (cut && object.kept < object.bytes)
    put_object(out, key, object.kept, object.chunk_bytes, number);
  put_object(out, key,
             object.base && !object.made && mutated(Mutation::size_outside_commit)
                 ? object.base->bytes
                 : object.bytes,
             object.chunk_bytes, number);
  // What was told when it was made is kept, too: a store that is open for one command learns
  // nothing else.
  if (object.stated || (object.made && object.expected != Class::read_write))
    put_class(out, {object.expected, object.stated});
  for (const auto& [index, stripe] : object.stripes) {
    if (stripe.fresh) put_stripe(out, index, *stripe.fresh);
  }
}

}  // namespace

// For the frames of the logs: VALs go to 1 + m shards, a COMMIT to all.
Result<Grant> Committer::take_frames(const std::vector<CommitRequest>& batch) const {
  uint64_t bytes = 0;
  for (const CommitRequest& request : batch)
    bytes += (1 + shape_.m) * request.state->log_bytes +
             shape_.shards * (log_bytes(*request.state) - request.state->log_bytes);
  return budget_.take(bytes, "the log records of a commit of a coded store");
}

Status Committer::check_requirements(const TransactionState& state) const {
  const auto map = map_.lock();
  for (const auto& [key, tag] : state.required) {
    const ObjectPtr found = map->table.find(key);
    STOKER_TRY(check_required(key, tag, found ? tag_of(*found) : std::string()));
  }
  return {};
}

void Committer::commit(std::vector<CommitRequest> batch) {
  STOKER_CHECK(!batch.empty());
  uint64_t bytes = 4 * kBlock;
  for (const CommitRequest& request : batch) {
    STOKER_CHECK(request.state && request.state->done && !request.state->failed);
    // what its conditions are of is what the commits before it left
    STOKER_CHECK(&request == &batch.front() || request.state->required.empty());
    bytes += log_bytes(*request.state);
  }
  bytes += logs_.rounds().item_bytes(shape_);
  Status status = make_room(bytes);
  auto frames = status ? take_frames(batch) : Result<Grant>(status.error());
  if (!frames) status = frames.error();
  // each by itself may fit the cap
  if (!status && status.error().code == Code::over_budget && batch.size() > 1) {
    for (CommitRequest& request : batch) {
      std::vector<CommitRequest> one;
      one.push_back(std::move(request));
      commit(std::move(one));
    }
    return;
  }
  std::vector<Prepared> commits;
  ShardSet touched = 0;
  Version next = 0;
  uint64_t epoch = 0;
  uint64_t table_bytes = 0;  // added by the commits before
  {
    const auto map = map_.lock();
    next = map->version + 1;
    epoch = map->epoch;
    if (map->refused) status = *map->refused;
  }
  size_t waiting = 0;  // bytes of pages that go with the VALs, of all commits
  for (CommitRequest& request : batch) {
    Prepared& commit = commits.emplace_back();
    commit.request = &request;
    commit.status = status;
    if (commit.status) commit.status = check_requirements(*request.state);
    if (!commit.status) continue;
    commit.stamp = make_stamp(epoch, next);
    STOKER_CHECK(number_of(commit.stamp) == next);
    prepare(commit, table_bytes);
    if (commit.status) bound_pages(commit, waiting);
    if (commit.status) ++next;
  }
  std::vector<Prepared> going;
  std::vector<std::pair<CommitRequest*, Status>> failed;
  for (Prepared& commit : commits) {
    if (commit.status) {
      for (const auto& [id, stripe] : commit.fresh) {
        for (const size_t shard : stripe->shards)
          touched |= mutated(Mutation::commit_before_blocks) ? 0 : shard_bit(shard);
      }
      going.push_back(std::move(commit));
    } else {
      failed.emplace_back(commit.request, commit.status);
    }
  }
  while (!pages_.empty()) finish_pages();
  Status written = std::exchange(pages_failed_, {});
  if (!going.empty()) {
    if (written) written = append_vals(going, touched);
    if (written) written = append_commits(going);
    if (written) {
      flip(going);
    } else {
      // What of it is durable shows when the store is opened again; until then its numbers must not
      // be drawn again.
      const auto map = map_.lock();
      if (!map->refused)
        map->refused = fail(Code::read_only, "a commit failed half-way ({}): open the store again",
                            written.error().what);
      for (Prepared& commit : going) failed.emplace_back(commit.request, written);
      going.clear();
    }
  }
  for (const auto& [request, why] : failed) {
    const auto map = map_.lock();
    for (const auto& [key, object] : request->state->objects)
      STOKER_CHECK(map->owned.erase(key) == 1);
  }
  std::vector<std::pair<CommitRequest*, Result<Version>>> done;
  done.reserve(going.size() + failed.size());
  for (const Prepared& commit : going) done.emplace_back(commit.request, number_of(commit.stamp));
  for (const auto& [request, why] : failed) done.emplace_back(request, why.error());
  // Whoever is told finds the space free that the commit gave up: we hold none of its stripes any
  // more, and no memory for it.
  if (frames) *frames = Grant();
  going.clear();
  commits.clear();
  for (CommitRequest& request : batch) request.state.reset();
  for (auto& [request, result] : done) request->committed.complete(std::move(result));
}

// Table items, VALs and fresh stripes of one commit; the fresh stripes are written, not flushed.
void Committer::prepare(Prepared& commit, uint64_t& table_bytes) {
  TransactionState& state = *commit.request->state;
  MutexLock lock(state.mutex);
  std::vector<StagedStripe*> better = write_better(commit, state);
  commit.status = name_stripes(commit, state, table_bytes);
  if (!commit.status && !better.empty()) {
    for (StagedStripe* stripe : better) stripe->fresh.reset();
    better.clear();
    commit.status = name_stripes(commit, state, table_bytes);
  }
  if (!commit.status) return;
  state.under_way.clear();  // the stripes have them, or they are not wanted any more
  for (auto& [key, object] : state.objects) {
    commit.touched.push_back({key, object.made, object.announced,
                              object.stated ? std::optional(object.expected) : std::nullopt,
                              std::move(object.writes)});
    for (auto& [index, stripe] : object.stripes) {
      if (stripe.fresh) {
        commit.fresh[stripe.fresh->id] = stripe.fresh;
        if (std::find(better.begin(), better.end(), &stripe) == better.end())
          commit.status = write_fresh(commit, stripe, &commit.pages);
        if (!commit.status) return;
        continue;
      }
      STOKER_CHECK(stripe.base != nullptr);
      for (auto& [position, chunk] : stripe.chunks) {
        STOKER_CHECK(position < shape_.k && chunk.rows.size() == shape_.rows());
        for (size_t row = 0; row < chunk.rows.size(); ++row) {
          if (!chunk.rows[row]) continue;
          NewVal added{std::make_shared<Val>(), stripe.base, {}};
          Val& val = *added.val;
          val.stamp = commit.stamp;
          val.stripe = stripe.base->id;
          val.chunk = position;
          val.first = row;
          for (; row < chunk.rows.size() && chunk.rows[row]; ++row)
            val.crcs.push_back(crc32c(chunk.bytes.data() + row * kBlock, kBlock));
          added.blocks = {chunk.bytes.data() + val.first * kBlock, val.crcs.size() * kBlock};
          commit.vals.push_back(std::move(added));
        }
      }
    }
  }
}

// Stripes of objects that will not be rewritten, from a chunk on, are written anew: logged, that is
// appended 1 + m times, read, staged and written, about as much as the rest of the stripe, and
// nothing comes to share its fold. Where that cannot be (no slot; something of the rest is lost)
// the log takes them: a class makes no commit fail.
std::vector<StagedStripe*> Committer::write_better(Prepared& commit, TransactionState& state) {
  std::vector<StagedStripe*> better;
  for (auto& [key, object] : state.objects) {
    for (auto& [index, stripe] : object.stripes) {
      if (stripe.fresh || object.expected == Class::read_write || stripe.blocks < shape_.rows())
        continue;
      auto fresh = map_.make_stripe(object.expected);
      if (!fresh) continue;
      stripe.fresh = std::move(*fresh);
      if (write_fresh(commit, stripe, nullptr)) {
        better.push_back(&stripe);
      } else {
        stripe.fresh.reset();
      }
    }
  }
  return better;
}

// The table items of a commit, if there is room for them.
Status Committer::name_stripes(Prepared& commit, const TransactionState& state,
                               uint64_t& table_bytes) const {
  commit.needs_commit = !is_update(state);
  ByteWriter items;
  for (const auto& [key, object] : state.objects) {
    if (commit.needs_commit) put_items(items, shape_, key, object, number_of(commit.stamp));
  }
  commit.items = items.take();
  if (commit.items.size() > shape_.segment_bytes / 4)
    return fail(Code::invalid_argument,
                "the transaction changes more stripes than one record of the log can name: commit "
                "it in parts");
  const bool adds = std::any_of(state.objects.begin(), state.objects.end(),
                                [](const auto& each) { return each.second.exists; });
  if (!commit.needs_commit || !adds) return {};
  const uint64_t added = commit.items.size() * 9 / 8 + 64;
  const auto map = map_.lock();
  if (map->table.image_bytes(shape_) + table_bytes + added > shape_.area_bytes)
    return fail(Code::out_of_space,
                "the object table of the store {} is full: remove objects, or make a store for "
                "more of them",
                map_.name());
  table_bytes += added;
  return {};
}

// What the fresh stripe will hold of its own: old blocks where they are not overwritten, and the
// new ones.
Headers Committer::plan_fresh(const Prepared& commit, const StagedStripe& staged) const {
  Headers headers = blank_headers(shape_);
  const auto map = map_.lock();
  STOKER_CHECK(!staged.base || staged.base->has_whole_headers());
  for (size_t chunk = 0; chunk < shape_.k; ++chunk) {
    for (size_t row = 0; row < shape_.rows(); ++row) {
      const size_t at = row * shape_.k + chunk;
      const bool old = staged.base && (staged.base->headers->versions[at] != 0 ||
                                       staged.base->overlay.contains(at));
      if (old || staged.has(chunk, row)) headers.versions[at] = commit.stamp;
    }
  }
  return headers;
}

// Old content where it is not overwritten, the new blocks, and their parity go into the slots of
// the fresh stripe, some rows at a time.
Status Committer::write_fresh(const Prepared& commit, StagedStripe& staged,
                              std::vector<LogSet::Beside>* later) {
  const Stripe& fresh = *staged.fresh;
  STOKER_CHECK(fresh.readers == 0);  // it is in no object yet
  HeaderPins pins(map_);
  if (staged.base) pins.add(*map_.lock(), staged.base);
  if (staged.base) STOKER_TRY(reader_.load_headers(staged.base, Priority::write_back));
  Headers headers = plan_fresh(commit, staged);
  uint32_t positions = map_.live_positions(fresh);
  // What comes while a shard is rebuilt goes there too, or it would never have all. It counts for
  // nothing until then.
  size_t joining = shape_.n();
  if (joining_.shard())
    joining =
        static_cast<size_t>(std::find(fresh.shards.begin(), fresh.shards.end(), *joining_.shard()) -
                            fresh.shards.begin());
  if (staged.early) staged.early->finish();
  const uint32_t written = staged.early ? staged.early->written() : 0;
  const bool early = staged.early && (positions & ~written) == 0;
  // One that was on its way before the shard began to join comes to it later, as what is older.
  if (early && joining < shape_.n() && !is_set(written, joining)) joining = shape_.n();
  if (joining < shape_.n()) positions |= uint32_t{1} << joining;
  ShardSet failed = 0;
  if (early) staged.early->tell(headers, positions);
  for (size_t first = 0; first < shape_.rows() && !early;) {
    if (row_is_blank(shape_, headers, first)) {
      ++first;
      continue;
    }
    STOKER_ASSIGN(const ScratchPtr memory,
                  reader_.take_scratch(std::min(kFreshRows, shape_.rows() - first), shape_.n(),
                                       "writing a stripe of a coded store"));
    STOKER_TRY(write_fresh_rows(staged, first, *memory, positions, headers, failed));
    // else again, in other memory: a disk was given up, and refuses from then on
    if (!memory->bytes.lost()) first += memory->rows;
  }
  // All pages of all chunks: a page that is not there is then a lost one, never one that was not
  // written.
  std::vector<LogSet::Beside> pages;
  for (size_t c = 0; c < shape_.n(); ++c) {
    if (!is_set(positions, c)) continue;
    // In one piece: zeros go between them, over what an older stripe left there.
    const uint64_t slot = shape_.slot_at(fresh.slots[c]);
    pages.push_back({fresh.shards[c], slot, AlignedBytes(header_bytes(shape_))});
    const AlignedBytes& pairs = pages.back().bytes;
    std::memset(pairs.data(), 0, pairs.size());
    for (size_t page = 0; page < shape_.pages(); ++page) {
      const HeaderPage header = page_of(shape_, fresh.id, headers, c, page);
      headers.counters[c * shape_.pages() + page] = header.counter;
      const uint64_t at = shape_.page_at(fresh.slots[c], page, header.counter) - slot;
      encode_page(shape_, shards_.store(), header, pairs.span().subspan(at, kBlock));
    }
  }
  // Those of all stripes of a commit go at once. But whether the joining shard has its own is to be
  // known here.
  if (later != nullptr && joining == shape_.n()) {
    std::move(pages.begin(), pages.end(), std::back_inserter(*later));
    pages.clear();
    if (later->size() * header_bytes(shape_) >= kPagesMax) start_pages(std::exchange(*later, {}));
  }
  STOKER_TRY(write_pages(pages, failed));
  if (joining < shape_.n() && (failed & joining_.set()) == 0) joining_.wrote(fresh.id);
  staged.stands = std::exchange(staged.early, nullptr) != nullptr;
  const auto map = map_.lock();
  staged.fresh->headers = std::make_shared<Headers>(std::move(headers));
  return {};
}

// Header pages of a batch that are more than kPagesMax are written before its VALs.
void Committer::bound_pages(Prepared& commit, size_t& waiting) {
  const size_t bytes = commit.pages.size() * header_bytes(shape_);
  if (waiting + bytes < kPagesMax) {
    waiting += bytes;
  } else {
    start_pages(std::exchange(commit.pages, {}));
  }
}

// The next ones are made while these are written.
void Committer::start_pages(std::vector<LogSet::Beside> pages) {
  size_t all = pages.size();
  for (const auto& each : pages_) all += each->pages.size();
  for (; !pages_.empty() && all * header_bytes(shape_) > kPagesUnderWay; finish_pages())
    all -= pages_.front()->pages.size();
  auto under_way = std::make_unique<PagesUnderWay>(shards_, std::move(pages));
  for (const LogSet::Beside& page : under_way->pages)
    under_way->batch.write(page.shard, page.offset, page.bytes.slice());
  under_way->batch.start();
  pages_.push_back(std::move(under_way));
}

// The oldest of those that are on their way. Whichever commit they are of: none goes on without
// them.
void Committer::finish_pages() {
  const std::unique_ptr<PagesUnderWay> oldest = std::move(pages_.front());
  pages_.pop_front();
  const ShardSet failed = oldest->batch.finish();
  if (failed == 0) return;
  const Status dropped = logs_.drop_shards(failed, oldest->batch.why());
  if (pages_failed_) pages_failed_ = dropped;
}

Status Committer::write_pages(const std::vector<LogSet::Beside>& pages, ShardSet& failed) {
  ShardBatch batch(shards_, Priority::write_back);
  for (const LogSet::Beside& page : pages) batch.write(page.shard, page.offset, page.bytes.slice());
  const ShardSet now = batch.run();
  failed |= now;
  return now == 0 ? Status() : logs_.drop_shards(now, batch.why());
}

// The rows from `first` on that `memory` is for, unless it is lost() then. Of those in which
// nothing is written nothing is.
Status Committer::write_fresh_rows(const StagedStripe& staged, size_t first, const Scratch& memory,
                                   uint32_t positions, Headers& headers, ShardSet& failed) {
  const Stripe& fresh = *staged.fresh;
  const size_t rows_end = first + memory.rows;
  STOKER_CHECK(memory.rows > 0 && rows_end <= shape_.rows());
  const auto at = [&](size_t chunk, size_t row) {
    return memory.bytes.data() + (chunk * memory.rows + row - first) * kBlock;
  };
  std::memset(memory.bytes.data(), 0, shape_.k * memory.rows * kBlock);
  if (staged.early) {
    Status read =
        staged.early->read_rows(first, memory.rows, memory.bytes.span(), Priority::write_back);
    if (memory.bytes.lost()) return {};
    if (!read) return read;
  }
  std::vector<std::pair<size_t, size_t>> old;  // chunk, row
  for (size_t chunk = 0; chunk < shape_.k && !staged.early; ++chunk) {
    const auto over = staged.chunks.find(chunk);
    for (size_t row = first; row < rows_end; ++row) {
      if (over != staged.chunks.end() && over->second.rows[row]) {
        std::memcpy(at(chunk, row), over->second.bytes.data() + row * kBlock, kBlock);
      } else if (headers.versions[row * shape_.k + chunk] != 0) {
        old.emplace_back(chunk, row);
      }
    }
  }
  STOKER_CHECK(old.empty() || staged.base);
  std::vector<Run> runs;
  {
    const auto map = map_.lock();
    for (const auto& [chunk, row] : old)
      reader_.plan_chunk(staged.base, chunk, row, 1, at(chunk, row), runs);
  }
  const Status fetched = reader_.fetch(runs, Priority::write_back);
  if (memory.bytes.lost()) return {};
  if (!fetched) return fetched.error();
  ShardBatch batch(shards_, Priority::write_back);
  // rows in which anything is written, as many as stand together at once
  for (size_t begin = first; begin < rows_end;) {
    size_t end = begin;
    while (end < rows_end && !row_is_blank(shape_, headers, end)) ++end;
    if (end == begin) {
      ++begin;
      continue;
    }
    const size_t count = end - begin;
    std::vector<std::vector<uint32_t>> crcs(shape_.n(), std::vector<uint32_t>(count));
    std::vector<codec::Source> sources(shape_.k);
    std::vector<codec::Target> targets(shape_.m);
    for (size_t c = 0; c < shape_.k; ++c) sources[c] = {{at(c, begin), count * kBlock}, crcs[c]};
    for (size_t j = 0; j < shape_.m; ++j)
      targets[j] = {{at(shape_.k + j, begin), count * kBlock}, crcs[shape_.k + j]};
    STOKER_TRY(code_.encode(sources, targets));
    for (size_t c = 0; c < shape_.n(); ++c) {
      for (size_t row = begin; row < end; ++row) {
        const bool written = c >= shape_.k || headers.versions[row * shape_.k + c] != 0;
        headers.crcs[row * shape_.n() + c] = written ? crcs[c][row - begin] : 0;
        if (c >= shape_.k && !is_set(positions, c))
          headers.unsound[row * shape_.m + c - shape_.k] = true;
      }
      for (size_t row = begin; row < end && is_set(positions, c);) {
        size_t to = row;
        while (to < end && (c >= shape_.k || headers.versions[to * shape_.k + c] != 0)) ++to;
        if (to > row)
          batch.write(fresh.shards[c], shape_.block_at(fresh.slots[c], row),
                      memory.bytes.slice().sub((c * memory.rows + row - first) * kBlock,
                                               (to - row) * kBlock));
        row = to + 1;
      }
    }
    begin = end;
  }
  const ShardSet now = batch.run();
  failed |= now;
  return now == 0 ? Status() : logs_.drop_shards(now, batch.why());
}

// One frame a shard with all VALs that belong there; then everything the batch has written so far
// is flushed.
Status Committer::append_vals(std::vector<Prepared>& commits, ShardSet& touched) {
  std::map<size_t, FrameBuilder> frames;
  struct Home {
    Val* val;
    size_t shard, at;
  };
  std::vector<Home> homes;
  for (Prepared& commit : commits) {
    const auto record = commit.needs_commit
                            ? std::make_shared<CommitRecord>(CommitRecord{commit.stamp, {}})
                            : nullptr;
    for (NewVal& added : commit.vals) {
      Val& val = *added.val;
      val.commit = record;
      const uint32_t positions = map_.live_positions(*added.stripe);
      for (size_t c = 0; c < shape_.n(); ++c) {
        if ((positions >> c & 1) == 0 || (c < shape_.k && c != val.chunk)) continue;
        if (mutated(Mutation::acknowledge_before_parity) && c > shape_.k) continue;
        const size_t shard = added.stripe->shards[c];
        FrameBuilder& frame = frames[shard];
        homes.push_back({&val, shard, frame.block_count()});
        frame.add(ValItem{val.stamp, commit.needs_commit && !mutated(Mutation::val_without_flag),
                          val.stripe, val.chunk, val.first, val.crcs, 0},
                  added.blocks);
      }
    }
  }
  std::vector<LogSet::Beside> pages;
  for (Prepared& commit : commits)
    std::move(commit.pages.begin(), commit.pages.end(), std::back_inserter(pages));
  std::map<size_t, LogFrame> written;
  STOKER_TRY(logs_.append(frames, touched, written, pages));
  for (const Home& home : homes) {
    const auto frame = written.find(home.shard);
    if (frame == written.end()) continue;  // the shard was dropped
    home.val->places.push_back({home.shard, frame->second.blocks_at + home.at * kBlock});
    home.val->held.push_back(frame->second.segment);
  }
  for (const Prepared& commit : commits) {
    for (const NewVal& added : commit.vals) logs_.rounds().add(added.val);
  }
  return {};
}

Status Committer::append_commits(std::vector<Prepared>& commits) {
  std::map<size_t, FrameBuilder> frames;
  const ShardSet set = map_.live();
  for (const Prepared& commit : commits) {
    if (!commit.needs_commit || mutated(Mutation::drop_commit)) continue;
    for (size_t shard = 0; shard < shape_.shards; ++shard) {
      if ((set & shard_bit(shard)) != 0) frames[shard].add(CommitItem{commit.stamp, commit.items});
    }
  }
  if (frames.empty()) return {};
  std::map<size_t, LogFrame> written;
  STOKER_TRY(logs_.append(frames, 0, written));
  STOKER_CHECK(!written.empty());
  for (Prepared& commit : commits) {
    if (!commit.needs_commit) continue;
    auto record = commit.vals.empty()
                      ? std::make_shared<CommitRecord>(CommitRecord{commit.stamp, {}})
                      : commit.vals.front().val->commit;
    STOKER_CHECK(record && record->stamp == commit.stamp);
    for (const auto& [shard, frame] : written) record->held.push_back(frame.segment);
    logs_.rounds().add(record);
    logs_.hold_until_image(std::move(record));
  }
  return {};
}

// What is durable becomes visible, all of a batch at one moment.
void Committer::flip(std::vector<Prepared>& commits) {
  const auto map = map_.lock();
  for (Prepared& commit : commits) {
    const auto resolve = [&](uint64_t id, const std::vector<uint32_t>&) {
      return commit.fresh.at(id);
    };
    const Status applied = map->table.apply(shape_, commit.items, resolve);
    STOKER_CHECK(applied.has_value());  // these are our own items
    STOKER_CHECK(number_of(commit.stamp) > map->version &&
                 commit.stamp >> kNumberBits <= map->epoch);
    map->version = number_of(commit.stamp);
    for (const auto& [id, stripe] : commit.fresh) map->headers.admit(stripe);
    for (const NewVal& added : commit.vals) {
      // one of its copies at least is on a live shard
      STOKER_CHECK(!added.val->places.empty() || mutated(Mutation::acknowledge_before_parity));
      STOKER_CHECK(added.val->places.size() == added.val->held.size());
      STOKER_CHECK(added.val->first + added.val->crcs.size() <= shape_.rows());
      for (size_t i = 0; i < added.val->crcs.size(); ++i)
        added.stripe->overlay[(added.val->first + i) * shape_.k + added.val->chunk] = {added.val,
                                                                                       i};
      map->dirty[added.stripe->id] = added.stripe;
      logs_.hold_until_image(added.val);
    }
    for (const Touched& touched : commit.touched) {
      const ObjectPtr object = map->table.find(touched.key);
      if (object && !commit.needs_commit) object->number = map->version;
      STOKER_CHECK(map->owned.erase(touched.key) == 1);
      const uint64_t id = class_id(touched.key);
      const uint32_t folder = class_volume(touched.key);
      if (!object) map->classes.forget(id);
      if (!object) continue;
      if (touched.made) map->classes.create(id, {folder, touched.key, touched.announced});
      if (touched.stated) map->classes.set(id, folder, {*touched.stated, true});
      for (const auto& [offset, bytes] : touched.writes)
        map->classes.see(id, {folder, true, offset, bytes});
    }
  }
}

// A full log holds commits up until enough is folded; it fails them only if nothing is left to
// fold.
Status Committer::make_room(size_t bytes) {
  bool again = false;
  for (;;) {
    if (logs_.fits(bytes)) return {};
    const auto done = folder_.step({.stripes = kFoldAtOnce, .oldest = true});
    if (!done && done.error().code != Code::over_budget) return done.error();
    const size_t folded = done ? *done : 0;
    {
      const auto map = map_.lock();
      map->counts.awaited_folds += folded;
    }
    const bool held = logs_.image_frees();
    if (held) STOKER_TRY(joining_.checkpoint());
    if (logs_.fits(bytes)) return {};
    if (!done) return done.error();
    if (folded > 0 || held) continue;
    // What could not be folded once may be by now.
    const auto map = map_.lock();
    if (again || map->stuck.empty()) break;
    map->stuck.clear();
    again = true;
  }
  return fail(Code::out_of_space,
              "the logs of the store {} have no room for {}: commit less at a time", map_.name(),
              human_bytes(bytes));
}

// What a commit may add to a shard's log at most: VALs, and the record that names its stripes.
uint64_t Committer::log_bytes(const TransactionState& state) const {
  uint64_t bytes = state.log_bytes + state.log_bytes / 16 + kBlock;
  for (const auto& [key, object] : state.objects)
    bytes += 3 * (key.size() + 30) + object.stripes.size() * (13 + 4 * shape_.n());
  return bytes;
}

}  // namespace stoker::coded
