// CodedStore: the Store over the shards. docs/formats/coded_store.md is the protocol; this class is
// its state.
//
// Threads: the writer thread alone commits, folds, resyncs and changes the epoch, one after the
// other. Reads run on threads of their own and wait for I/O there.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "stoker/base/pool.h"
#include "stoker/codec/erasure.h"
#include "stoker/store/coded/committed_map.h"
#include "stoker/store/coded/headers.h"
#include "stoker/store/coded/health.h"
#include "stoker/store/coded/pace.h"
#include "stoker/store/coded/reader.h"
#include "stoker/store/coded/rounds.h"
#include "stoker/store/coded/rows.h"
#include "stoker/store/coded/shards.h"
#include "stoker/store/coded/staged.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/coded/table.h"
#include "stoker/store/coded/trouble.h"

namespace stoker::coded {

class Scrubbing;

class CodedStore final : public Store {
 public:
  static Result<std::unique_ptr<CodedStore>> open(const CodedPlan& plan, const Runtime& runtime,
                                                  const StoreOptions& options,
                                                  const CodedOptions& coded);
  ~CodedStore() override;

  Features features() const override { return kFeatures; }
  Result<ObjectInfo> stat(std::string_view key, std::string_view snapshot) override;
  Result<std::vector<ObjectInfo>> list(std::string_view prefix, std::string_view snapshot) override;
  Future<void> read(std::string_view key, uint64_t offset, Slice into,
                    ReadOptions options) override;
  Result<std::unique_ptr<Transaction>> begin() override;
  Future<void> snapshot(std::string_view name) override;
  Future<void> drop(std::string_view name, Durability durability) override;
  StoreInfo info() const override;

  const Shape& shape() const { return shape_; }
  Health health() const;
  // Folds all that is in the log. Nothing else is done meanwhile.
  Future<void> fold_all();
  // Folds what is in the log by now, in steps between commits, as the rate of folds allows: the
  // next opening finds nothing to do.
  Future<void> drain();
  // Looks at everything that is on the live shards, once, and mends what differs from what the
  // others say; then as repair(). `report` is the writer's until it is done.
  Future<void> scrub(std::shared_ptr<ScrubReport> report);
  // What repair() will do, a sentence for each shard that does not count.
  std::vector<std::string> repair_plan() const;
  // The objects of which something is on no live shard, and cannot be decoded, as long as shards
  // are missing.
  std::vector<std::string> affected() const { return map_.affected(); }
  // Resyncs all shards that came back or were made anew, and mends blocks that were found bad,
  // between commits. Done when there is nothing left to do; a shard that could not be brought up to
  // date is told in Health.
  Future<void> repair();

 private:
  friend class StagedTransaction;
  friend class Recovery;
  friend class Folding;
  friend class WrongRows;
  friend class Checking;
  friend class Scrubbing;
  struct Request {
    std::shared_ptr<TransactionState> state;  // null: `work` is to be done
    std::function<Status()> work;
    Promise<Version> committed;
    Promise<void> done;
  };
  // What goes on between batches, a step at a time, until one returns false.
  struct Job {
    std::function<Result<bool>()> step;
    Pace* pace;  // that it keeps to
    Promise<void> done;
  };
  static constexpr Features kFeatures{.atomic = AtomicUnit::transaction,
                                      .update = true,
                                      .conditional = true,
                                      .verified = true,
                                      .versions = true};
  static constexpr size_t kRowsAStep = 64;  // folded in a step that a commit may find before it
  // How much a step of folding takes on.
  struct FoldBounds {
    size_t stripes;
    size_t rows = SIZE_MAX;
    bool spare = false;  // what is still rewritten stays in the log
  };
  // Blocks of one chunk on their way into the logs.
  struct NewVal {
    ValRef val;
    StripePtr stripe;
    std::span<const std::byte> blocks;
  };
  // What a commit does to an object, beside its bytes.
  struct Touched {
    std::string key;
    bool made = false;       // anew
    uint64_t announced = 0;  // if so, its first size
    std::optional<Class> stated;
    std::vector<std::pair<uint64_t, size_t>> writes;
  };
  // What one commit of a batch is about to do.
  struct Prepared {
    Request* request = nullptr;
    Stamp stamp = 0;
    bool needs_commit = false;
    std::string items;
    std::vector<NewVal> vals;
    std::map<uint64_t, StripePtr> fresh;
    std::vector<Touched> touched;
    Status status;
  };

  Status replace(const StoreOptions& options);

  CodedStore(std::unique_ptr<Shards> shards, codec::ErasureCode code, const Runtime& runtime,
             std::string composition, const CodedOptions& coded);

  // writer.cc: the writer thread
  void run();
  void serve(std::vector<Request> batch);
  uint64_t log_bytes(const TransactionState& state) const;
  void work_on(Job& job);
  // All three: false: there is nothing to do, or not yet.
  bool background_step(bool idle);
  bool relieve_log();
  bool patrol_step();
  // beside commits: what keeps it from folding is told once
  Result<size_t> fold_watched(const FoldBounds& bounds);
  void used();  // any thread: somebody uses the store
  Future<void> add_job(std::function<Result<bool>()> step, Pace& pace);  // any thread
  Status keep_scrubbed(const ScrubReport& report, std::chrono::seconds pause);
  // commit.cc: the writer thread
  void commit_batch(std::vector<Request> batch);
  Status check_requirements(const TransactionState& state) const;
  void prepare(Prepared& commit, uint64_t& table_bytes);
  std::vector<StagedStripe*> write_better(Prepared& commit, TransactionState& state);
  Status name_stripes(Prepared& commit, const TransactionState& state, uint64_t& table_bytes) const;
  Result<Grant> take_frames(const std::vector<Request>& batch) const;
  Status write_fresh(const Prepared& commit, const StagedStripe& staged, ShardSet& touched);
  Headers plan_fresh(const Prepared& commit, const StagedStripe& staged) const;
  void take_early(const EarlyStripe& early, uint32_t positions, Headers& headers) const;
  Status write_fresh_rows(const StagedStripe& staged, size_t first, const Scratch& memory,
                          uint32_t positions, Headers& headers, ShardSet& failed);
  Status append_vals(std::vector<Prepared>& commits, ShardSet& touched);
  Status append_commits(std::vector<Prepared>& commits);
  void flip(std::vector<Prepared>& commits);

  // transaction.cc: any thread
  void abandon(std::shared_ptr<TransactionState> state);

  // log_space.cc: the writer thread
  // segments that commits leave to folds and to the next opening
  static constexpr size_t kReserve = 2;
  // Writes the frames, one a shard, and flushes these shards and `touched`. Drops shards that fail;
  // an error if too few are left.
  Status append(std::map<size_t, FrameBuilder>& frames, ShardSet touched,
                std::map<size_t, LogFrame>& written);
  // live shards whose logs have none for their frame
  ShardSet without_room(const std::map<size_t, FrameBuilder>& frames) const;
  Status flush(ShardSet set);
  Status make_room(size_t bytes);
  Status restore_reserve();
  Status checkpoint();
  bool fits(size_t bytes, size_t reserve) const;
  size_t free_segments() const;
  Status drop_shards(ShardSet failed, const std::string& why);
  Status change_epoch(ShardSet to);
  void set_trouble(ShardSet set, const std::string& why);

  // fold.cc: the writer thread
  Result<size_t> fold_step(const FoldBounds& bounds);  // how many stripes were folded
  // the same, and what it moved is spent
  Result<size_t> fold_paced(const FoldBounds& bounds, Pace& pace);
  // rebuild.cc: the writer thread
  struct Compared {
    Headers next;                    // with what was found out of this chunk
    std::vector<size_t> wrong_rows;  // whose block is not what it should be, or not known
    std::set<size_t> lost_pages;     // header pages of which no copy is intact
    std::set<size_t> wrong_pages;    // with entries that are not what they should be
    std::set<size_t> bad_copies;     // whose older copy should be intact too, and is not
  };
  bool adopt(Headers& headers, const RawHeaders& own, size_t position) const;
  void install(const StripePtr& stripe, Headers headers);
  struct Piece {
    size_t first_page = 0, pages = 0;  // of a chunk's header
    size_t first = 0, rows = 0;        // that these are of
  };
  struct Own {
    AlignedBytes pairs;                         // its header pages; zeros where there are none
    std::vector<std::optional<uint32_t>> crcs;  // by row: of its block; none: it could not be read
  };
  Result<Own> read_own(const Stripe& stripe, size_t position, const Piece& piece, RawHeaders& raw);
  Result<Compared> compare(const StripePtr& stripe, size_t position, const Piece& piece);
  struct Rebuilt {
    size_t blocks = 0, pages = 0;  // that were wrong and are right now
    size_t lost = 0;               // blocks that could not be decoded
    std::string why;               // of the first of these
  };
  // A chunk on its way to be right on its shard, live or not, where it differs from what the others
  // say: so far up to `page`.
  struct Rebuilding {
    std::weak_ptr<Stripe> stripe;  // weak: what is removed meanwhile frees its slots
    size_t position = 0, page = 0;
    Rebuilt done = {};
  };
  // about kRowsRebuilt rows; false: that was the last
  Result<bool> rebuild_step(Rebuilding& chunk);
  Result<Rebuilt> rebuild(const StripePtr& stripe, size_t position);  // all steps
  Status mend_unread(const StripePtr& stripe);
  Status load_headers_paced(const StripePtr& stripe);
  Status rebuild_piece(const StripePtr& stripe, size_t position, const Piece& piece, Rebuilt& done);
  void note_loss(const StripePtr& stripe, size_t position, const std::string& why);
  size_t rows_of_share(size_t rows, size_t blocks_a_row) const;
  // resync.cc, admit.cc: the writer thread
  Result<bool> repair_step();  // false: there is nothing to do
  Result<bool> mend_step();    // false: there is nothing to do
  Result<bool> resync_step();  // false: there is nothing to do
  void choose_to_mend(const MapState& map);
  bool choose_joining();
  StripePtr next_to_join();  // null: the joining shard has all
  Status begin_to_join(const StripePtr& stripe);
  Status join_step();
  Status join_again(const StripePtr& stripe);
  Status forget_chunk(const StripePtr& stripe, size_t position);
  Status admit();
  void end_joining();
  void give_up_joining(const std::string& why);  // until the next repair() or opening
  Status make_readable(size_t shard, uint64_t offset, size_t bytes, AlignedBytes& content);
  Status begin_log(size_t shard);
  Status append_settled(size_t shard, const std::vector<std::pair<StripePtr, ValRef>>& vals);
  Shards& shards() { return *shards_; }

  const Runtime runtime_;
  const CodedOptions coded_;
  const std::unique_ptr<Shards> shards_;
  const Shape shape_;
  const codec::ErasureCode code_;
  CommittedMap map_;
  Reader reader_;

  // Of the writer thread.
  // what the table image does not make superfluous yet
  std::vector<std::shared_ptr<const void>> since_image_;
  Rounds rounds_;                            // of appends to the logs
  Stamp image_stamp_ = 0;                    // of the newest table image
  uint64_t images_ = 0;                      // written since it was opened
  std::vector<SegmentRef> stand_ins_;        // of folds that could not be finished
  std::optional<size_t> joining_;            // the shard that is being resynced
  std::optional<Rebuilding> joining_chunk_;  // of it, that has not all of its rows yet
  std::optional<Rebuilding> mending_;
  std::vector<std::pair<uint64_t, size_t>> to_mend_;  // some of bad_, the last one first
  std::vector<std::weak_ptr<Stripe>> to_join_;        // stripes to look at, the last one first
  std::set<uint64_t> joined_;                         // stripes that it has by now
  // shards that failed while they were resynced
  std::set<size_t> given_up_;
  std::shared_ptr<Scrubbing> patrol_;  // the pass that goes on
  // left out and brought back by a scrub, to have log and table readable
  ShardSet renewed_ = 0;
  Pace patrol_pace_;
  std::chrono::steady_clock::time_point patrol_after_;  // none before
  // bytes, by folds and table images since it was opened
  uint64_t moved_ = 0;
  uint64_t image_cost_ = 0;      // of these by the newest image
  uint64_t moved_at_image_ = 0;  // when that was written
  Trouble repair_trouble_{"repair"}, fold_trouble_{"folding"},
      image_trouble_{"writing the object table"};

  std::mutex queue_mutex_;  // guards what follows
  std::condition_variable queued_;
  std::deque<Request> queue_;
  std::deque<Job> jobs_;
  bool stopping_ = false;

  Pace pace_;  // of repair and scrub
  Pace fold_pace_;

  std::unique_ptr<Pool> readers_;
  std::thread writer_;
};

}  // namespace stoker::coded
