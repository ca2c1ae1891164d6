// Session: one client of a server. Its thread receives, in order, and answers reads of blocks that
// are there. What may wait for the store is done by the server's workers.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "stoker/base/counters.h"
#include "stoker/base/mutex.h"
#include "stoker/base/pool.h"
#include "stoker/store/remote/blocks.h"
#include "stoker/store/remote/server.h"

namespace stoker::remote {

class Session;

// What all sessions of a server share.
struct Served {
  Store& store;
  Budget& budget;
  const ServeOptions options;
  const std::unique_ptr<Blocks> blocks;
  Counter requests, lists, transactions_begun, transactions_ended, sessions_ended;
  Mutex plans_mutex = {};                            // guards what follows
  std::map<std::string, const Session*> plans = {};  // who named each last
  Pool workers{16};
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Served& served, Fd socket);
  ~Session();  // gives back the pins; nothing of it is under way any more
  void run();  // until the client ends, breaks a rule or is silent
  void end();  // any thread: run() returns soon

 private:
  using TransactionPtr = std::shared_ptr<Transaction>;
  struct Open {
    TransactionPtr transaction;
    size_t calls = 0;  // that workers are doing
    bool committed = false;
  };
  // A list that was told in part. What is left of it stays as long as the budget has room for it
  // and few others were told since.
  struct Listing {
    std::string prefix, snapshot, behind;  // the last key that was told
    std::string version = {};              // of the store, if it has versions
    std::vector<ObjectInfo> objects = {};
    size_t next = 0;
    Grant memory = {};
  };
  class Use;       // of a transaction, by a worker
  struct Reading;  // a read that several workers do

  enum class Outcome : uint8_t { done, again, direct };

  void linger();
  bool hello(Packet packet);
  bool take(const Packet& packet);  // false: the connection ends
  bool has_room();
  void answer(uint64_t id, const Answer& answer, uint64_t bytes);
  void answer(uint64_t id, const Error& error, uint64_t bytes);
  void flush() REQUIRES(mutex_);

  Status check_key(std::string_view key) const;
  Status check_rights(const Request& request) const;
  TransactionPtr transaction(uint64_t id);       // to read, also when it was committed
  TransactionPtr open_transaction(uint64_t id);  // to change it
  bool in_memory(uint64_t place, uint64_t bytes) const;
  Result<Answer> blocking(const Request& request);
  Result<Answer> list(const Request& request);
  Result<Listing> whole_list(const Request& request);
  std::optional<Listing> rest_of_list(const Request& request);
  void keep_list(Listing rest);
  Result<Answer> begin();
  Result<Answer> follow(const Request& request);
  void end_plans();
  void write(uint64_t id, const Request& request);
  void commit(uint64_t id, const Request& request);
  void read_staged(const std::shared_ptr<Reading>& reading);
  void read(const std::shared_ptr<Reading>& reading);
  bool read_resident(Reading& reading);
  Status read_piece(Reading& reading, size_t index);
  Result<Outcome> read_blocks(Reading& reading, size_t index, const ObjectInfo& object);
  Status read_direct(Reading& reading, size_t index);
  size_t pins_most() const;
  bool keep(uint32_t slot);  // a pin for the client, within its limit
  bool keep_all(const std::vector<uint32_t>& slots);
  bool unpin(const std::vector<uint32_t>& slots);

  Served& served_;
  const Fd socket_, wake_;
  Fd memory_;  // of the client; set by hello, before any request
  uint64_t memory_bytes_ = 0;
  bool greeted_ = false, read_only_ = false;  // of the thread of run()
  uint64_t next_transaction_ = 1;             // too

  Mutex mutex_;                            // guards what follows
  bool ended_ = false, stopping_ = false;  // stopping: the server ends
  size_t under_way_ = 0;
  uint64_t bytes_under_way_ = 0;
  struct Waiting {
    Outgoing message;
    uint64_t bytes = 0;
  };
  std::deque<Waiting> out_;  // what the socket had no room for
  std::map<uint64_t, Open> transactions_;
  std::deque<Listing> listings_;                 // as they were told
  std::unordered_map<uint32_t, uint32_t> pins_;  // by slot
  size_t pin_count_ = 0;
};

}  // namespace stoker::remote
