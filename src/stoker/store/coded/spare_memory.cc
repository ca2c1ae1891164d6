#include "stoker/store/coded/spare_memory.h"

#include <algorithm>
#include <iterator>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

constexpr uint64_t kShareOfTheCap = 16;  // a sixteenth of it
constexpr size_t kLargePage = 2 * kMiB;  // what lies in such has whole ones

Grant share_of(Budget& budget) {
  auto share = budget.take(std::min(SpareMemory::kMost, budget.cap() / kShareOfTheCap),
                           "memory that a coded store uses again");
  return share ? std::move(*share) : Grant();
}

}  // namespace

SparePiece& SparePiece::operator=(SparePiece&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  home_ = other.home_;
  bytes_ = std::move(other.bytes_);
  return *this;
}

SparePiece::~SparePiece() { give_back(); }

void SparePiece::give_back() noexcept {
  if (home_ != nullptr && bytes_.data() != nullptr) home_->give_back(std::move(bytes_));
}

SpareMemory::SpareMemory(Budget& budget) : share_(share_of(budget)) {}

SparePiece SpareMemory::take(size_t bytes) {
  auto spare = kept(bytes);
  return {*this, spare ? std::move(*spare) : AlignedBytes::faulted(bytes)};
}

SparePiece SpareMemory::take_sparse(size_t bytes) {
  auto spare = kept(bytes);
  return {*this, spare ? std::move(*spare) : AlignedBytes(bytes)};
}

// The newest of this size: the caches may know it yet.
std::optional<AlignedBytes> SpareMemory::kept(size_t bytes) {
  if (bytes < kLeast) return {};
  const size_t most = bytes < kLargePage ? bytes : align_up(bytes, kLargePage);
  const MutexLock lock(mutex_);
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), [&](const auto& each) {
    return each.size() >= bytes && each.size() <= most;
  });
  if (found == kept_.rend()) return {};
  AlignedBytes spare = std::move(*found);
  kept_.erase(std::next(found).base());
  STOKER_CHECK(kept_bytes_ >= spare.size());
  kept_bytes_ -= spare.size();
  return spare;
}

void SpareMemory::give_back(AlignedBytes bytes) {
  const uint64_t size = bytes.size();
  if (size < kLeast || size > share_.bytes() || bytes.lost()) return;
  std::list<AlignedBytes> gone;  // outlives the lock
  const MutexLock lock(mutex_);
  kept_.push_back(std::move(bytes));
  kept_bytes_ += size;
  while (kept_bytes_ > share_.bytes()) {
    STOKER_CHECK(!kept_.empty() && kept_bytes_ >= kept_.front().size());
    kept_bytes_ -= kept_.front().size();
    gone.splice(gone.end(), kept_, kept_.begin());
  }
}

uint64_t SpareMemory::kept_bytes() const {
  const MutexLock lock(mutex_);
  return kept_bytes_;
}

}  // namespace stoker::coded
