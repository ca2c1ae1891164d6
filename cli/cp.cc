// stoker cp FROM TO: copies objects from one store into another, verified, and goes on where it was
// stopped.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "command.h"
#include "pieces.h"
#include "stoker/base/bytes.h"
#include "stoker/base/crc32c.h"
#include "stoker/base/mutex.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/runtime.h"

namespace stoker::cli {
namespace {

constexpr size_t kPieces = 4;  // of an object under way at once
constexpr size_t kThreadsMax = 64;

struct CpArguments {
  std::string from, to, prefix;
  size_t threads = 8;
  bool trust_sizes = false;
  uint64_t capacity = 0;
};

struct Counts {
  std::atomic<uint64_t> objects{0}, bytes{0}, kept{0}, failed{0};
};

Result<uint32_t> checksum(Store& store, const ObjectInfo& object,
                          std::vector<AlignedBytes>& memory) {
  uint32_t crc = 0;
  STOKER_TRY(each_piece(store, object, {.priority = Priority::prefetch}, memory,
                        [&crc](uint64_t, Slice piece) {
                          crc = crc32c(piece.data, piece.size, crc);
                          return Status();
                        }));
  return crc;
}

class Copy {
 public:
  Copy(Store& from, Store& to, const CpArguments& arguments)
      : from_(from), to_(to), arguments_(arguments) {}

  Status run() {
    STOKER_ASSIGN(objects_, from_.list(arguments_.prefix));
    for (const ObjectInfo& object : objects_) total_bytes_ += object.bytes;
    std::vector<std::thread> threads;
    for (size_t i = 0; i < std::min(arguments_.threads, std::max<size_t>(1, objects_.size())); ++i)
      threads.emplace_back([this] { work(); });
    for (auto& thread : threads) thread.join();
    show(true);
    std::fprintf(stderr, "%llu objects, %s copied; %llu were there already\n",
                 static_cast<unsigned long long>(counts_.objects),
                 human_bytes(counts_.bytes).c_str(), static_cast<unsigned long long>(counts_.kept));
    if (counts_.failed == 0) return {};
    return fail(last_code_,
                "{} of {} objects could not be copied; the others were. Run the same command again "
                "to continue",
                counts_.failed, objects_.size());
  }

 private:
  void work() {
    std::vector<AlignedBytes> memory;
    for (size_t i = 0; i < kPieces; ++i) memory.push_back(AlignedBytes::faulted(kPieceBytes));
    for (size_t index = next_++; index < objects_.size(); index = next_++) {
      const Status done = one(objects_[index], memory);
      show(false);
      if (done) continue;
      ++counts_.failed;
      MutexLock lock(mutex_);
      last_code_ = done.error().code;
      std::fprintf(stderr, "\nstoker: '%s': %s\n", objects_[index].key.c_str(),
                   done.error().message().c_str());
    }
  }

  Status one(const ObjectInfo& object, std::vector<AlignedBytes>& memory) {
    const auto there = to_.stat(object.key);
    if (!there && there.error().code != Code::not_found) return there.error();
    if (there && there->bytes == object.bytes) {
      bool same = arguments_.trust_sizes;
      if (!same) {
        STOKER_ASSIGN(const uint32_t ours, checksum(from_, object, memory));
        STOKER_ASSIGN(const uint32_t theirs, checksum(to_, *there, memory));
        same = ours == theirs;
      }
      if (same) {
        ++counts_.kept;
        seen_bytes_ += object.bytes;
        return {};
      }
    }
    return move(object, there.has_value(), memory);
  }

  Status move(const ObjectInfo& object, bool there, std::vector<AlignedBytes>& memory) {
    STOKER_ASSIGN(auto change, to_.begin());
    if (there && to_.features().update) STOKER_TRY(change->remove(object.key));
    STOKER_TRY(change->resize(object.key, object.bytes, object.chunk_bytes));
    uint32_t crc = 0;
    STOKER_TRY(each_piece(from_, object, {.priority = Priority::prefetch}, memory,
                          [&](uint64_t at, Slice piece) {
                            crc = crc32c(piece.data, piece.size, crc);
                            seen_bytes_ += piece.size;
                            return change->write(object.key, at, piece).wait();
                          }));
    const auto now = from_.stat(object.key);
    if (!now || now->tag != object.tag)
      return fail(Code::conflict,
                  "the object was changed while it was copied; nothing was written, copy it again");
    if (const auto done = change->commit(Durability::durable).wait(); !done) return done.error();
    change.reset();
    STOKER_ASSIGN(const ObjectInfo made, to_.stat(object.key));
    STOKER_ASSIGN(const uint32_t read_back, checksum(to_, made, memory));
    if (made.bytes != object.bytes || read_back != crc)
      return fail(Code::corruption,
                  "the copy in '{}' differs from what was sent; copy it again, and check the disk "
                  "and memory of that machine if it differs again",
                  arguments_.to);
    ++counts_.objects;
    counts_.bytes += object.bytes;
    return {};
  }

  void show(bool end) {
    if (isatty(STDERR_FILENO) == 0) return;
    MutexLock lock(mutex_);
    const uint64_t done = counts_.objects + counts_.kept + counts_.failed;
    std::fprintf(stderr, "\r\033[K%llu of %zu objects, %s of %s%s",
                 static_cast<unsigned long long>(done), objects_.size(),
                 human_bytes(seen_bytes_).c_str(), human_bytes(total_bytes_).c_str(),
                 end ? "\n" : "");
    std::fflush(stderr);
  }

  Store& from_;
  Store& to_;
  const CpArguments& arguments_;
  std::vector<ObjectInfo> objects_;
  uint64_t total_bytes_ = 0;
  std::atomic<uint64_t> seen_bytes_{0};
  std::atomic<size_t> next_{0};
  Counts counts_;
  Mutex mutex_;  // of what is printed, and
  Code last_code_ = Code::io;
};

Status run(const CpArguments& arguments) {
  if (arguments.from == arguments.to)
    return fail(Code::invalid_argument, "FROM and TO are the same store; name another one");
  STOKER_ASSIGN(const auto runtime, RuntimeOwner::make());
  StoreOptions source;
  source.read_only = true;
  source.holder = "stoker cp";
  STOKER_ASSIGN(const auto from, open_store(arguments.from, runtime->runtime(), source));
  StoreOptions target;
  target.holder = "stoker cp";
  target.create = arguments.capacity != 0 || arguments.to.starts_with("dir:");
  target.capacity_bytes = arguments.capacity;
  STOKER_ASSIGN(const auto to, open_store(arguments.to, runtime->runtime(), target));
  return Copy(*from, *to, arguments).run();
}

}  // namespace

void add_cp(CLI::App& app, ExitStatus& status) {
  const auto arguments = std::make_shared<CpArguments>();
  CLI::App* command = app.add_subcommand(
      "cp", "Copy the objects of one store into another, whatever kinds they are");
  command
      ->add_option("FROM", arguments->from,
                   "The store: a folder or local:/a,/b, coded(6+3, /disk{0..8}), dir:/folder of "
                   "plain files, s3://bucket/prefix")
      ->required();
  command
      ->add_option("TO", arguments->to,
                   "The other store; a folder of plain files is made where there is none")
      ->required();
  command->add_option("--prefix", arguments->prefix, "Only objects whose keys start with this");
  command->add_option("--threads", arguments->threads, "Objects under way at once")
      ->check(CLI::Range(size_t{1}, kThreadsMax))
      ->capture_default_str();
  command
      ->add_option("--capacity", arguments->capacity,
                   "Make TO, a local store, for so many bytes of data where there is none")
      ->transform(CLI::AsSizeValue(false));
  command->add_flag(
      "--trust-sizes", arguments->trust_sizes,
      "Take objects that are there with the same size for equal, instead of reading both");
  command->footer(
      "Each object is read back after it was written. Started again after it was stopped, it "
      "leaves objects as they are that are there with the same bytes.\n"
      "What TO has beside them stays. Exit status: 0 all objects of FROM are in TO, 1 something "
      "failed.");
  command->callback([arguments, &status] {
    if (const Status done = run(*arguments); !done) tell(status, done.error());
  });
}

}  // namespace stoker::cli
