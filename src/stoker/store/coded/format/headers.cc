#include "stoker/store/coded/format/headers.h"

#include <algorithm>

#include "stoker/base/check.h"
#include "stoker/store/coded/mutation.h"

namespace stoker::coded {
namespace {

bool is_zeros(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

RawHeaders::RawHeaders(const Shape& shape)
    : data(shape.k, std::vector<std::optional<DataEntry>>(shape.rows())),
      parity(shape.m, std::vector<std::optional<ParityEntry>>(shape.rows())),
      counters(shape.n() * shape.pages(), 0) {}

void RawHeaders::take(const Shape& shape, const StoreId& store, uint64_t stripe, size_t position,
                      std::span<const std::byte> pairs) {
  STOKER_CHECK(pairs.size() == header_bytes(shape) && position < shape.n());
  for (size_t page = 0; page < shape.pages(); ++page) {
    std::optional<uint64_t> counter;
    std::span<const std::byte> newer;
    for (size_t copy = 0; copy < 2; ++copy) {
      const auto bytes = pairs.subspan((2 * page + copy) * kBlock, kBlock);
      const auto found = page_counter(store, stripe, position, page, bytes);
      damaged = damaged || (!found && !is_zeros(bytes));
      if (!found || (counter && *counter >= *found)) continue;
      counter = found;
      newer = bytes;
    }
    if (!counter) continue;
    auto newest = decode_page(shape, store, stripe, position, page, newer);
    if (!newest) continue;  // a disk that was given up wrote into it meanwhile
    counters[position * shape.pages() + page] = newest->counter;
    const size_t first = page * shape.rows_per_page();
    for (size_t i = 0; i < newest->data.size(); ++i) {
      if (newest->data[i].version != kUnknown) data[position][first + i] = newest->data[i];
    }
    for (size_t i = 0; i < newest->parity.size(); ++i) {
      if (newest->parity[i].versions[0] != kUnknown)
        parity[position - shape.k][first + i] = std::move(newest->parity[i]);
    }
  }
}

Headers RawHeaders::merge(const Shape& shape) const {
  Headers merged = blank_headers(shape);
  merged.counters = counters;
  for (size_t row = 0; row < shape.rows(); ++row) {
    Stamp* versions = &merged.versions[row * shape.k];
    uint32_t* crcs = &merged.crcs[row * shape.n()];
    std::fill_n(versions, shape.k, kUnknown);
    const auto offer = [&](size_t chunk, Stamp version, uint32_t crc) {
      if (versions[chunk] != kUnknown && version <= versions[chunk]) return;
      versions[chunk] = version;
      crcs[chunk] = crc;
    };
    for (size_t chunk = 0; chunk < shape.k; ++chunk) {
      if (data[chunk][row]) offer(chunk, data[chunk][row]->version, data[chunk][row]->crc);
      for (const auto& each : parity) {
        if (each[row]) offer(chunk, each[row]->versions[chunk], each[row]->crcs[chunk]);
      }
    }
    for (size_t j = 0; j < shape.m; ++j) {
      const auto& entry = parity[j][row];
      const bool any = mutated(Mutation::decode_disagreeing) || mutated(Mutation::decode_unchecked);
      const bool sound =
          entry && (any || std::equal(versions, versions + shape.k, entry->versions.begin()));
      merged.unsound[row * shape.m + j] = !sound;
      if (sound) crcs[shape.k + j] = entry->crc;
    }
  }
  return merged;
}

bool RawHeaders::parities_agree(const Shape& shape) const {
  if (damaged) return false;
  for (size_t row = 0; row < shape.rows(); ++row) {
    const auto& first = parity[0][row];
    for (const auto& each : parity) {
      if (!each[row] || each[row]->versions != first->versions || each[row]->crcs != first->crcs)
        return false;
    }
  }
  return true;
}

Headers blank_headers(const Shape& shape) {
  Headers headers;
  headers.versions.resize(shape.rows() * shape.k);
  headers.crcs.resize(shape.rows() * shape.n());
  headers.unsound.resize(shape.rows() * shape.m);
  headers.counters.resize(shape.n() * shape.pages());
  return headers;
}

HeaderPage page_of(const Shape& shape, uint64_t stripe, const Headers& headers, size_t position,
                   size_t page) {
  STOKER_CHECK(headers.whole() && position < shape.n() && page < shape.pages());
  HeaderPage out;
  out.stripe = stripe;
  out.chunk = position;
  out.page = page;
  out.counter = headers.counters[position * shape.pages() + page] + 1;
  const size_t first = page * shape.rows_per_page();
  const size_t end = std::min(first + shape.rows_per_page(), shape.rows());
  for (size_t row = first; row < end; ++row) {
    const Stamp* versions = &headers.versions[row * shape.k];
    const uint32_t* crcs = &headers.crcs[row * shape.n()];
    if (position < shape.k) {
      out.data.push_back({versions[position], crcs[position]});
    } else if (headers.unsound[row * shape.m + position - shape.k]) {
      out.parity.push_back(
          {0, std::vector<Stamp>(shape.k, kUnknown), std::vector<uint32_t>(shape.k)});
    } else {
      out.parity.push_back(
          {crcs[position], {versions, versions + shape.k}, {crcs, crcs + shape.k}});
    }
  }
  return out;
}

bool row_is_blank(const Shape& shape, const Headers& headers, size_t row) {
  const auto begin = headers.versions.begin() + static_cast<ptrdiff_t>(row * shape.k);
  return std::all_of(begin, begin + static_cast<ptrdiff_t>(shape.k),
                     [](Stamp version) { return version == 0; });
}

}  // namespace stoker::coded
