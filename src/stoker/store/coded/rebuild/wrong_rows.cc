#include "stoker/store/coded/rebuild/wrong_rows.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/crc32c.h"

namespace stoker::coded {

WrongRows::WrongRows(CommittedMap& map, Shards& shards, Reader& reader, Pace& pace,
                     const Stripe& stripe, size_t position, Compared& found, Rebuilt& done)
    : map_(map),
      shards_(shards),
      shape_(shards.shape()),
      reader_(reader),
      pace_(pace),
      stripe_(stripe),
      position_(position),
      found_(found),
      done_(done),
      wrong_(std::exchange(found.wrong_rows, {})),
      rows_(reader.rows_of_share(kRowsAtOnce, shape_.n())) {}

Status WrongRows::run() {
  STOKER_TRY(pass());
  while (!again_.empty()) {
    wrong_ = std::exchange(again_, {});
    at_ = 0;
    rows_ = 1;
    STOKER_TRY(pass());
  }
  return written();
}

Status WrongRows::pass() {
  std::unique_ptr<Part> now;
  while (now || at_ < wrong_.size()) {
    if (!now) {
      auto begun = begin();
      if (!begun && writing_) {  // that has some of the cap
        STOKER_TRY(written());
        begun = begin();
      }
      if (!begun) return begun.error();
      now = std::move(*begun);
    }
    std::unique_ptr<Part> ahead;
    if (at_ < wrong_.size()) {
      // else there is no room for two, and it begins when this one is done
      if (auto begun = begin()) ahead = std::move(*begun);
    }
    STOKER_TRY(finish(*now));
    now = std::move(ahead);
  }
  return {};
}

// As many of the next rows as there is room for, those that stand together as one.
Result<std::unique_ptr<WrongRows::Part>> WrongRows::begin() {
  auto part = std::make_unique<Part>();
  STOKER_ASSIGN(part->memory, reader_.take_scratch(std::min(rows_, wrong_.size() - at_), shape_.n(),
                                                   "rebuilding a chunk of a coded store"));
  std::span<std::byte> blocks = part->memory->bytes.span();
  STOKER_CHECK(part->memory->rows > 0 && part->memory->rows <= wrong_.size() - at_);
  for (size_t left = part->memory->rows; left > 0;) {
    size_t count = 1;
    while (count < left && wrong_[at_ + count] == wrong_[at_] + count) ++count;
    const uint32_t position = uint32_t{1} << position_;
    part->rows.push_back({&stripe_, wrong_[at_], count, position,
                          blocks.first(shape_.n() * count * kBlock), position});
    blocks = blocks.subspan(shape_.n() * count * kBlock);
    at_ += count;
    left -= count;
  }
  part->reads.emplace(shards_, map_.live(), part->rows, part->memory, Priority::scrub);
  return part;
}

// The writes that it begins are waited for by the next one: until then it keeps the memory.
Status WrongRows::finish(Part& part) {
  reader_.finish_rows(*part.reads);
  STOKER_TRY(written());
  if (part.memory->bytes.lost()) {  // a disk was given up that may still write there
    for (const RowsWanted& rows : part.rows) read_again(rows);
    return {};
  }
  STOKER_CHECK(!writing_);
  writing_.emplace(part.memory, shards_);
  for (const RowsWanted& rows : part.rows) {
    pace_.spend(rows.blocks_read * kBlock);
    if (rows.status) {
      take(rows);
    } else {
      lose(rows);
    }
  }
  writing_->transfers.start();
  return {};
}

void WrongRows::take(const RowsWanted& rows) {
  const std::span<std::byte> blocks =
      rows.blocks.subspan(position_ * rows.count * kBlock, rows.count * kBlock);
  for (size_t r = 0; r < rows.count; ++r) {
    const size_t row = rows.first + r;
    uint32_t& crc = found_.next.crcs[row * shape_.n() + position_];
    const uint32_t now = crc32c(blocks.data() + r * kBlock, kBlock);
    if (crc != now) found_.wrong_pages.insert(row / shape_.rows_per_page());
    crc = now;
    if (position_ >= shape_.k) found_.next.unsound[row * shape_.m + position_ - shape_.k] = false;
    found_.wrong_rows.push_back(row);
  }
  const Slice from = writing_->memory->bytes.slice();
  writing_->transfers.write(
      stripe_.shards[position_], shape_.block_at(stripe_.slots[position_], rows.first),
      from.sub(static_cast<size_t>(blocks.data() - from.data), blocks.size()));
}

void WrongRows::read_again(const RowsWanted& rows) {
  for (size_t r = 0; r < rows.count; ++r) again_.push_back(rows.first + r);
}

void WrongRows::lose(const RowsWanted& rows) {
  if (rows.count > 1) {
    read_again(rows);
  } else if (done_.lost++ == 0) {
    done_.why = rows.status.error().what;
  }
}

Status WrongRows::written() {
  if (!writing_) return {};
  const std::string why = writing_->transfers.finish();
  writing_.reset();
  if (why.empty()) return {};
  return fail(Code::io, "a chunk on the shard '{}' cannot be rebuilt: {}",
              shards_[stripe_.shards[position_]].path, why);
}

}  // namespace stoker::coded
