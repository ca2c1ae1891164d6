// S3Store: docs/stores/s3.md is the protocol.
//
// Threads: any thread calls in. stat(), list(), remove() and copy() wait for the server on the
// caller's thread. The thread of the client's Http completes reads; parts of uploads, commits and
// aborts run on the store's own threads, which wait there.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/memory/budget.h"
#include "stoker/store/blocking_io.h"
#include "stoker/store/one_object.h"
#include "stoker/store/s3/client.h"
#include "stoker/store/s3/store.h"
#include "stoker/store/s3/uploads.h"
#include "stoker/store/s3/xml.h"
#include "stoker/store/tagged_reads.h"

namespace stoker::s3 {

// One PUT, or a part of an upload: its bytes, until they are sent.
struct Part {
  AlignedBytes bytes;
  Grant grant;
  std::map<uint64_t, uint64_t> written;  // begin -> end, not touching each other
  Priority priority = Priority::write_back;
  bool sent = false;  // or on its way: its bytes are given away
  std::string etag;
  std::string crc32c;  // in base64, where the upload has checksums
};

struct Staged : OneObject {
  Staged();

  // What is pending are parts.
  CondVar part_ended;
  // Writes that are held back while too many parts are on their way.
  std::vector<Promise<void>> waiting GUARDED_BY(mutex);
  // Guarded as the key is. What names the upload stays as it is once it is begun.
  uint64_t part_bytes = 0;
  std::map<size_t, Part> parts;  // 0 alone: one PUT
  std::string upload;            // id; empty: not begun
  bool checks = false;           // the server said that it checks the CRC32C of its parts
  std::string attempt;           // of this commit
  Priority priority = Priority::write_back;  // of the last write

  Mutex upload_mutex;  // held while it is begun; taken before `mutex`
};
using StagedPtr = std::shared_ptr<Staged>;

class S3Store final : public Store, public TaggedReads {
 public:
  static Result<std::unique_ptr<Store>> open(const std::string& composition, const Runtime& runtime,
                                             const StoreOptions& options);
  ~S3Store() override;

  Features features() const override;
  bool wants_aligned() const override { return false; }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix, std::string_view snapshot) override;
  Result<Level> list_level(std::string_view prefix, std::string_view snapshot) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Future<void> read_tagged(std::string_view key, std::string_view tag, uint64_t offset,
                           Slice into) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  Result<Version> copy(std::string_view from, std::string_view to) override;
  Status remove(const std::vector<std::string>& keys) override;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  StoreInfo info() const override;

  // write.cc: for its transactions
  Status resize(Staged& staged, std::string_view key, uint64_t bytes, uint32_t chunk_bytes);
  Future<void> write(const StagedPtr& staged, std::string_view key, uint64_t offset, Slice from,
                     Priority priority);
  Status remove(Staged& staged, std::string_view key);
  Status require(Staged& staged, std::string_view key, std::string_view tag);
  Future<Version> commit(const StagedPtr& staged);
  void abandon(const StagedPtr& staged);
  void opened();
  void closed();

 private:
  class Reading;
  Future<void> read(std::string_view key, uint64_t offset, Slice into, const ReadOptions& options,
                    std::string_view tag);

  S3Store(Location location, std::unique_ptr<Client> client, const Runtime& runtime,
          const StoreOptions& options);
  std::string whole(std::string_view key) const { return location_.prefix + std::string(key); }
  Error read_only_error() const;
  Result<Xml> listing_of(const Reply& reply) const;
  Status list_into(std::string_view prefix, std::string_view delimiter, Level& found) const;
  Result<ObjectInfo> head(std::string_view key, std::string* attempt) const;

  // write.cc
  Status write_locked(const StagedPtr& staged, uint64_t offset, Slice from, MutexLock& lock)
      REQUIRES(staged->mutex) NO_THREAD_SAFETY_ANALYSIS;
  Result<Part> memory_for(uint64_t bytes);
  void spare(Part sent);
  // Lets go of the mutex while it waits for room.
  Result<Part*> part_of(Staged& staged, size_t index, MutexLock& lock)
      REQUIRES(staged.mutex) NO_THREAD_SAFETY_ANALYSIS;
  void send_part(const StagedPtr& staged, size_t index) REQUIRES(staged->mutex);
  Status send_part_now(Staged& staged, size_t index, const Part& part);
  Status begin_upload(Staged& staged);
  struct Upload {
    std::string id;
    bool checks = false;
  };
  Result<Upload> new_upload(const std::string& key, const std::string& attempt) const;
  void part_ended(const StagedPtr& staged, const Status& status);
  Result<Version> commit_now(Staged& staged);
  Status put_whole(Staged& staged);
  Status complete_upload(Staged& staged);
  Status delete_object(Staged& staged);
  Status delete_batch(std::span<const std::string> keys);
  Status delete_listed(std::string body, size_t count);
  Status decide(Staged& staged, const Reply& reply, bool gone) const;
  void abort_upload(Staged& staged);
  Status abort_now(const std::string& key, const std::string& id) const;
  // How a server wants a tag in If-Match.
  enum class Match : uint8_t { unknown, none, quoted, bare };
  Result<Match> probe_conditions() const;
  Result<Match> conditions() const;
  bool uploads_ignore_conditions() const;

  const Location location_;
  const Runtime runtime_;
  const bool read_only_;
  mutable Mutex probe_mutex_;  // held while it is probed
  mutable Match conditions_ GUARDED_BY(probe_mutex_) = Match::unknown;
  // conditions, once it was asked
  mutable std::optional<bool> uploads_ignore_ GUARDED_BY(probe_mutex_);
  std::atomic<uint64_t> commits_{0};
  Mutex spare_mutex_;
  size_t open_ GUARDED_BY(spare_mutex_) = 0;  // transactions
  // Memory of parts that were sent, for the next ones: fresh pages cost more than what is copied
  // to them. Kept while a transaction is open.
  std::vector<Part> spare_ GUARDED_BY(spare_mutex_);
  Mutex left_mutex_;
  // Uploads (key, id) that could not be aborted.
  std::vector<std::pair<std::string, std::string>> left_ GUARDED_BY(left_mutex_);
  std::atomic<size_t> reading_{0};
  Mutex idle_mutex_;
  CondVar idle_;
  const std::unique_ptr<Client> client_;
  Uploads uploads_;
  std::optional<Pool> workers_{std::in_place, 8};  // the last member: its jobs use the others
};

class S3Transaction final : public OneObjectTransaction<S3Store, Staged> {
 public:
  explicit S3Transaction(S3Store& store) : OneObjectTransaction(store) { store_.opened(); }
  ~S3Transaction() override { store_.closed(); }
};

// A tag is the ETag without its quotes; a weak one stays as it is.
std::string tag_of_etag(std::string_view etag);
std::string etag_of_tag(std::string_view tag);

inline constexpr std::string_view kAttemptHeader = "x-amz-meta-stoker-attempt";

}  // namespace stoker::s3
