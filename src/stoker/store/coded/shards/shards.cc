#include "stoker/store/coded/shards/shards.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "stoker/base/check.h"
#include "stoker/base/log.h"
#include "stoker/store/blank.h"
#include "stoker/store/chunk_size.h"
#include "stoker/store/coded/mutation.h"
#include "stoker/store/coded/shards/file_shard.h"
#include "stoker/store/disk_of.h"
#include "stoker/store/folder.h"
#include "stoker/store/writer_lock.h"

namespace stoker::coded {
namespace {

constexpr const char* kFileName = "stoker.shard";

std::string code_text(size_t k, size_t m) { return std::to_string(k) + "+" + std::to_string(m); }

// A folder holds its shard in a file; a name of nothing will be a folder.
std::string file_of(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  const bool itself = std::filesystem::exists(status) && !std::filesystem::is_directory(status);
  return itself ? path : path + "/" + kFileName;
}

// However it is written: ./disk3 and /disk3/ are what disk3 and /disk3 are.
std::string plain(const std::string& path) {
  std::error_code error;
  const auto absolute = std::filesystem::absolute(path, error).lexically_normal();
  if (error) return path;
  return (absolute.has_filename() ? absolute : absolute.parent_path()).string();
}

Shape plan_shape(const CodedPlan& plan, const StoreOptions& options, const CodedOptions& coded) {
  Shape shape;
  shape.k = plan.k;
  shape.m = plan.m;
  shape.shards = plan.paths.size();
  shape.object_chunk_bytes = options.chunk_bytes;
  shape.chunk_bytes = std::min(options.chunk_bytes, kChunkMax);
  shape.segments = coded.segments;
  // An eighth more stripes than the bytes need: objects end within a stripe.
  const uint64_t stripes =
      (options.capacity_bytes + shape.stripe_bytes() - 1) / shape.stripe_bytes() * 9 / 8 + 4;
  shape.slots = static_cast<uint32_t>((stripes * shape.n() + shape.shards - 1) / shape.shards);
  // A quarter of the slots, at most.
  const uint64_t quarter = uint64_t{shape.slots} * shape.chunk_bytes / 4 / coded.segments;
  shape.segment_bytes =
      coded.segment_bytes != 0
          ? coded.segment_bytes
          : static_cast<uint32_t>(std::clamp<uint64_t>(std::bit_floor(quarter), kMiB, 16 * kMiB));
  const uint64_t image = stripes * (13 + 4 * shape.n()) + options.objects_max * 192;
  shape.area_bytes = align_up(image + image / 8 + 64 * kKiB, 64 * kKiB);
  return shape;
}

Status check_plan(const CodedPlan& plan) {
  if (plan.k < 1 || plan.m < 1 || plan.k + plan.m > 32) {
    return fail(Code::invalid_argument,
                "a code has at least one data chunk, at least one parity chunk and at most 32 "
                "chunks in all, not {}. 6+3 suits nine disks",
                code_text(plan.k, plan.m));
  }
  if (plan.paths.size() < plan.k + plan.m) {
    return fail(
        Code::invalid_argument,
        "a code of {} needs at least {} disks, but {} are given: name more, or take a smaller code",
        code_text(plan.k, plan.m), plan.k + plan.m, plan.paths.size());
  }
  if (plan.paths.size() > kShardsMax)
    return fail(Code::invalid_argument, "a coded store has at most 64 shards, not {}",
                plan.paths.size());
  return {};
}

// Disks fail as a whole: two shards on one disk are lost together. With `only`, just that one is
// compared with the others.
Status check_disks(const std::vector<Member>& shards, const Member* only = nullptr) {
  std::vector<std::pair<Disks, const Member*>> seen;
  std::string untold;
  for (const Member& shard : shards) {
    if (!shard.present()) continue;
    STOKER_ASSIGN(Disks disks, disks_of(shard.file_path));
    for (const auto& [other_disks, other] : seen) {
      if (!disks.shares(other_disks) || (only != nullptr && only != &shard && only != other))
        continue;
      return fail(Code::invalid_argument,
                  "'{}' and '{}' are on the same disk and would be lost together: give each shard "
                  "a disk of its own, or consent with --same-disk",
                  other->path, shard.path);
    }
    if (!disks.told) untold += (untold.empty() ? "'" : ", '") + shard.path + "'";
    seen.emplace_back(std::move(disks), &shard);
  }
  if (!untold.empty())
    log().warn(
        "the kernel does not tell which disks these are on, so see to it yourself that none is "
        "shared with another shard: {}",
        untold);
  return {};
}

}  // namespace

Result<std::unique_ptr<Shards>> Shards::open(const CodedPlan& plan, const Runtime& runtime,
                                             const StoreOptions& options,
                                             const CodedOptions& coded) {
  STOKER_TRY(check_plan(plan));
  for (const std::string& path : options.replace) {
    if (std::any_of(plan.paths.begin(), plan.paths.end(),
                    [&](const std::string& each) { return plain(each) == plain(path); }))
      continue;
    return fail(Code::invalid_argument,
                "'{}' is not a shard of this store. Put the new disk in the composition in place "
                "of the lost one, and name it to --replace as well",
                path);
  }
  std::unique_ptr<Shards> shards(new Shards(runtime));
  std::vector<std::optional<Superblock>> found(plan.paths.size());
  bool exists = false;
  for (size_t i = 0; i < plan.paths.size(); ++i) {
    Member& shard = shards->shards_.emplace_back();
    shard.path = plan.paths[i];
    STOKER_TRY(shards->open_one(shard, options, coded.files));
    if (shard.present()) shards->read_superblock(shard, found[i]);
    exists = exists || (found[i] && found[i]->confirmed.number > 0);
  }
  if (exists) {
    STOKER_TRY(shards->identify(plan, found));
    if (!options.read_only) {
      STOKER_TRY(shards->fence_members());
      shards->read_superblocks_again();
    }
  } else if (const auto spoiled = std::find_if(shards->shards_.begin(), shards->shards_.end(),
                                               [](const Member& shard) { return shard.spoiled; });
             spoiled != shards->shards_.end()) {
    return fail(
        Code::mismatch,
        "{}: use the program that wrote it, give another path, or delete it if nobody needs it",
        spoiled->trouble);
  } else if (const auto hidden =
                 std::find_if(shards->shards_.begin(), shards->shards_.end(),
                              [](const Member& shard) { return shard.hidden.has_value(); });
             hidden != shards->shards_.end()) {
    return *hidden->hidden;
  } else if (options.create && !options.read_only) {
    STOKER_TRY(shards->make(plan, options, coded, found));
  } else {
    return fail(
        Code::not_found,
        "there is no finished coded store at '{}' and the paths beside it; check the paths, "
        "or make one with `stoker create`",
        plan.paths[0]);
  }
  for (Member& shard : shards->shards_) {
    shard.log = std::make_unique<ShardLog>(shards->shape_, shards->store_, shards->index_of(shard));
    if (shard.present()) name_holder(shard, options);
  }
  return shards;
}

Shards::~Shards() {
  while (stragglers_.await()) {  // of these files, and they tell us
  }
  for (Member& shard : shards_) close_store_file(loop_, shard);
}

void Shards::reach(Member& member, const FileInfo& file) const {
  member.file = file;
  member.shard = std::make_unique<FileShard>(loop_, pool_, file.id);
}

Status Shards::let_go(Member& member) const {
  member.shard.reset();
  STOKER_TRY(loop_.close(member.file.id));
  member.file.id = -1;
  return {};
}

// By one more than the highest that any of them holds. Those on which that fails are missing.
Status Shards::fence_present() {
  std::random_device random;
  fence_ = {0, uint64_t{random()} << 32 | random()};
  const auto miss = [this](Member& shard, const Error& error) {
    shard.trouble = "'" + shard.path + "' cannot be fenced: " + error.message();
    static_cast<void>(let_go(shard));
  };
  for (Member& shard : shards_) {
    if (!shard.present()) continue;
    const auto held = shard.shard->fenced();
    if (!held) miss(shard, held.error());
    if (held) fence_.number = std::max(fence_.number, held->number);
  }
  ++fence_.number;
  for (Member& shard : shards_) {
    if (!shard.present()) continue;
    const Status fenced = fence_one(shard);
    if (!fenced && fenced.error().code == Code::conflict) return fenced.error();
    if (!fenced) miss(shard, fenced.error());
  }
  return {};
}

// Disks that only can be read still serve reads, but not to a writer: it fences all that it reads.
Status Shards::fence_members() {
  const ShardSet before = present();
  STOKER_TRY(fence_present());
  if (present() == before || shape_.writable(current())) return {};
  return fail(Code::io,
              "too few shards of the store take writes: open it read-only, or bring disks "
              "back that can be written{}",
              missing());
}

Status Shards::fence_one(Member& shard) {
  const Status fenced = shard.shard->fence(fence_);
  if (fenced) return {};
  const Error& error = fenced.error();
  if (error.code != Code::conflict) return error;
  return fail(Code::conflict,
              "another writer opens this store as well, as the shard '{}' tells: open it again "
              "when that one has ended",
              shard.path);
}

// A writer may have changed them between identify() and its being fenced.
void Shards::read_superblocks_again() {
  std::vector<AlignedBytes> blocks;
  ShardBatch batch(*this, Priority::demand);
  for (size_t i = 0; i < size(); ++i) {
    for (const uint64_t at : kSuperblockAt) {
      Slice into = blocks.emplace_back(kBlock).slice();
      std::memset(into.data, 0, into.size);
      if (shards_[i].present()) batch.read(i, at, into);
    }
  }
  batch.run();
  for (size_t i = 0; i < size(); ++i) {
    Member& shard = shards_[i];
    for (size_t copy = 0; copy < kSuperblockAt.size(); ++copy) {
      const auto found = decode_superblock(blocks[i * kSuperblockAt.size() + copy].span());
      if (!shard.present() || !found || !*found || (*found)->counter <= shard.super.counter)
        continue;
      const Superblock& newer = **found;
      if (newer.store == store_ && newer.shape == shape_ && newer.shard == i) shard.super = newer;
    }
  }
}

void Shards::keep_files() {
  for (Member& shard : shards_) shard.made = false;
}

// What is not there is noted, not made: whether that is a lost shard or a store to be made shows
// when all were looked at.
Status Shards::open_one(Member& shard, const StoreOptions& options, bool files) {
  const std::string& path = shard.path;
  shard.file_path = files ? file_of(path) : path;
  const auto hide = [&shard](const Error& error) {
    shard.hidden = error;
    shard.trouble = error.message();
    return Status();
  };
  if (files) {
    const auto status = look_at(shard.file_path);
    if (!status) return hide(status.error());
    if (!std::filesystem::exists(*status)) {
      shard.trouble = "'" + path + "' is not there";
      return {};
    }
    auto locked = lock_file(shard.file_path, path, options.read_only);
    if (!locked && locked.error().code == Code::busy) return locked.error();
    if (!locked) return hide(locked.error());
    shard.lock_fd = *locked;
  }
  auto file = loop_.open(OpenFile{.path = shard.file_path, .write = !options.read_only});
  if (!file && file.error().code != Code::not_found) return hide(file.error());
  if (file) {
    reach(shard, *file);
  } else {
    shard.trouble = file.error().message();
  }
  return {};
}

// Of the two copies the one with the higher counter. A shard that cannot be read is missing, and so
// is one whose superblock says what cannot be: a single disk must not keep the others closed.
void Shards::read_superblock(Member& shard, std::optional<Superblock>& found) {
  const auto spoil = [&shard](const std::string& why) {
    shard.spoiled = true;
    shard.trouble = "'" + shard.path + "' " + why;
  };
  // empty, or zeros: a crash came between making it and giving it its size
  if (shard.file.bytes < kHeadBytes) {
    if (!is_zeros(shard))
      spoil("holds " + std::to_string(shard.file.bytes) +
            " bytes that are not a shard of a coded store: it was cut short, or is another file");
    return;
  }
  AlignedBytes head(kHeadBytes);
  std::memset(head.data(), 0, kHeadBytes);
  // Block by block: one that cannot be read does not take the other copy with it, and is written
  // anew with the next epoch.
  ShardBatch batch(*this, Priority::demand);
  for (size_t at = 0; at < kHeadBytes; at += kBlock)
    batch.read(index_of(shard), at, head.slice().sub(at, kBlock));
  batch.run();
  std::string impossible;
  for (const uint64_t at : kSuperblockAt) {
    const auto superblock = decode_superblock(head.span().subspan(at));
    if (!superblock) impossible = superblock.error().what;
    if (superblock && *superblock && (!found || (*superblock)->counter > found->counter))
      found = *superblock;
  }
  // neither of these says that anybody's data is there
  std::memset(head.data() + kHolderAt, 0, kHolderBytes);
  for (const uint64_t at : kFenceAt) {
    const auto block = head.span().subspan(at, kBlock);
    if (decode_fence(block)) std::memset(block.data(), 0, kBlock);
  }
  const bool text = std::any_of(head.span().begin(), head.span().end(),
                                [](std::byte byte) { return byte != std::byte{0}; });
  if (!found && !impossible.empty()) return spoil("has " + impossible);
  if (!found && !batch.why().empty()) {
    shard.trouble = batch.why();
    return;
  }
  if (!found && text)
    spoil(
        "holds something that is not a shard of a coded store, or both copies of its superblock "
        "are "
        "damaged");
  if (found && found->shape.file_bytes() > shard.file.bytes) {
    shard.trouble = "'" + shard.path + "' is cut short: it should have " +
                    std::to_string(found->shape.file_bytes()) + " bytes";
  }
}

// Of a file shorter than a head. What the page cache reads to the last byte the loop reads in whole
// sectors only.
bool Shards::is_zeros(const Member& shard) {
  AlignedBytes bytes(kHeadBytes);
  const size_t size = shard.file.bytes;
  if (shard.lock_fd >= 0) {
    if (::pread(shard.lock_fd, bytes.data(), size, 0) != static_cast<ssize_t>(size)) return false;
  } else if (size > 0) {
    ShardBatch batch(*this, Priority::demand);
    batch.read(index_of(shard), 0, bytes.slice().sub(0, size));
    if (batch.run() != 0) return false;
  }
  return std::all_of(bytes.data(), bytes.data() + size,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// What most of them say. One that says otherwise, with a right checksum, is of a bug or another
// disk.
const Superblock& Shards::of_most(const std::vector<std::optional<Superblock>>& found) {
  const std::optional<Superblock>* best = nullptr;
  ptrdiff_t most = 0;
  for (const auto& each : found) {
    if (!each) continue;
    const auto alike = std::count_if(found.begin(), found.end(), [&](const auto& other) {
      return other && other->store == each->store && other->shape == each->shape;
    });
    if (alike <= most) continue;
    most = alike;
    best = &each;
  }
  return **best;
}

// Every shard of one store, each once, in the order of their indices; what is not there is missing.
Status Shards::identify(const CodedPlan& plan, std::vector<std::optional<Superblock>> found) {
  const Superblock of = of_most(found);
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i] || found[i]->store != of.store || found[i]->shape == of.shape) continue;
    shards_[i].spoiled = true;
    shards_[i].trouble =
        "'" + shards_[i].path +
        "' has a superblock of another shape than most shards of this store: it is damaged";
    found[i].reset();
  }
  const Superblock* known = nullptr;
  size_t known_at = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i] || (known != nullptr && found[i]->store == known->store)) continue;
    if (known != nullptr)
      return fail(Code::mismatch,
                  "'{}' and '{}' are shards of different stores: name those of one store",
                  shards_[known_at].path, shards_[i].path);
    known = &*found[i];
    known_at = i;
  }
  shape_ = known->shape;
  store_ = known->store;
  if (shape_.k != plan.k || shape_.m != plan.m || shape_.shards != plan.paths.size()) {
    return fail(Code::mismatch,
                "'{}' is a shard of a store coded {} over {} disks, not {} over {}: open it with "
                "the code and disks of its creation",
                shards_[known_at].path, code_text(shape_.k, shape_.m), shape_.shards,
                code_text(plan.k, plan.m), plan.paths.size());
  }
  std::vector<size_t> from(shards_.size(), SIZE_MAX);  // by index: where it stands in our list
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!found[i]) continue;
    size_t& at = from[found[i]->shard];
    if (at != SIZE_MAX)
      return fail(Code::mismatch,
                  "'{}' is a copy of '{}', or the same shard twice; name each shard once",
                  shards_[i].path, shards_[at].path);
    at = i;
    shards_[i].super = *found[i];
  }
  // What has no superblock takes the places that are left.
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (found[i]) continue;
    *std::find(from.begin(), from.end(), SIZE_MAX) = i;
    if (shards_[i].trouble.empty()) shards_[i].trouble = "'" + shards_[i].path + "' is blank";
  }
  std::vector<Member> ordered;
  ordered.reserve(from.size());
  for (const size_t at : from) ordered.push_back(std::move(shards_[at]));
  shards_ = std::move(ordered);
  for (size_t i = 0; i < shards_.size(); ++i) {
    Member& shard = shards_[i];
    shard.super.shard = i;
    if (shard.trouble.empty() || !shard.present()) continue;
    static_cast<void>(let_go(shard));
  }
  return {};
}

// All shards blank, or left behind by an attempt that never came to be.
Status Shards::make(const CodedPlan& plan, const StoreOptions& options, const CodedOptions& coded,
                    const std::vector<std::optional<Superblock>>& found) {
  STOKER_TRY(check_chunk_bytes(options.chunk_bytes));
  if (options.capacity_bytes == 0)
    return fail(Code::invalid_argument,
                "a new store at '{}' needs a capacity: say how many bytes it may hold",
                plan.paths[0]);
  shape_ = plan_shape(plan, options, coded);
  store_ = random_store_id();
  for (size_t i = 0; i < shards_.size(); ++i)
    STOKER_TRY(make_one(shards_[i], options, coded.files, found[i].has_value()));
  if (coded.files && !options.same_disk) STOKER_TRY(check_disks(shards_));
  STOKER_TRY(fence_present());
  for (const Member& shard : shards_) {
    if (!shard.present()) return fail(Code::io, "making the store: {}", shard.trouble);
  }
  ShardSet all = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].super = Superblock{
        shape_, i, store_, found[i] ? found[i]->counter : 0, {}, {}, 0, std::random_device{}(), {}};
    all |= shard_bit(i);
  }
  std::string why;
  if (write_superblocks(all, why) != 0) return fail(Code::io, "making the store: {}", why);
  fresh_ = true;
  return {};
}

Status Shards::make_one(Member& shard, const StoreOptions& options, bool files,
                        bool had_superblock) {
  const bool there = shard.present();
  if (there && !had_superblock && shard.file.bytes >= kHeadBytes) {
    const auto written = first_written(loop_, shard.file, shard.lock_fd, kHeadBytes);
    if (!written) return written.error().with("looking whether '" + shard.path + "' is empty");
    if (*written)
      return fail(
          Code::mismatch,
          "'{}' begins like an empty file, but holds data that is not a shard: give another "
          "path, or delete the file if nobody needs it",
          shard.path);
  }
  if (there && shard.file.bytes >= shape_.file_bytes()) return {};
  if (there) {
    STOKER_TRY(let_go(shard));
    if (files && shard.file.bytes != 0) {
      return fail(Code::out_of_space,
                  "'{}' has {}, but the shard needs {}: delete the file, or ask for less",
                  shard.path, human_bytes(shard.file.bytes), human_bytes(shape_.file_bytes()));
    }
  }
  if (files) STOKER_TRY(make_folder(std::filesystem::path(shard.file_path).parent_path()));
  auto file = loop_.open(
      OpenFile{.path = shard.file_path, .create = true, .reserve_bytes = shape_.file_bytes()});
  if (!file) return file.error().with("the shard '" + shard.path + "'");
  reach(shard, *file);
  shard.made = !there && files;
  shard.trouble.clear();
  if (files && shard.lock_fd < 0) {
    STOKER_ASSIGN(shard.lock_fd, lock_file(shard.file_path, shard.path, options.read_only));
  }
  return {};
}

Status Shards::replace(const std::string& named, const StoreOptions& options, bool files) {
  Member& shard = *std::find_if(shards_.begin(), shards_.end(), [&](const Member& each) {
    return plain(each.path) == plain(named);
  });
  const std::string& path = shard.path;
  // a shard of this store: it is brought up to date without being made anew
  if (shard.present()) return {};
  // What is there now, from the beginning: it may have come back, or have been put in, since.
  if (shard.lock_fd >= 0) unlock_file(shard.lock_fd);
  shard.lock_fd = -1;
  shard.spoiled = false;
  shard.trouble.clear();
  STOKER_TRY(open_one(shard, options, files));
  std::optional<Superblock> found;
  if (shard.present()) read_superblock(shard, found);
  if (shard.spoiled)
    return fail(Code::mismatch,
                "{}: move it away, or delete it if nobody needs it, and replace it then (a device: "
                "make all of it zeros)",
                shard.trouble);
  if (found)
    return fail(Code::mismatch,
                "'{}' holds a shard that cannot be used{}: delete the file if nobody needs it, and "
                "replace it then",
                path, shard.trouble.empty() ? "" : " (" + shard.trouble + ")");
  std::error_code unknown;  // a disk that is dead is not there either
  if (files && !shard.present() && std::filesystem::exists(shard.file_path, unknown))
    return fail(Code::io, "'{}' cannot be replaced: {}", path, shard.trouble);
  const size_t index = shard.super.shard;
  const Status made = make_one(shard, options, files, false);
  if (!made) return made.error().with("replacing '" + path + "'");
  if (files && !options.same_disk) STOKER_TRY(check_disks(shards_, &shard));
  // A disk of which a store was begun and never finished may hold a higher one.
  STOKER_ASSIGN(const Fence held, shard.shard->fenced());
  if (held.number >= fence_.number) {
    const ShardSet before = present();
    STOKER_TRY(fence_present());
    if (present() != before)
      return fail(Code::io, "replacing '{}' failed: another shard was lost meanwhile{}", path,
                  missing());
  }
  const Status fenced = fence_one(shard);
  if (!fenced) return fenced.error().with("replacing '" + path + "'");
  shard.super = Superblock{shape_, index, store_, 0, {}, {}, 0, std::random_device{}(), {}};
  name_holder(shard, options);
  std::string why;
  if (write_superblocks(shard_bit(index), why) != 0)
    return fail(Code::io, "replacing '{}': {}", path, why);
  shard.made = false;
  shard.trouble = "'" + path + "' is new and is not rebuilt yet";
  return {};
}

ShardSet Shards::knowing() const {
  ShardSet set = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Superblock& super = shards_[i].super;
    if (shards_[i].present() && (fresh_ || super.confirmed.number > 0 || super.proposed.number > 0))
      set |= shard_bit(i);
  }
  return set;
}

std::string Shards::missing() const {
  std::string why;
  for (const Member& shard : shards_) {
    if (!shard.present()) why += "; " + shard.trouble;
  }
  return why;
}

ShardSet Shards::present() const {
  ShardSet set = 0;
  for (size_t i = 0; i < shards_.size(); ++i) set |= shards_[i].present() ? shard_bit(i) : 0;
  return set;
}

ShardSet Shards::current() const {
  Epoch highest;
  std::array<uint32_t, kShardsMax> incarnations{};
  for (const Member& shard : shards_) {
    if (!shard.present() || shard.super.confirmed.number <= highest.number) continue;
    highest = shard.super.confirmed;
    incarnations = shard.super.incarnations;
  }
  if (highest.number == 0) return present();  // made a moment ago
  // A member that does not is another disk, or an older copy of it.
  ShardSet members = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Superblock& own = shards_[i].super;
    const bool knows = std::max(own.confirmed.number, own.proposed.number) >= highest.number;
    if (shards_[i].present() &&
        ((knows && own.incarnation == incarnations[i]) || mutated(Mutation::ignore_epoch)))
      members |= shard_bit(i);
  }
  return highest.live & members;
}

uint64_t Shards::epoch_seen() const {
  uint64_t highest = 0;
  for (const Member& shard : shards_) {
    if (shard.present())
      highest = std::max({highest, shard.super.confirmed.number, shard.super.proposed.number});
  }
  return highest;
}

ShardSet Shards::write_superblocks(ShardSet set, std::string& why) {
  std::vector<AlignedBytes> blocks(size());
  for (size_t i = 0; i < size(); ++i) {
    if ((set & shard_bit(i)) == 0) continue;
    ++shards_[i].super.counter;
    const std::string bytes = encode_superblock(shards_[i].super);
    blocks[i] = AlignedBytes(kBlock);
    std::memset(blocks[i].data(), 0, kBlock);
    std::memcpy(blocks[i].data(), bytes.data(), bytes.size());
  }
  ShardBatch writes(*this, Priority::demand);
  for (const uint64_t turn : {0, 1}) {
    if (turn == 1) writes.next_wave();
    for (size_t i = 0; i < size(); ++i) {
      if ((set & shard_bit(i)) != 0)
        writes.write(i, kSuperblockAt[(shards_[i].super.counter + turn) & 1], blocks[i].slice());
    }
  }
  writes.flush(set);
  const ShardSet failed = writes.run();
  if (failed != 0) why = writes.why();
  return failed;
}

std::string read_areas(Shards& shards, Priority priority, std::span<Area> areas) {
  ShardBatch whole(shards, priority);
  for (Area& area : areas) {
    area.readable.assign(area.into.size / kBlock, true);
    whole.read(area.shard, area.offset, area.into);
  }
  if (areas.empty() || whole.run() == 0) return {};
  ShardBatch each(shards, priority);
  for (size_t i = 0; i < areas.size(); ++i) {
    for (size_t at = 0; !whole.ok(i) && at < areas[i].into.size; at += kBlock)
      each.read(areas[i].shard, areas[i].offset + at, areas[i].into.sub(at, kBlock));
  }
  each.run();
  size_t op = 0;
  for (size_t i = 0; i < areas.size(); ++i) {
    for (size_t block = 0; !whole.ok(i) && block < areas[i].readable.size(); ++block, ++op) {
      areas[i].readable[block] = each.ok(op);
      STOKER_CHECK((block + 1) * kBlock <= areas[i].into.size);
      if (!each.ok(op)) std::memset(areas[i].into.data + block * kBlock, 0, kBlock);
    }
  }
  return each.why();
}

size_t ShardBatch::read(size_t shard, uint64_t offset, Slice into, std::vector<uint32_t> crcs) {
  STOKER_CHECK(shards_[shard].present());
  Read& read = reads_.emplace_back();
  read.request.priority = priority_;
  read.request.offset = offset;
  read.request.into = into;
  read.request.crcs = std::move(crcs);
  read.request.done = &ShardBatch::on_done<ShardRead>;
  read.request.context = this;
  read.shard = shard;
  return reads_.size() - 1;
}

ShardPut& ShardBatch::put_to(size_t shard) {
  STOKER_CHECK(shards_[shard].present());
  ShardPut& put = puts_[shard];
  put.priority = priority_;
  put.fence = shards_.fence();
  put.done = &ShardBatch::on_done<ShardPut>;
  put.context = this;
  return put;
}

void ShardBatch::write(size_t shard, uint64_t offset, Slice from) {
  ShardPut& put = put_to(shard);
  if (put.waves.size() <= wave_) put.waves.resize(wave_ + 1);
  STOKER_CHECK(put.waves.size() == wave_ + 1 && from.size > 0);
  put.waves.back().push_back({offset, from});
}

void ShardBatch::flush(ShardSet set) {
  for (size_t shard = 0; shard < shards_.size(); ++shard) {
    if ((set & shard_bit(shard)) != 0) put_to(shard).flush = true;
  }
}

// On a thread of the shard's. Held while notifying: whoever waits may destroy us as soon as it has
// the lock.
template <typename Request>
void ShardBatch::on_done(Request& request) noexcept {
  auto& batch = *static_cast<ShardBatch*>(request.context);
  const MutexLock lock(batch.mutex_);
  STOKER_CHECK(batch.left_ > 0);
  if (--batch.left_ == 0) batch.done_.notify_all();
}

void ShardBatch::start() {
  if (empty()) return;
  {
    const MutexLock lock(mutex_);
    STOKER_CHECK(left_ == 0);
    left_ = reads_.size() + puts_.size();
  }
  Plug plug(shards_.loop());
  for (Read& read : reads_) shards_[read.shard].shard->read(read.request, plug);
  for (auto& [shard, put] : puts_) shards_[shard].shard->put(put, plug);
}

void ShardBatch::wait() {
  MutexLock lock(mutex_);
  done_.wait(lock, [this]() REQUIRES(mutex_) { return left_ == 0; });
}

void ShardBatch::note(size_t shard, const Status& status, ShardSet& failed) {
  if (status) return;
  if (status.error().code == Code::conflict) shards_.note_outdone();
  if (failed == 0) why_ = "'" + shards_[shard].path + "': " + status.error().message();
  failed |= shard_bit(shard);
}

ShardSet ShardBatch::finish() {
  wait();
  while (take_busy()) wait();
  ShardSet failed = 0;
  for (const Read& read : reads_) note(read.shard, read.request.status, failed);
  for (const auto& [shard, put] : puts_) note(shard, put.status, failed);
  return failed;
}

// Puts again what a shard did not take the rest of; the same bytes go to the same places.
bool ShardBatch::take_busy() {
  Plug plug(shards_.loop());
  for (auto& [shard, put] : puts_) {
    // a disk may be busy as well, but has a number for it
    if (put.status || put.status.error().code != Code::busy || put.status.error().sys_errno != 0)
      continue;
    {
      const MutexLock lock(mutex_);
      ++left_;
    }
    shards_[shard].shard->put(put, plug);
  }
  const MutexLock lock(mutex_);
  return left_ > 0;
}

Error stays_out(const std::string& path, const std::string& why, Code code) {
  return fail(code, "the shard '{}' cannot be brought up to date and stays left out: {}", path,
              why);
}

}  // namespace stoker::coded
