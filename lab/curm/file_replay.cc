#include "curm/file_replay.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>

#include "curm/curm.h"
#include "curm/file_clients.h"
#include "curm/scheme_switch.h"
#include "curm/shard_cluster.h"
#include "curm/stripes.h"
#include "stoker/base/log.h"
#include "stoker/store/folder.h"

namespace stoker::curm {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kWritesPerChange = 8;  // of scheme `switch`

// What a block of a data chunk holds after so many writes.
void fill_block(std::span<std::byte> block, uint64_t address, uint64_t version) {
  uint64_t state = address * 0x9E3779B97F4A7C15ULL + version * 0xD1B54A32D192ED03ULL;
  for (size_t at = 0; at < block.size(); at += 8) {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t word = state;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ word >> 27) * 0x94D049BB133111EBULL;
    word ^= word >> 31;
    std::memcpy(block.data() + at, &word, 8);
  }
}

Geometry geometry_of(const Trace& trace, const ReplayOptions& options) {
  Stripes stripes(options.k, options.chunk_bytes);
  for (const Request& request : trace.requests) {
    stripes.at(request, request.offset);
    if (request.write) static_cast<void>(stripes.cut(request));
  }
  return {options.k, options.m, options.nodes, options.chunk_bytes,
          std::max<uint64_t>(1, stripes.count())};
}

ShardOptions shard_options(std::string_view scheme, const ReplayOptions& options) {
  ShardOptions shards;
  // 16 MiB, and less where the logs are small.
  shards.segment_bytes =
      std::max(ShardLayout::segment_min(options.chunk_bytes),
               std::min<uint64_t>(16 * kMiB, align_up(options.log_bytes / 4, kShardBlock)));
  shards.reserved_bytes = scheme == "plr" || scheme == kSwitch ? options.reserved_bytes : 0;
  // what is rebuilt reads all that it needs, and everything is compared in the end
  shards.verify = false;
  return shards;
}

uint64_t allocated_bytes(const std::string& folder) {
  uint64_t sum = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    struct stat st {};
    if (entry.is_regular_file() && ::stat(entry.path().c_str(), &st) == 0)
      sum += static_cast<uint64_t>(st.st_blocks) * 512;
  }
  return sum;
}

class FileReplay {
 public:
  FileReplay(const Trace& trace, std::string_view scheme, const ReplayOptions& options,
             const FileReplayOptions& files, const ClassTree* tree)
      : trace_(trace),
        name_(scheme),
        options_(options),
        files_(files),
        tree_(tree),
        geometry_(geometry_of(trace, options)),
        root_(files.folder + "/stoker-curm-replay"),
        shards_(shard_options(scheme, options)) {}
  ~FileReplay() {
    scheme_.reset();
    cluster_.reset();
    loop_.reset();
    std::error_code error;
    if (mine_ && !files_.keep) fs::remove_all(root_, error);
    if (error) log().warn("'{}' could not be removed: {}", root_, error.message());
  }
  FileReplay(const FileReplay&) = delete;
  FileReplay& operator=(const FileReplay&) = delete;

  Result<FileReplayResult> run() {
    STOKER_TRY(make());
    STOKER_TRY(fill());
    STOKER_TRY(measure());
    STOKER_TRY(rebuild());
    STOKER_TRY(verify());
    return result_;
  }

 private:
  void tell(const std::string& what) const {
    if (files_.tell) files_.tell(name_ + ": " + what);
  }

  Status make() {
    STOKER_TRY(make_folder(files_.folder));
    std::error_code error;
    mine_ = fs::create_directory(root_, error);  // by one of several replays at once
    if (error) return fail(error.value(), "the folder '{}' cannot be made", root_);
    if (!mine_)
      return fail(Code::already_exists,
                  "'{}' is there already, from a replay that runs or was killed: delete it if none "
                  "runs, or give another --dir",
                  root_);
    STOKER_ASSIGN(auto engine, make_engine());
    result_.engine = engine->traits().name;
    STOKER_ASSIGN(loop_, Loop::make(std::move(engine)));
    for (int i = 0; i < options_.nodes; ++i) paths_.push_back(root_ + "/node" + std::to_string(i));
    STOKER_ASSIGN(cluster_, ShardCluster::make(*loop_, paths_, geometry_, shards_));
    result_.direct = cluster_->direct();
    versions_.resize(geometry_.stripes * static_cast<uint64_t>(options_.k) * blocks());
    STOKER_ASSIGN(code_, codec::ErasureCode::make(options_.k, options_.m));
    clients_ = std::make_unique<Clients>(*cluster_);
    return begin_scheme(*clients_);
  }

  Status begin_scheme(Substrate& substrate) {
    scheme_ = make_scheme_or_switch(
        name_, {&substrate, geometry_, *code_, Form::safe, options_.reserved_bytes});
    if (!scheme_)
      return fail(
          Code::invalid_argument,
          "there is no scheme `{}`; there are fo, fl, pl, plr, parix, vdl, curm and curm-reserve",
          name_);
    if (auto* curm = dynamic_cast<Curm*>(scheme_.get()); curm != nullptr && tree_ != nullptr)
      curm->set_classes([this](uint64_t stripe) { return classes_->of(stripe); });
    return {};
  }

  uint64_t blocks() const { return options_.chunk_bytes / kUpdateBlock; }
  uint64_t address(uint64_t stripe, int position) const {
    return (stripe * static_cast<uint64_t>(options_.k) + static_cast<uint64_t>(position)) *
           blocks();
  }
  std::vector<std::byte> expected(uint64_t stripe, int position) const {
    std::vector<std::byte> bytes(options_.chunk_bytes);
    const uint64_t first = address(stripe, position);
    for (uint64_t block = 0; block < blocks(); ++block)
      fill_block(std::span(bytes).subspan(block * kUpdateBlock, kUpdateBlock), first + block,
                 versions_[first + block]);
    return bytes;
  }
  Result<std::vector<Value>> stripe_content(uint64_t stripe) const {
    std::vector<std::vector<std::byte>> chunks;
    chunks.reserve(geometry_.chunks());
    for (int position = 0; position < options_.k; ++position)
      chunks.push_back(expected(stripe, position));
    chunks.resize(geometry_.chunks(), std::vector<std::byte>(options_.chunk_bytes));
    std::vector<codec::Source> data;
    std::vector<codec::Target> parity;
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (i < static_cast<size_t>(options_.k))
        data.push_back({chunks[i], {}});
      else
        parity.push_back({chunks[i], {}});
    }
    STOKER_TRY(code_->encode(data, parity));
    std::vector<Value> values;
    values.reserve(chunks.size());
    for (auto& chunk : chunks) values.push_back(Value::of(std::move(chunk)));
    return values;
  }

  // What the volumes held before the trace began. Nothing that is read later was never written.
  Status fill() {
    for (uint64_t stripe = 0; stripe < geometry_.stripes; ++stripe) {
      if (stripe % 256 == 0)
        tell("filling, " + human_bytes(stripe * geometry_.chunks() * options_.chunk_bytes) +
             " of " + human_bytes(geometry_.stripes * geometry_.chunks() * options_.chunk_bytes));
      STOKER_ASSIGN(const std::vector<Value> chunks, stripe_content(stripe));
      Round round;
      round.background = true;
      for (int position = 0; position < options_.k + options_.m; ++position) {
        const Chunk chunk{stripe, position};
        Errand& errand = round.to(geometry_.node(chunk));
        errand.write(chunk, 0, chunks[static_cast<size_t>(position)]);
        errand.mark(chunk, 0);
        if (stripe % 64 == 63) errand.flush();
      }
      STOKER_TRY(cluster_->run(round));
    }
    Round all;
    for (NodeId node = 0; node < options_.nodes; ++node) all.to(node).flush();
    STOKER_TRY(cluster_->run(all));
    static_cast<void>(cluster_->take_counts());
    return {};
  }

  // The next write; reads only move the classes.
  bool next(std::vector<std::vector<Update>>& groups) {
    for (; at_ < trace_.requests.size() && !stop_; ++at_) {
      const Request& request = trace_.requests[at_];
      const uint64_t touched = stripes_->at(request, request.offset);
      if (classes_) classes_->see(touched, access_of(request));
      if (!request.write || request.bytes == 0) continue;
      groups = stripes_->cut(request);
      for (const auto& pieces : groups) {
        for (const Update& piece : pieces) taken_bytes_ += piece.value.size();
      }
      if (++at_ % 5000 == 0)
        tell("request " + std::to_string(at_) + " of " + std::to_string(trace_.requests.size()));
      stop_ = until_bytes_ != 0 && taken_bytes_ >= until_bytes_;
      return true;
    }
    return false;
  }

  void give_bytes(std::vector<Update>& pieces) {
    for (Update& piece : pieces) {
      std::vector<std::byte> bytes(piece.value.size());
      const uint64_t first =
          address(piece.chunk.stripe, piece.chunk.position) + piece.offset / kUpdateBlock;
      for (uint64_t at = 0; at < bytes.size(); at += kUpdateBlock) {
        const uint64_t block = first + at / kUpdateBlock;
        fill_block(std::span(bytes).subspan(at, kUpdateBlock), block, ++versions_[block]);
      }
      piece.value = Value::of(std::move(bytes));
    }
  }

  // Of scheme `switch`, with the clients' mutex, which a change lets go of.
  Status turn(uint64_t stripe) {
    auto& schemes = static_cast<SchemeSwitch&>(*scheme_);
    if (const uint64_t written = ++written_; written % kWritesPerChange == 0) {
      const std::string_view next = kSchemes[written / kWritesPerChange % std::size(kSchemes)];
      if (next != schemes.scheme_of(stripe)) ++result_.changes;
      STOKER_TRY(schemes.change(stripe, next));
      said_[stripe] = next;
    }
    ++result_.writes_by_scheme[std::string(schemes.scheme_of(stripe))];
    return {};
  }

  // From the beginning of the trace, up to so many bytes; 0: to its end.
  Status play(uint64_t until_bytes) {
    at_ = 0;
    taken_bytes_ = 0;
    stop_ = false;
    until_bytes_ = until_bytes;
    stripes_.emplace(options_.k, options_.chunk_bytes);
    classes_.reset();
    if (tree_ != nullptr) classes_.emplace(*tree_);
    Clients::Work work;
    work.scheme = scheme_.get();
    work.next = [this](std::vector<std::vector<Update>>& groups) { return next(groups); };
    work.fill = [this](std::vector<Update>& pieces) { give_bytes(pieces); };
    if (name_ == kSwitch) work.before = [this](uint64_t stripe) { return turn(stripe); };
    work.log_bytes = options_.log_bytes;
    work.folds = until_bytes == 0;
    return clients_->play(work, options_.clients, folders());
  }
  int folders() const { return std::min(options_.nodes, 16); }

  Status measure() {
    tell("updates, " + std::to_string(options_.clients) + " clients");
    const IoCounters& moved = loop_->counters();
    const uint64_t read = moved.read_bytes.get(), written = moved.written_bytes.get(),
                   flushed = moved.syncs.get();
    const uint64_t begun = Clock::real().now_ns();
    STOKER_TRY(play(0));
    ReplayResult& result = result_.result;
    result.updates = clients_->updates();
    result.update_bytes = clients_->update_bytes();
    const auto updates = static_cast<double>(result.updates);
    result.updates_per_second =
        clients_->acknowledged_ns() == 0
            ? 0
            : updates * 1e9 / static_cast<double>(clients_->acknowledged_ns());
    std::vector<uint64_t> latencies = clients_->latencies_ns();
    std::sort(latencies.begin(), latencies.end());
    const auto quantile = [&](size_t percent) {
      return latencies.empty()
                 ? 0.0
                 : static_cast<double>(latencies[(latencies.size() - 1) * percent / 100]) / 1e3;
    };
    result.p50_us = quantile(50);
    result.p99_us = quantile(99);
    tell("folding the rest");
    STOKER_TRY(clients_->drain(*scheme_, options_.clients == 1 ? 1 : folders()));
    result.drained_updates_per_second =
        updates * 1e9 / static_cast<double>(Clock::real().now_ns() - begun);
    result.counts = cluster_->take_counts();
    result_.disk_bytes_read = moved.read_bytes.get() - read;
    result_.disk_bytes_written = moved.written_bytes.get() - written;
    result_.disk_flushes = moved.syncs.get() - flushed;
    // Segments are used again, never given back: what is allocated now is the most that there was.
    result.space_peak_bytes = allocated_bytes(root_);
    result.space_base_bytes = geometry_.stripes * geometry_.chunks() * options_.chunk_bytes;
    result.reserved_peak_bytes =
        geometry_.stripes * static_cast<uint64_t>(options_.m) * shards_.reserved_bytes +
        scheme_->reserved_peak_bytes();
    return {};
  }

  Status rebuild() {
    tell("updates before a node is lost");
    STOKER_TRY(play(options_.log_bytes));
    scheme_.reset();
    clients_.reset();
    cluster_.reset();
    std::error_code error;
    fs::remove_all(paths_[0], error);
    if (error) return fail(error.value(), "the folder '{}' cannot be deleted", paths_[0]);
    tell("rebuilding a node");
    const uint64_t begun = Clock::real().now_ns();
    STOKER_ASSIGN(cluster_, ShardCluster::open(*loop_, paths_, shards_));
    if (cluster_->replaced() != std::set<NodeId>{0})
      return fail(Code::corruption, "other nodes than the one that was deleted are lost: {}",
                  cluster_->troubles().empty() ? "none" : cluster_->troubles().back());
    STOKER_TRY(begin_scheme(*cluster_));
    STOKER_TRY(scheme_->recover(cluster_->replaced()));
    STOKER_TRY(cluster_->admit());
    result_.result.recovery_seconds = static_cast<double>(Clock::real().now_ns() - begun) / 1e9;
    for (const auto& [stripe, said] : said_) {
      const std::string_view now = static_cast<SchemeSwitch&>(*scheme_).scheme_of(stripe);
      if (now != said)
        return fail(Code::corruption,
                    "after the rebuild stripe {} goes by {}, and was given {}: this is a bug; run "
                    "again with --keep and report it",
                    stripe, now, said);
    }
    return {};
  }

  // Every chunk, data and parity, is what the acknowledged updates make of it.
  Status verify() {
    tell("comparing every block");
    for (uint64_t stripe = 0; stripe < geometry_.stripes; ++stripe) {
      STOKER_ASSIGN(const std::vector<Value> chunks, stripe_content(stripe));
      Round round;
      round.background = true;
      std::vector<Slot> slots;
      slots.reserve(chunks.size());
      for (int position = 0; position < options_.k + options_.m; ++position)
        slots.push_back(round.to(geometry_.node({stripe, position}))
                            .read({stripe, position}, 0, options_.chunk_bytes));
      STOKER_TRY(cluster_->run(round));
      for (size_t i = 0; i < slots.size(); ++i) {
        if (std::memcmp(slots[i]->bytes().data(), chunks[i].bytes().data(), options_.chunk_bytes) ==
            0)
          continue;
        return fail(Code::corruption,
                    "after the rebuild chunk {} of stripe {} holds other bytes than were "
                    "acknowledged: this is a bug of scheme {}; run again with --keep and report it",
                    i, stripe, name_);
      }
      result_.verified_bytes += geometry_.chunks() * options_.chunk_bytes;
    }
    return {};
  }

  const Trace& trace_;
  const std::string name_;
  const ReplayOptions options_;
  const FileReplayOptions& files_;
  const ClassTree* tree_;
  const Geometry geometry_;
  const std::string root_;
  const ShardOptions shards_;
  bool mine_ = false;
  std::vector<std::string> paths_;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<ShardCluster> cluster_;
  std::unique_ptr<Clients> clients_;
  std::unique_ptr<Scheme> scheme_;
  std::optional<codec::ErasureCode> code_;
  std::optional<ClassTable> classes_;
  std::optional<Stripes> stripes_;
  std::vector<uint32_t> versions_;             // of each block of data
  std::map<uint64_t, std::string_view> said_;  // the scheme that a stripe was given
  uint64_t written_ = 0;
  size_t at_ = 0;
  uint64_t taken_bytes_ = 0, until_bytes_ = 0;
  bool stop_ = false;
  FileReplayResult result_;
};

}  // namespace

uint64_t space_needed(const Trace& trace, std::string_view scheme, const ReplayOptions& options) {
  const ShardOptions shards = shard_options(scheme, options);
  const ShardLayout layout{geometry_of(trace, options),
                           align_up(2 * shards.reserved_bytes, kShardBlock), shards.segment_bytes};
  const auto nodes = static_cast<uint64_t>(options.nodes),
             copies = static_cast<uint64_t>(options.m) + 1;
  const uint64_t files = layout.slots(true) * layout.slot_bytes(true) +
                         layout.slots(false) * layout.slot_bytes(false) + kHeadFileBytes;
  // An update of a block takes two in the log, and clients go on while the logs are folded; a
  // segment is begun, and one is half empty.
  return nodes * (files + 3 * shards.segment_bytes) + 4 * copies * options.log_bytes;
}

Result<FileReplayResult> replay_on_files(const Trace& trace, std::string_view scheme,
                                         const ReplayOptions& options,
                                         const FileReplayOptions& files, const ClassTree* tree) {
  if (options.k < 1 || options.m < 1 || options.nodes < options.k + options.m) {
    return fail(Code::invalid_argument,
                "a code of {}+{} needs at least as many nodes as chunks, and there are {}; give "
                "more with --nodes",
                options.k, options.m, options.nodes);
  }
  std::error_code error;
  fs::path there = fs::absolute(files.folder, error);
  while (!there.empty() && !fs::exists(there, error) && there != there.parent_path())
    there = there.parent_path();
  const fs::space_info space = fs::space(there, error);
  const uint64_t need = space_needed(trace, scheme, options);
  if (!error && space.available < need) {
    return fail(Code::out_of_space,
                "the nodes of `{}` for {} take about {} in '{}', where {} are free: free some "
                "space, give another --dir, or a smaller --log",
                scheme, trace.name, human_bytes(need), files.folder, human_bytes(space.available));
  }
  auto result = FileReplay(trace, scheme, options, files, tree).run();
  if (!result)
    return result.error().with("replaying " + trace.name + " by " + std::string(scheme) +
                               " on files");
  return result;
}

}  // namespace stoker::curm
