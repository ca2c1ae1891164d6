#include "stoker/classes/classes.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "stoker/base/check.h"
#include "stoker/classes/class_tree.h"

namespace stoker {
namespace {

constexpr size_t kDepthMax = 6;
constexpr float kRolling = 0.998F;       // a judgement's weight after the next
constexpr float kRewritesMuch = 0.25F;   // of the blocks an object writes: more makes it read-write
constexpr uint64_t kBlock = 4096;

Error bad(const std::string& what) { return make_error(Code::invalid_argument, "this is no class tree: " + what + "; make one with `stoker curm train`", "classes"); }

// What an object did in a window.
Class truth(uint32_t reads, uint32_t blocks, uint32_t rewritten) {
  if (blocks == 0) return Class::read_only;
  const bool rewrites = static_cast<float>(rewritten) > kRewritesMuch * static_cast<float>(blocks);
  return rewrites || reads != 0 ? Class::read_write : Class::write_only;
}

}  // namespace

const ClassTree& ClassTree::shipped() {
  static const ClassTree shipped = [] {
    auto tree = parse(kShippedTree);
    STOKER_CHECK(tree.has_value());  // a test parses it
    return std::move(*tree);
  }();
  return shipped;
}

Result<ClassTree> ClassTree::parse(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("nodes") || !json["nodes"].is_array()) return bad("it is not JSON with a list of `nodes`");
  const auto& nodes = json["nodes"];
  if (nodes.empty() || nodes.size() >= size_t{2} << kDepthMax) return bad("it has " + std::to_string(nodes.size()) + " nodes, and 1 to 127 can be");
  ClassTree tree;
  std::vector<size_t> depth(nodes.size(), 0);
  for (size_t at = 0; at < nodes.size(); ++at) {
    const auto& given = nodes[at];
    if (!given.is_object()) return bad("node " + std::to_string(at) + " is no object");
    Node node;
    if (given.contains("class")) {
      const auto found = given["class"].is_string() ? class_of(given["class"].get<std::string>()) : std::nullopt;
      if (!found) return bad("the class of node " + std::to_string(at) + " is none of ours");
      node.leaf = *found;
    } else {
      const auto name = given.find("feature"), threshold = given.find("threshold"), left = given.find("left"), right = given.find("right");
      const bool whole = name != given.end() && name->is_string() && threshold != given.end() && threshold->is_number() && left != given.end() && left->is_number_unsigned() && right != given.end() && right->is_number_unsigned();
      if (!whole) return bad("node " + std::to_string(at) + " has neither a class nor feature, threshold, left and right");
      const auto found = std::find(kFeatureNames.begin(), kFeatureNames.end(), name->get<std::string>());
      if (found == kFeatureNames.end()) return bad("the feature of node " + std::to_string(at) + " is none of ours");
      node.feature = static_cast<int16_t>(found - kFeatureNames.begin());
      node.threshold = threshold->get<float>();
      for (const auto& [child, to] : {std::pair{left->get<uint64_t>(), &node.left}, {right->get<uint64_t>(), &node.right}}) {
        if (child <= at || child >= nodes.size()) return bad("node " + std::to_string(at) + " leads to a node that is not behind it");
        depth[child] = std::max(depth[child], depth[at] + 1);
        if (depth[child] > kDepthMax) return bad("it is deeper than " + std::to_string(kDepthMax));
        *to = static_cast<uint16_t>(child);
      }
    }
    tree.nodes_.push_back(node);
  }
  return tree;
}

ClassTree ClassTree::contrary() const {
  ClassTree other = *this;
  for (Node& node : other.nodes_) {
    if (node.feature < 0) node.leaf = node.leaf == Class::read_write ? Class::write_only : Class::read_write;
  }
  return other;
}

Class ClassTable::of(uint64_t id) const {
  const bool trusted = recent_right_ >= recent_majority_right_;
  const auto found = objects_.find(id);
  if (found == objects_.end()) return Class::read_write;
  return trusted || found->second.stated ? found->second.held : Class::read_write;
}

std::optional<ClassTable::Known> ClassTable::known(uint64_t id) const {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return {};
  return Known{found->second.held, found->second.stated};
}

void ClassTable::set(uint64_t id, Known known) {
  Object& object = objects_[id];
  object.stated = known.stated;
  object.said = known.held;
  hold(object, known.held);
}

void ClassTable::forget(uint64_t id) {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return;
  if (found->second.seen) {
    hold(found->second, Class::read_only);
    --volumes_.at(found->second.volume).objects;
  }
  objects_.erase(found);
  std::erase(touched_, id);
}

uint64_t ClassTable::memory_bytes() const {
  uint64_t bytes = objects_.size() * (sizeof(Object) + 64);
  for (const auto& [id, object] : objects_) bytes += object.written.size() * (kPageBlocks / 8 + 40);
  return bytes;
}

void ClassTable::hold(Object& object, Class held) {
  if (object.seen) {
    Volume& volume = volumes_.at(object.volume);
    volume.read_write += held == Class::read_write ? 1 : 0;
    volume.read_write -= object.held == Class::read_write ? 1 : 0;
  }
  object.held = held;
}

void ClassTable::write(Object& object, const Access& access) {
  std::bitset<kPageBlocks>* page = nullptr;
  uint64_t page_at = 0;
  for (uint64_t block = access.offset / kBlock; block * kBlock < access.offset + access.bytes; ++block) {
    if (page == nullptr || block / kPageBlocks != page_at) {
      page_at = block / kPageBlocks;
      page = &object.written[page_at];
    }
    const bool again = page->test(block % kPageBlocks);
    page->set(block % kPageBlocks);
    object.blocks += again ? 0 : 1;
    ++object.blocks_written;
    ++object.window_blocks;
    object.blocks_rewritten += again ? 1.F : 0.F;
    object.window_rewritten += again ? 1 : 0;
  }
}

void ClassTable::see(uint64_t id, const Access& access) {
  Object& object = objects_[id];
  if (!object.seen) {
    object.seen = true;
    object.volume = access.volume;
    object.last_window = window_;
    Volume& volume = volumes_[access.volume];
    ++volume.objects;
    volume.read_write += object.held == Class::read_write ? 1 : 0;
  }
  if (object.window_reads == 0 && object.window_blocks == 0) touched_.push_back(id);
  object.follows += access.offset == object.end ? 1.F : 0.F;
  object.end = access.offset + access.bytes;
  object.bytes += static_cast<float>(access.bytes);
  if (!access.write) {
    ++object.reads;
    ++object.window_reads;
  } else {
    ++object.writes;
    write(object, access);
  }
  if (++seen_ % kWindow == 0) close_window();
}

ClassFeatures ClassTable::features_of(const Object& object) const {
  const float requests = object.reads + object.writes;
  const Volume& volume = volumes_.at(object.volume);
  return {object.reads / requests,
          std::log2(1 + object.writes),
          object.blocks_written > 0 ? object.blocks_rewritten / object.blocks_written : 0.F,
          std::log2(1 + object.bytes / requests),
          object.follows / requests,
          static_cast<float>(std::min<uint64_t>(window_ - object.last_window, 1000)),
          std::log2(1 + static_cast<float>(object.blocks)),
          static_cast<float>(volume.read_write) / static_cast<float>(volume.objects)};
}

// Of an object that did something in the window that ends.
void ClassTable::judge(Object& object) {
  const Class was = truth(object.window_reads, object.window_blocks, object.window_rewritten);
  if (object.has_features) {
    const auto frequent = static_cast<size_t>(std::max_element(score_.truth.begin(), score_.truth.end()) - score_.truth.begin());
    const bool right = object.said == was, majority_right = static_cast<Class>(frequent) == was;
    ++score_.judged;
    score_.right += right ? 1 : 0;
    score_.majority_right += majority_right ? 1 : 0;
    recent_right_ = recent_right_ * kRolling + (right ? 1 - kRolling : 0);
    recent_majority_right_ = recent_majority_right_ * kRolling + (majority_right ? 1 - kRolling : 0);
    if (sample_) sample_(object.features, was);
  }
  ++score_.truth[static_cast<size_t>(was)];
}

void ClassTable::close_window() {
  if (recent_right_ < recent_majority_right_) ++score_.distrusted;
  for (const uint64_t id : touched_) judge(objects_[id]);
  for (const uint64_t id : touched_) {
    Object& object = objects_[id];
    object.features = features_of(object);
    object.has_features = true;
    const Class says = tree_.classify(object.features);
    if (says == object.said && says != object.held && !object.stated) hold(object, says);
    object.said = says;
    object.last_window = window_;
    object.window_reads = object.window_blocks = object.window_rewritten = 0;
    for (float* each : {&object.reads, &object.writes, &object.bytes, &object.blocks_written, &object.blocks_rewritten, &object.follows}) *each /= 2;
  }
  touched_.clear();
  ++window_;
}

}  // namespace stoker
