// Making and opening a ShardCluster: who is there, who is current, what a node holds, who has to be
// rebuilt.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "curm/shard_cluster.h"
#include "stoker/base/log.h"
#include "stoker/store/folder.h"
#include "stoker/store/store_file.h"
#include "stoker/store/writer_lock.h"

namespace stoker::curm {
namespace {

constexpr uint64_t kReadAtOnce = 32 * kMiB;

// What makes a node count as lost. Anything else (no memory, no descriptors, no permission, in use)
// is not of its disk, and ends opening.
bool loses_node(const Error& error) {
  if (error.sys_errno == EMFILE || error.sys_errno == ENFILE) return false;
  return error.code == Code::not_found || error.code == Code::corruption || error.code == Code::io;
}

// data, parity, log.0, log.1 ...
bool is_nodes_file(const std::string& name) {
  if (name == "data" || name == "parity") return true;
  return name.size() > 4 && name.compare(0, 4, "log.") == 0 &&
         std::all_of(name.begin() + 4, name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Whether a folder holds nothing but, at most, a head that was never written: so a crash leaves it
// that was to be filled.
bool is_untouched(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return !error;
  std::filesystem::directory_iterator files(path, error);
  for (; !error && files != std::filesystem::directory_iterator(); files.increment(error)) {
    if (files->path().filename() != "head" || !files->is_regular_file(error)) return false;
    std::ifstream head(files->path(), std::ios::binary);
    for (uint64_t at = 0; at < 2 * kShardBlock; ++at) {
      const int byte = head.get();
      if (byte == std::ifstream::traits_type::eof()) break;
      if (byte != 0) return false;
    }
  }
  return !error;
}

// All but the head, and what is not the node's.
Status remove_files(const std::string& path) {
  std::error_code error;
  std::vector<std::filesystem::path> doomed;
  std::filesystem::directory_iterator files(path, error);
  for (; !error && files != std::filesystem::directory_iterator(); files.increment(error)) {
    if (is_nodes_file(files->path().filename().string())) doomed.push_back(files->path());
  }
  for (size_t i = 0; i < doomed.size() && !error; ++i) std::filesystem::remove(doomed[i], error);
  return error
             ? fail(error.value(), "what is left of the lost node in '{}' cannot be removed", path)
             : Status();
}

}  // namespace

Result<std::unique_ptr<ShardCluster>> ShardCluster::make(Loop& loop,
                                                         const std::vector<std::string>& paths,
                                                         const Geometry& geometry,
                                                         const ShardOptions& options) {
  std::unique_ptr<ShardCluster> cluster(new ShardCluster(loop, options));
  cluster->layout_ = {geometry, align_up(2 * options.reserved_bytes, kShardBlock),
                      options.segment_bytes};
  if (const std::string problem = cluster->layout_.problem(); !problem.empty())
    return fail(Code::invalid_argument, "such a cluster is not possible: {}", problem);
  if (paths.size() != static_cast<size_t>(geometry.nodes))
    return fail(Code::invalid_argument, "{} nodes need as many folders, and {} are given",
                geometry.nodes, paths.size());
  const StoreId id = random_store_id();
  for (const std::string& path : paths) {
    Node& node = *cluster->nodes_.emplace_back(std::make_unique<Node>(path));
    if (options.files) STOKER_TRY(make_folder(path));
    std::optional<NodeHead> found;
    STOKER_TRY(cluster->open_head(node, true, found));
    if (found)
      return fail(
          Code::already_exists,
          "'{}' holds a node already: delete the folder if nobody needs it, or give another", path);
    node.head = {cluster->layout_,
                 id,
                 random_store_id(),
                 static_cast<NodeId>(cluster->nodes_.size() - 1),
                 0,
                 0,
                 0,
                 true};
    STOKER_TRY(cluster->open_files(node, true));
    node.log->become(node.head, node.parity_file);
  }
  // Every chunk has a header from the beginning: one without is damaged, not new.
  const ShardLayout& layout = cluster->layout_;
  for (uint64_t stripe = 0; stripe < geometry.stripes; ++stripe) {
    std::deque<AlignedBytes> memory;
    IoBatch batch(loop, Priority::demand);
    for (int position = 0; position < geometry.k + geometry.m; ++position) {
      const Chunk chunk{stripe, position};
      Node& node = cluster->node(geometry.node(chunk));
      Header& header = cluster->header(node, chunk);
      header.counter = 1;
      AlignedBytes& copies = memory.emplace_back(2 * layout.header_bytes());
      encode_header(layout, node.head.incarnation, chunk, header,
                    copies.span().first(layout.header_bytes()));
      std::memcpy(copies.data() + layout.header_bytes(), copies.data(), layout.header_bytes());
      batch.write(cluster->file_of(node, chunk), layout.header_at(chunk, 1), copies.slice());
    }
    STOKER_TRY(batch.run());
  }
  if (!mutated(Mutation::skip_making_flush)) STOKER_TRY(cluster->sync_all());
  STOKER_TRY(cluster->settle_opening(1));
  return cluster;
}

Result<std::unique_ptr<ShardCluster>> ShardCluster::open(Loop& loop,
                                                         const std::vector<std::string>& paths,
                                                         const ShardOptions& options) {
  std::unique_ptr<ShardCluster> cluster(new ShardCluster(loop, options));
  std::vector<std::optional<NodeHead>> heads(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) {
    Node& node = *cluster->nodes_.emplace_back(std::make_unique<Node>(paths[i]));
    const Status opened = cluster->open_head(node, false, heads[i]);
    if (!opened && !loses_node(opened.error())) return opened.error();
  }
  STOKER_TRY(cluster->arrange(heads));
  cluster->judge(heads);
  for (auto& node : cluster->nodes_) {
    if (cluster->replaced_.count(node->head.node) != 0) continue;
    std::string damage;
    const Status loaded = cluster->load(*node, damage);
    if (!loaded && !loses_node(loaded.error())) return loaded.error();
    if (!loaded || !damage.empty())
      cluster->lose(*node, loaded ? damage : loaded.error().message());
  }
  const auto m = static_cast<size_t>(cluster->layout_.geometry.m);
  if (cluster->replaced_.size() > m) {
    std::string all;
    for (const std::string& trouble : cluster->troubles_)
      all += (all.empty() ? "" : "; ") + trouble;
    return fail(Code::corruption,
                "{} of {} nodes are lost, but the code tolerates {} ({}): bring one of them back "
                "as it was; nothing was changed",
                cluster->replaced_.size(), paths.size(), m, all);
  }
  for (size_t i = 0; i < heads.size(); ++i) {
    if (cluster->replaced_.count(static_cast<NodeId>(i)) != 0)
      STOKER_TRY(cluster->may_blank(*cluster->nodes_[i], heads[i].has_value()));
  }
  // A killed process may have left what was read in the disks' caches alone.
  if (!mutated(Mutation::skip_opening_flush)) STOKER_TRY(cluster->sync_all());
  for (const NodeId id : cluster->replaced_) STOKER_TRY(cluster->blank(cluster->node(id)));
  uint64_t last = 0;
  for (const auto& node : cluster->nodes_)
    last = std::max({last, node->head.proposed, node->head.confirmed});
  STOKER_TRY(cluster->settle_opening(last + 1));
  return cluster;
}

ShardCluster::~ShardCluster() {
  for (const auto& node : nodes_) {
    bool late = false;  // a write of ours may still land: the lock stays
    const auto note = [&late](const Status& closed) {
      if (closed) return;
      log().warn("{}", closed.error().message());
      late = true;
    };
    for (const FileId file : {node->head_file, node->data_file, node->parity_file}) {
      if (file >= 0) note(loop_.close(file));
    }
    if (node->log) note(node->log->close());
    if (late) continue;
    if (node->named) write_holder(node->lock_fd, "");
    if (node->lock_fd >= 0) unlock_file(node->lock_fd);
  }
}

Status ShardCluster::open_head(Node& node, bool create, std::optional<NodeHead>& found) {
  const std::string path = node.path + "/head";
  OpenFile file;
  file.path = path;
  file.create = create;
  file.reserve_bytes = kHeadFileBytes;
  STOKER_ASSIGN(const FileInfo info, loop_.open(file));
  node.head_file = info.id;
  if (options_.files) {
    STOKER_ASSIGN(node.lock_fd, lock_file(path, node.path, false));
  }
  for (const uint64_t at : {uint64_t{0}, kShardBlock}) {
    if (info.bytes < at + kShardBlock) break;
    AlignedBytes block(kShardBlock);
    IoBatch batch(loop_, Priority::demand);
    batch.read(node.head_file, at, block.slice());
    if (!batch.run()) continue;  // the other copy
    STOKER_ASSIGN(const auto head, decode_head(block.span()));
    if (head && (!found || head->counter > found->counter)) found = head;
  }
  if (found || create) name_holder(node);  // else it may be somebody's file
  return {};
}

void ShardCluster::name_holder(Node& node) {
  if (node.lock_fd < 0 || node.named) return;
  write_holder(node.lock_fd, "pid " + std::to_string(getpid()));
  node.named = true;
}

// One cluster, every node once; what is not there takes the places that are left.
Status ShardCluster::arrange(std::vector<std::optional<NodeHead>>& heads) {
  const auto known =
      std::find_if(heads.begin(), heads.end(), [](const auto& head) { return head.has_value(); });
  if (known == heads.end())
    return fail(Code::not_found, "there is no node of a cluster at '{}' and its companions",
                nodes_.empty() ? std::string() : nodes_[0]->path);
  layout_ = (*known)->layout;
  const StoreId cluster = (*known)->cluster;
  if (nodes_.size() != static_cast<size_t>(layout_.geometry.nodes))
    return fail(Code::mismatch, "the cluster has {} nodes, and {} folders are given: name them all",
                layout_.geometry.nodes, nodes_.size());
  std::vector<size_t> from(nodes_.size(), SIZE_MAX);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!heads[i]) continue;
    if (heads[i]->cluster != cluster)
      return fail(Code::mismatch, "'{}' is a node of another cluster: name those of one",
                  nodes_[i]->path);
    size_t& at = from[static_cast<size_t>(heads[i]->node)];
    if (at != SIZE_MAX)
      return fail(Code::mismatch, "'{}' is a copy of '{}', or the same node twice", nodes_[i]->path,
                  nodes_[at]->path);
    at = i;
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!heads[i]) *std::find(from.begin(), from.end(), SIZE_MAX) = i;
  }
  std::vector<std::unique_ptr<Node>> ordered;
  std::vector<std::optional<NodeHead>> ordered_heads;
  for (const size_t at : from) {
    ordered.push_back(std::move(nodes_[at]));
    ordered_heads.push_back(heads[at]);
    const NodeHead blank{layout_, cluster, {}, static_cast<NodeId>(ordered.size() - 1),
                         0,       0,       0,  false};
    ordered.back()->head = ordered_heads.back().value_or(blank);
  }
  nodes_ = std::move(ordered);
  heads = std::move(ordered_heads);
  return {};
}

// A member of an opening that anybody confirmed had it proposed before.
void ShardCluster::judge(const std::vector<std::optional<NodeHead>>& heads) {
  uint64_t confirmed = 0;
  for (const auto& node : nodes_) confirmed = std::max(confirmed, node->head.confirmed);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const NodeHead& head = nodes_[i]->head;
    if (!heads[i])
      lose(*nodes_[i], "is not there");
    else if (!head.member)
      lose(*nodes_[i], "was not rebuilt to the end");
    else if (head.proposed < confirmed)
      lose(*nodes_[i], "is an old copy: the others went on without it");
    else if (confirmed == 0)
      lose(*nodes_[i], "belongs to a cluster that was never made to the end");
  }
}

void ShardCluster::lose(Node& node, std::string why) {
  replaced_.insert(node.head.node);
  troubles_.push_back("'" + node.path + "' " + std::move(why));
}

Status ShardCluster::open_files(Node& node, bool create) {
  for (const bool data : {true, false}) {
    OpenFile file;
    file.path = node.path + (data ? "/data" : "/parity");
    file.create = create;
    file.reserve_bytes = layout_.slots(data) * layout_.slot_bytes(data);
    STOKER_ASSIGN(const FileInfo info, loop_.open(file));
    (data ? node.data_file : node.parity_file) = info.id;
    direct_ = direct_ && info.direct;
    if (info.bytes < file.reserve_bytes)
      return fail(Code::corruption, "'{}' is cut short", file.path);
  }
  node.log = std::make_unique<ShardLog>(layout_, loop_, node.path);
  return node.log->open_segments();
}

Status ShardCluster::load(Node& node, std::string& damage) {
  STOKER_TRY(open_files(node, false));
  node.log->become(node.head, node.parity_file);
  for (const bool data : {true, false}) STOKER_TRY(load_headers(node, data, damage));
  if (!damage.empty()) return {};
  for (const auto& [chunk, header] : node.headers) {
    node.found.folded[chunk] = header.folded;
    if (header.said.seq != 0) node.found.said[chunk] = header.said;
  }
  STOKER_TRY(node.log->load(node.found, damage));
  if (!damage.empty()) return {};
  find_flux(node);
  return options_.verify ? verify(node, damage) : Status();
}

Status ShardCluster::load_headers(Node& node, bool data, std::string& damage) {
  const uint64_t each = layout_.header_bytes(),
                 at_once = std::max<uint64_t>(1, kReadAtOnce / (4 * each));
  for (uint64_t first = 0; first < layout_.slots(data) && damage.empty(); first += at_once) {
    std::deque<std::pair<Chunk, AlignedBytes>> memory;
    IoBatch batch(loop_, Priority::demand);
    for (uint64_t slot = first; slot < std::min(first + at_once, layout_.slots(data)); ++slot) {
      const Chunk chunk = layout_.chunk_in(node.head.node, data, slot);
      if (chunk.stripe >= layout_.geometry.stripes) continue;
      const AlignedBytes& bytes = memory.emplace_back(chunk, AlignedBytes(4 * each)).second;
      batch.read(file_of(node, chunk), layout_.slot_at(chunk), bytes.slice());
    }
    STOKER_TRY(batch.run());
    for (const auto& [chunk, bytes] : memory) {
      std::optional<ChunkHeader> newest;
      for (uint64_t copy = 0; copy < 4; ++copy) {
        auto found = decode_header(layout_, node.head.incarnation, chunk,
                                   bytes.span().subspan(copy * each, each));
        if (found && (!newest || found->counter > newest->counter)) newest = std::move(found);
      }
      if (!newest) {
        damage = "has a damaged header, of chunk " + std::to_string(chunk.position) +
                 " of stripe " + std::to_string(chunk.stripe);
        return {};
      }
      static_cast<ChunkHeader&>(header(node, chunk)) = std::move(*newest);
    }
  }
  return {};
}

// Blocks that a record above the mark may have overwritten hold anything between old and new.
// Recovery writes them again before it reads them.
void ShardCluster::find_flux(Node& node) {
  const auto nodes = static_cast<uint64_t>(layout_.geometry.nodes);
  const auto mine = [&](uint64_t stripe) {
    return Chunk{
        stripe,
        static_cast<int>((static_cast<uint64_t>(node.head.node) + nodes - stripe % nodes) % nodes)};
  };
  std::map<uint64_t, uint64_t> commits;  // the last of each stripe
  for (const auto& [place, record] : node.found.records) {
    if (record.kind == Record::Kind::commit)
      commits[record.chunk.stripe] = std::max(commits[record.chunk.stripe], record.seq);
  }
  for (const auto& [place, record] : node.found.records) {
    const Chunk chunk = mine(record.chunk.stripe);
    bool overwrites = record.kind == Record::Kind::parity && !layout_.is_data(chunk);
    if (record.kind == Record::Kind::stage || record.kind == Record::Kind::value)
      overwrites = record.chunk == chunk;
    if (record.needs_commit && commits[record.chunk.stripe] < record.seq) overwrites = false;
    const auto found = node.headers.find(chunk);
    if (!overwrites || found == node.headers.end() || record.seq <= found->second.folded) continue;
    for (const Record::Range& range : record.ranges) {
      for (uint64_t block = range.offset / kShardBlock;
           block * kShardBlock < range.offset + range.value.size(); ++block)
        found->second.flux[block] = true;
    }
  }
}

Status ShardCluster::verify(Node& node, std::string& damage) {
  const uint64_t bytes = layout_.geometry.chunk_bytes,
                 at_once = std::max<uint64_t>(1, kReadAtOnce / bytes);
  for (auto next = node.headers.begin(); next != node.headers.end();) {
    std::deque<std::pair<decltype(next), AlignedBytes>> memory;
    IoBatch batch(loop_, Priority::scrub);
    for (; next != node.headers.end() && memory.size() < at_once; ++next) {
      const AlignedBytes& into = memory.emplace_back(next, AlignedBytes(bytes)).second;
      batch.read(file_of(node, next->first), layout_.block_at(next->first, 0), into.slice());
    }
    STOKER_TRY(batch.run());
    for (const auto& [at, read] : memory) {
      const auto& [chunk, header] = *at;
      for (uint64_t block = 0; block < layout_.blocks(); ++block) {
        if (header.flux[block] || header.blocks[block] == 0 ||
            header.blocks[block] ==
                block_mark(read.span().subspan(block * kShardBlock, kShardBlock)))
          continue;
        damage = "has a damaged block, " + std::to_string(block) + " of chunk " +
                 std::to_string(chunk.position) + " of stripe " + std::to_string(chunk.stripe);
        return {};
      }
    }
  }
  return {};
}

// A path that was mistyped may name a folder of somebody else's.
Status ShardCluster::may_blank(const Node& node, bool ours) const {
  if (!options_.files || ours || is_untouched(node.path)) return {};
  return fail(Code::already_exists,
              "cannot rebuild the lost node in '{}': it holds files that are not of this cluster. "
              "Check the path, or empty the folder if nobody needs them. Nothing was changed",
              node.path);
}

// Its files are used again where there are any: with a new incarnation nothing that is in them
// counts. The head comes first, and says whose all else is.
Status ShardCluster::blank(Node& node) {
  if (options_.files) STOKER_TRY(make_folder(node.path));
  std::optional<NodeHead> found;
  if (node.head_file < 0) STOKER_TRY(open_head(node, true, found));
  name_holder(node);
  node.head.layout = layout_;
  node.head.incarnation = random_store_id();
  node.head.member = false;
  STOKER_TRY(write_heads({&node}, Mutation::skip_blanking_flush));
  const auto close = [&](FileId& file) {
    if (file < 0) return Status();
    return loop_.close(std::exchange(file, -1));
  };
  const auto close_all = [&]() -> Status {
    STOKER_TRY(close(node.data_file));
    STOKER_TRY(close(node.parity_file));
    return node.log ? node.log->close() : Status();
  };
  STOKER_TRY(close_all());
  Status opened = open_files(node, true);
  if (!opened && opened.error().code == Code::corruption && options_.files) {  // cut short
    STOKER_TRY(close_all());
    STOKER_TRY(remove_files(node.path));
    opened = open_files(node, true);
  }
  if (!opened) return opened;
  node.headers.clear();
  node.found = {};
  node.log->become(node.head, node.parity_file);
  return {};
}

// Nothing is decided, and nothing written but heads, before all that are there confirm the opening:
// so who was not there is known to be old.
Status ShardCluster::settle_opening(uint64_t opening) {
  std::vector<Node*> all;
  all.reserve(nodes_.size());
  for (const auto& node : nodes_) all.push_back(node.get());
  for (Node* node : all) node->head.proposed = opening;
  STOKER_TRY(write_heads(all, Mutation::skip_proposal_flush));
  for (Node* node : all) node->head.confirmed = opening;
  return write_heads(all, Mutation::skip_confirmation_flush);
}

Status ShardCluster::write_heads(const std::vector<Node*>& nodes, Mutation unflushed) {
  std::deque<AlignedBytes> memory;
  IoBatch writes(loop_, Priority::demand), syncs(loop_, Priority::demand);
  for (Node* node : nodes) {
    AlignedBytes& block = memory.emplace_back(kShardBlock);
    const uint64_t counter = ++node->head.counter;
    const std::string bytes = encode_head(node->head);
    std::memset(block.data(), 0, kShardBlock);
    std::memcpy(block.data(), bytes.data(), bytes.size());
    writes.write(node->head_file, (counter & 1) * kShardBlock, block.slice());
    if (!mutated(unflushed)) syncs.sync(node->head_file);
  }
  STOKER_TRY(writes.run());
  return syncs.run();
}

// Heads are flushed when the opening is proposed; until then only nodes that are lost are written
// to.
Status ShardCluster::sync_all() {
  IoBatch batch(loop_, Priority::demand);
  for (const auto& node : nodes_) {
    if (replaced_.count(node->head.node) != 0) continue;
    for (const FileId file : {node->data_file, node->parity_file}) batch.sync(file);
    for (const FileId file : node->log->files()) batch.sync(file);
  }
  return batch.run();
}

Status ShardCluster::admit() {
  std::vector<Node*> rebuilt;
  for (const NodeId id : replaced_) {
    node(id).head.member = true;
    rebuilt.push_back(&node(id));
  }
  for (const auto& each : nodes_) each->found = {};
  replaced_.clear();
  troubles_.clear();
  return rebuilt.empty() ? Status() : write_heads(rebuilt, Mutation::skip_admission_flush);
}

}  // namespace stoker::curm
