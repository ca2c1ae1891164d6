#include "stoker/offload/tile_memory.h"

#include <algorithm>
#include <utility>

#include "stoker/base/check.h"

namespace stoker::offload {

TileMemory::TileMemory(std::vector<Buffer> own)
    : own_(std::move(own)), place_bytes_(own_.front().size()), places_(own_.size()) {
  for (const Buffer& buffer : own_) {
    STOKER_CHECK(buffer.size() == place_bytes_);
    free_.push_back(buffer.slice());
  }
}

TileMemory::Loan* TileMemory::loan_of(const Slice& place) {
  const auto found = std::find_if(loans_.begin(), loans_.end(),
                                  [&](const Loan& loan) { return within(place, loan.region); });
  return found == loans_.end() ? nullptr : &*found;
}

Slice TileMemory::take() {
  STOKER_CHECK(any_free());
  const Slice place = free_.back();
  free_.pop_back();
  if (Loan* loan = loan_of(place)) ++loan->taken;
  return place;
}

void TileMemory::give(const Slice& place) {
  Loan* loan = loan_of(place);
  if (loan == nullptr) {
    STOKER_CHECK(place.size == place_bytes_);
    free_.insert(free_.begin(), place);
    STOKER_CHECK(free_.size() <= places_);
    return;
  }
  STOKER_CHECK(loan->taken > 0);
  --loan->taken;
  if (loan->recalled) return;
  STOKER_CHECK(places_ > own_.size());
  --places_;
}

bool TileMemory::lent(const Slice& place) const { return loan_of(place) != nullptr; }

size_t TileMemory::lend(const Slice& region) {
  const size_t places = region.size / place_bytes_;
  if (places == 0 || loan_of(region) != nullptr) return 0;
  for (size_t i = 0; i < places; ++i) free_.push_back(region.sub(i * place_bytes_, place_bytes_));
  places_ += places;
  loans_.push_back({.region = region});
  return places;
}

bool TileMemory::begin_recall(const Slice& region) {
  Loan* loan = loan_of(region);
  if (loan == nullptr) return false;
  if (loan->recalled) return true;
  loan->recalled = true;
  const size_t gone =
      loan->taken + std::erase_if(free_, [&](const Slice& place) { return within(place, region); });
  STOKER_CHECK(places_ >= own_.size() + gone);
  places_ -= gone;
  return true;
}

bool TileMemory::end_recall(const Slice& region) {
  const Loan* loan = loan_of(region);
  if (loan == nullptr) return true;  // another one was first
  STOKER_CHECK(loan->recalled);
  if (loan->taken != 0) return false;
  std::erase_if(loans_, [&](const Loan& each) { return within(each.region, region); });
  return true;
}

}  // namespace stoker::offload
