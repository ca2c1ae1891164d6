#include "stoker/store/coded/shards/spare_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kSpareShare = 16;     // a sixteenth of it
constexpr size_t kLargePage = 2 * kMiB;  // what lies in such has whole ones

Grant share_of(Budget& budget) {
  auto share = budget.take(std::min(SpareMemory::kMost, budget.cap() / kSpareShare),
                           "memory that a coded store uses again");
  return share ? std::move(*share) : Grant();
}

SpareBytes whole(AlignedBytes bytes) {
  auto memory = std::make_shared<const AlignedBytes>(std::move(bytes));
  return {memory, memory->span()};
}

// What other pieces share a large page with cannot be freed: its part of the page is emptied.
void release(const SpareBytes& piece) {
  if (piece.memory.use_count() > 1 && !is_lost(piece.bytes.data(), piece.bytes.size()))
    (void)madvise(piece.bytes.data(), piece.bytes.size(), MADV_DONTNEED);
}

}  // namespace

SparePiece::SparePiece(SparePiece&& other) noexcept
    : home_(std::exchange(other.home_, nullptr)), bytes_(std::exchange(other.bytes_, {})) {}

SparePiece& SparePiece::operator=(SparePiece&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  home_ = std::exchange(other.home_, nullptr);
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

SparePiece::~SparePiece() { give_back(); }

void SparePiece::give_back() noexcept {
  if (home_ != nullptr) std::exchange(home_, nullptr)->give_back(std::exchange(bytes_, {}));
}

SpareMemory::SpareMemory(Budget& budget) : share_(share_of(budget)) {}

SparePiece SpareMemory::take(size_t bytes) {
  if (auto spare = kept(bytes)) return {*this, std::move(*spare)};
  if (bytes >= kLeast && bytes < kLargePage && kLargePage % bytes == 0 &&
      share_.bytes() >= kLargePage)
    return {*this, cut(bytes)};
  return {*this, whole(AlignedBytes::faulted(bytes))};
}

SparePiece SpareMemory::take_sparse(size_t bytes) {
  if (auto spare = kept(bytes)) return {*this, std::move(*spare)};
  return {*this, whole(AlignedBytes(bytes))};
}

// A large page in such pieces: one, and the others are kept.
SpareBytes SpareMemory::cut(size_t bytes) {
  const SpareBytes page = whole(AlignedBytes::faulted(kLargePage));
  for (size_t at = bytes; at + bytes <= kLargePage; at += bytes)
    give_back({page.memory, page.bytes.subspan(at, bytes)});
  return {page.memory, page.bytes.first(bytes)};
}

// The newest of this size: the caches may know it yet.
std::optional<SpareBytes> SpareMemory::kept(size_t bytes) {
  if (bytes < kLeast) return {};
  const size_t most = bytes < kLargePage ? bytes : align_up(bytes, kLargePage);
  const MutexLock lock(mutex_);
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), [&](const SpareBytes& each) {
    return each.bytes.size() >= bytes && each.bytes.size() <= most;
  });
  if (found == kept_.rend()) return {};
  SpareBytes spare = std::move(*found);
  kept_.erase(std::next(found).base());
  STOKER_CHECK(kept_bytes_ >= spare.bytes.size());
  kept_bytes_ -= spare.bytes.size();
  return spare;
}

void SpareMemory::give_back(SpareBytes piece) {
  const uint64_t size = piece.bytes.size();
  if (size < kLeast || size > share_.bytes() || is_lost(piece.bytes.data(), size)) {
    release(piece);
    return;
  }
  std::list<SpareBytes> gone;  // outlives the lock
  {
    const MutexLock lock(mutex_);
    kept_.push_back(std::move(piece));
    kept_bytes_ += size;
    while (kept_bytes_ > share_.bytes()) {
      STOKER_CHECK(!kept_.empty() && kept_bytes_ >= kept_.front().bytes.size());
      kept_bytes_ -= kept_.front().bytes.size();
      gone.splice(gone.end(), kept_, kept_.begin());
    }
  }
  for (const SpareBytes& each : gone) release(each);
}

uint64_t SpareMemory::kept_bytes() const {
  const MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace stoker::coded
