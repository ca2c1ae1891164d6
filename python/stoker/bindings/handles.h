// What stands behind the Python objects of the core: shared ownership in the order in which things
// must end (Session before Transaction before Store before Arena before Runtime), whatever order
// Python drops them in.
//
// Destructors here run on any thread, with or without the GIL: they call nothing of Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stoker/base/fork.h"
#include "stoker/base/mutex.h"
#include "stoker/codec/hashed_copy.h"
#include "stoker/offload/session.h"
#include "stoker/store/answers.h"
#include "stoker/store/runtime.h"

namespace stoker::python {

class RuntimeHandle {
 public:
  explicit RuntimeHandle(std::unique_ptr<RuntimeOwner> the_owner) : owner(the_owner.release()) {}
  bool here() const { return owner.get_deleter().here(); }  // in the process that made it

  // Raw memory as a Slice that names the arena it lies in, if any: such memory is registered with
  // the engine.
  Slice slice(uintptr_t address, uint64_t bytes);
  void add(const Arena& arena);
  void remove(const Arena& arena);

  const Unforked<RuntimeOwner> owner;

 private:
  Mutex mutex_;
  std::vector<const Arena*> arenas_ GUARDED_BY(mutex_);
};

struct ArenaHandle {
  ArenaHandle(std::shared_ptr<RuntimeHandle> the_runtime, std::unique_ptr<Arena> the_arena);
  ~ArenaHandle();
  const std::shared_ptr<RuntimeHandle> runtime;
  const Unforked<Arena> arena;
};

// Held by the Python Buffer and by every tensor storage made from it; the memory goes back with the
// last of them.
struct HeldBuffer {
  HeldBuffer(std::shared_ptr<ArenaHandle> the_arena, Buffer the_buffer)
      : arena(std::move(the_arena)), buffer(new Buffer(std::move(the_buffer))) {}
  std::shared_ptr<ArenaHandle> arena;
  Unforked<Buffer> buffer;  // destroyed before its arena
};

class StoreHandle {
 public:
  StoreHandle(std::shared_ptr<RuntimeHandle> the_runtime, std::unique_ptr<Store> the_store)
      : runtime(std::move(the_runtime)), store(the_store.release()) {}
  ~StoreHandle() { close(); }

  // Counts a future of the store: it is not closed before all are done. `first` is called with the
  // result before this one counts as done: behind that the handle may be gone.
  template <typename T, typename F>
  Future<T> track(Future<T> future, F first) {
    enter();
    future.on_done([this, first = std::move(first)](const Result<T>& result) {
      first(result);
      leave();
    });
    return future;
  }
  template <typename T>
  Future<T> track(Future<T> future) {
    return track(std::move(future), [](const Result<T>&) {});
  }
  // A call that lets go of the GIL inside of the store, which is not closed before its end. Made,
  // and gone, with the GIL.
  class Call {
   public:
    explicit Call(StoreHandle& store) : store_(store) { store_.enter(); }
    ~Call() { store_.leave(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    StoreHandle& store_;
  };
  // Transactions are the store's to end when it is closed: Python may keep their objects for long.
  std::shared_ptr<struct TransactionBox> add(std::unique_ptr<Transaction> transaction);
  void transaction_ended();
  // With the GIL: no call comes in any more. Before the close() of one that others may use.
  void refuse() { refuses_ = true; }
  bool refuses() const { return refuses_; }
  // Waits for calls and what is in flight, and gives up what is not committed. Where another thread
  // closes it, until that has. Sessions must be closed. In a forked process: nothing.
  void close();

  const std::shared_ptr<RuntimeHandle> runtime;
  Unforked<Store> store;              // null once closed
  Counter read_bytes, written_bytes;  // what Python itself moved, beside Sessions
  std::atomic<int> sessions{0};       // open ones

 private:
  void enter() {
    MutexLock lock(mutex_);
    ++pending_;
  }
  void leave() {
    MutexLock lock(mutex_);
    if (--pending_ == 0) idle_.notify_all();
  }

  Mutex mutex_;
  CondVar idle_;
  size_t pending_ GUARDED_BY(mutex_) = 0;
  size_t transactions_left_ GUARDED_BY(mutex_) = 0;  // that have not ended
  bool closes_ GUARDED_BY(mutex_) = false, closed_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> refuses_{false};
  std::vector<std::weak_ptr<struct TransactionBox>> transactions_ GUARDED_BY(mutex_);
};

struct TransactionBox {
  ~TransactionBox() { end(); }
  void end();  // abandons it unless it was committed; waits for the updates that write into it
  std::shared_ptr<StoreHandle> store;
  std::shared_ptr<offload::StepTransaction> step;  // null once ended
};

struct SessionHandle {
  SessionHandle(std::shared_ptr<StoreHandle> the_store, std::shared_ptr<ArenaHandle> the_arena,
                std::unique_ptr<offload::Session> the_session);
  ~SessionHandle() { close(); }
  void close();
  std::shared_ptr<StoreHandle> store;
  std::shared_ptr<ArenaHandle> arena;
  Unforked<offload::Session> session;  // null once closed, as are the others
};

// The classes Python sees: values that hold a share of the above.
struct PyRuntime {
  std::shared_ptr<RuntimeHandle> handle;
};
struct PyArena {
  std::shared_ptr<ArenaHandle> handle;
};
struct PyBuffer {
  std::shared_ptr<HeldBuffer> held;  // null once released
};
struct PyStore {
  std::shared_ptr<StoreHandle> handle;
};
struct PyTransaction {
  std::shared_ptr<TransactionBox> box;
};
struct PyHashing {
  Future<codec::Digest> digest;
  std::shared_ptr<RuntimeHandle> runtime;
};
struct PyFuture {
  Future<Version> version;  // one of the two is valid
  Future<void> done;
  std::shared_ptr<StoreHandle> store;
  std::weak_ptr<Answers> answers = {};  // that it comes with, if any
};

}  // namespace stoker::python
