// OneObject: a transaction where the atomic unit is the object (dir:, s3:). It holds one, begins it
// anew, and is done when nothing of it is under way any more.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/store/store.h"

namespace stoker {

// For sentences.
struct OneObjectStore {
  const char* name;  // "a dir: store"
};

struct OneObject {
  explicit OneObject(const OneObjectStore& its_store) : store(its_store) {}

  // The transaction may work on `key`.
  Status check_open(std::string_view key) const REQUIRES(mutex);
  // Bytes may be written there. `there`: whether the store has such an object.
  Status check_write(std::string_view key, uint64_t offset, uint64_t size,
                     const std::function<Status()>& there) const REQUIRES(mutex);
  Status check_read(std::string_view key) const REQUIRES(mutex);
  // Of a write that was refused.
  void refuse(const Error& error) REQUIRES(mutex);
  // Nothing comes to it any more. Error: that was so before.
  Status finish() REQUIRES(mutex);
  // Calls `then` on the pool as soon as nothing is under way.
  void settle(Pool& pool, std::function<void()> then) REQUIRES(mutex);
  // Something that was under way has ended. What is to be called then, without the mutex.
  std::function<void()> ended(const Status& status) REQUIRES(mutex);

  const OneObjectStore& store;
  Mutex mutex;
  bool done GUARDED_BY(mutex) = false;   // committed or abandoned
  size_t pending GUARDED_BY(mutex) = 0;  // writes under way
  // Guarded by the mutex until it is done; then its last job's, which runs when nothing is pending.
  std::string key;  // of the one object; empty: none yet
  bool touched = false, removed = false;
  std::optional<std::string> required;  // a tag; empty: absent
  std::optional<Error> failed;          // of the first write that failed
  uint64_t bytes = 0;

 private:
  std::function<void()> settled_ GUARDED_BY(mutex);
};

// Hands all on to the store.
template <typename Store, typename Staged>
class OneObjectTransaction : public Transaction {
 public:
  explicit OneObjectTransaction(Store& store) : store_(store) {}
  ~OneObjectTransaction() override { store_.abandon(staged_); }
  Status resize(std::string_view key, uint64_t bytes, uint32_t chunk_bytes) override {
    return store_.resize(*staged_, key, bytes, chunk_bytes);
  }
  Future<void> write(std::string_view key, uint64_t offset, Slice from,
                     Priority priority) override {
    return store_.write(staged_, key, offset, from, priority);
  }
  Status remove(std::string_view key) override { return store_.remove(*staged_, key); }
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override {
    {
      MutexLock lock(staged_->mutex);
      if (const Status readable = staged_->check_read(key); !readable) return readable.error();
    }
    return store_.read(key, offset, into, options);
  }
  Status require(std::string_view key, std::string_view tag) override {
    return store_.require(*staged_, key, tag);
  }
  Future<Version> commit(Durability) override { return store_.commit(staged_); }

 protected:
  Store& store_;

 private:
  const std::shared_ptr<Staged> staged_ = std::make_shared<Staged>();
};

}  // namespace stoker
