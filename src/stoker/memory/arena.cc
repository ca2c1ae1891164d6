#include "stoker/memory/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <string>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/base/log.h"
#include "stoker/memory/lost.h"

namespace stoker {
namespace {

constexpr uint64_t kLargePage = 2 * kMiB;

struct Mapping {
  std::byte* data;
  PageReport pages;
};

// The kernel's own word on how much of [data, data + bytes) lies in transparent huge pages.
uint64_t transparent_bytes(const std::byte* data, uint64_t bytes) {
  std::ifstream smaps("/proc/self/smaps");
  const auto from = reinterpret_cast<uintptr_t>(data);
  uint64_t found = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t start = 0;
    uintptr_t end = 0;
    char dash = 0;
    std::istringstream fields(line);
    if (line.find(':') > line.find('-') && (fields >> std::hex >> start >> dash >> end)) {
      inside = start < from + bytes && end > from;
    } else if (inside && line.rfind("AnonHugePages:", 0) == 0) {
      found += std::stoull(line.substr(14)) * kKiB;
    }
  }
  return std::min(found, bytes);
}

Result<Mapping> map_hugetlb(uint64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) return fail(errno, "no reserved huge pages");
  return Mapping{static_cast<std::byte*>(at), {PageReport::Kind::hugetlb, bytes, bytes}};
}

// Over-reserves by one large page so that the region can start on a 2 MiB border; the rims go back
// to the kernel.
Result<Mapping> map_transparent(uint64_t bytes) {
  void* raw = mmap(nullptr, bytes + kLargePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return fail(errno, "cannot reserve {} of memory", human_bytes(bytes));
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uint64_t before = align_up(start, kLargePage) - start;
  auto* data = static_cast<std::byte*>(raw) + before;
  if (before > 0) munmap(raw, before);
  if (before < kLargePage) munmap(data + bytes, kLargePage - before);
  const bool advised = madvise(data, bytes, MADV_HUGEPAGE) == 0;
  if (madvise(data, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) {
      const Error error = fail(
          errno, "the machine has less than {} of free memory for the arena; give a smaller budget",
          human_bytes(bytes));
      munmap(data, bytes);
      return Error{Code::over_budget, error.sys_errno, error.what};
    }
    for (uint64_t at = 0; at < bytes; at += kIoAlign)
      *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
  const uint64_t large = advised ? transparent_bytes(data, bytes) : 0;
  return Mapping{
      data, {large > 0 ? PageReport::Kind::transparent : PageReport::Kind::small, large, bytes}};
}

std::atomic<int32_t> next_arena_id{0};

}  // namespace

Result<std::unique_ptr<Arena>> Arena::make(uint64_t bytes, Budget& budget) {
  bytes = align_up(std::max<uint64_t>(bytes, 1), kLargePage);
  STOKER_ASSIGN(Grant grant, budget.take(bytes, "an arena"));
  auto mapping = map_hugetlb(bytes);
  if (!mapping) mapping = map_transparent(bytes);
  if (!mapping) return mapping.error();
  if (mapping->pages.large_bytes < bytes) {
    log().warn(
        "only {} of an arena of {} lie in large pages: disk transfers will be slower; reserve some "
        "with "
        "'sysctl vm.nr_hugepages' or enable transparent huge pages",
        human_bytes(mapping->pages.large_bytes), human_bytes(bytes));
  }
  // Pages that the kernel or a driver has pinned are copied by fork() at once: a data loader's
  // worker would cost the whole cap again.
  if (madvise(mapping->data, bytes, MADV_DONTFORK) != 0) {
    log().warn(
        "an arena of {} stays mapped in child processes ({}): starting one may take time and "
        "memory",
        human_bytes(bytes), std::strerror(errno));
  }
  return std::unique_ptr<Arena>(new Arena(mapping->data, bytes, mapping->pages, std::move(grant)));
}

std::unique_ptr<Arena> Arena::over(std::byte* data, uint64_t bytes, Grant grant,
                                   std::function<void()> release) {
  STOKER_CHECK(is_aligned(reinterpret_cast<uintptr_t>(data), kIoAlign));
  return std::unique_ptr<Arena>(
      new Arena(data, bytes, {.total_bytes = bytes}, std::move(grant), std::move(release)));
}

Arena::Arena(std::byte* data, uint64_t size, PageReport pages, Grant grant,
             std::function<void()> release)
    : data_(data),
      size_(size),
      pages_(pages),
      id_(next_arena_id++),
      grant_(std::move(grant)),
      release_(std::move(release)) {
  free_.emplace(0, size);
}

Arena::~Arena() {
  STOKER_CHECK(used_ == lost_);
  if (is_lost(data_, size_)) {
    // What it keeps alive stays, too.
    if (release_) static_cast<void>(new (std::nothrow) std::function<void()>(release_));
    return;
  }
  if (release_) {
    release_();
  } else {
    munmap(data_, size_);
  }
}

Result<Buffer> Arena::take(size_t bytes) {
  const uint64_t need = align_up(std::max<size_t>(bytes, 1), kIoAlign);
  MutexLock lock(mutex_);
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    const auto [offset, size] = *hole;
    if (size < need) continue;
    free_.erase(hole);
    if (size > need) free_.emplace(offset + need, size - need);
    used_ += need;
    peak_ = std::max(peak_, used_);
    return Buffer(this, Slice{data_ + offset, static_cast<size_t>(need), id_});
  }
  return fail(Code::over_budget,
              "the arena has no {} free in one piece: {} of {} are free; give a larger budget",
              human_bytes(need), human_bytes(size_ - used_), human_bytes(size_));
}

void Arena::give_back(const Slice& slice) {
  MutexLock lock(mutex_);
  uint64_t offset = static_cast<uint64_t>(slice.data - data_);
  uint64_t size = slice.size;
  if (is_lost(slice.data, size)) {
    lost_ += size;
    return;
  }
  used_ -= size;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

uint64_t Arena::used() const {
  MutexLock lock(mutex_);
  return used_;
}

uint64_t Arena::peak() const {
  MutexLock lock(mutex_);
  return peak_;
}

uint64_t Arena::largest_free() const {
  MutexLock lock(mutex_);
  uint64_t largest = 0;
  for (const auto& [offset, size] : free_) largest = std::max(largest, size);
  return largest;
}

Buffer::Buffer(Buffer&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)), slice_(std::exchange(other.slice_, {})) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(slice_, other.slice_);
  return *this;
}

Buffer::~Buffer() {
  if (arena_ != nullptr) arena_->give_back(slice_);
}

}  // namespace stoker
