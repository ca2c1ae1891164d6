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
constexpr float kRolling = 0.998F;      // a judgement's weight after the next
constexpr float kRewritesMuch = 0.25F;  // of the blocks an object writes: more makes it read-write
constexpr uint64_t kBlock = 4096;

Error bad(const std::string& what) {
  return fail(Code::invalid_argument,
              "this is not a class tree: {}; make one with classes/training/train.py", what);
}

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

// One tree of the file, over these features.
struct ClassTreeText {
  static Result<ClassTree::Nodes> parse(const nlohmann::json& nodes,
                                        std::span<const std::string_view> names);
};

Result<ClassTree::Nodes> ClassTreeText::parse(const nlohmann::json& nodes,
                                              std::span<const std::string_view> names) {
  if (nodes.empty() || nodes.size() >= size_t{2} << kDepthMax)
    return bad("it has " + std::to_string(nodes.size()) + " nodes; 1 to 127 are allowed");
  ClassTree::Nodes parsed;
  std::vector<size_t> depth(nodes.size(), 0);
  for (size_t at = 0; at < nodes.size(); ++at) {
    const auto& given = nodes[at];
    if (!given.is_object()) return bad("node " + std::to_string(at) + " is not an object");
    ClassTree::Node node;
    if (given.contains("class")) {
      const auto found =
          given["class"].is_string() ? class_of(given["class"].get<std::string>()) : std::nullopt;
      if (!found)
        return bad("the class of node " + std::to_string(at) +
                   " is not one of read_only, write_only, read_write");
      node.leaf = *found;
    } else {
      const auto name = given.find("feature"), threshold = given.find("threshold"),
                 left = given.find("left"), right = given.find("right");
      const bool whole = name != given.end() && name->is_string() && threshold != given.end() &&
                         threshold->is_number() && left != given.end() &&
                         left->is_number_unsigned() && right != given.end() &&
                         right->is_number_unsigned();
      if (!whole)
        return bad("node " + std::to_string(at) +
                   " has neither a class nor feature, threshold, left and right");
      const auto found = std::find(names.begin(), names.end(), name->get<std::string>());
      if (found == names.end())
        return bad("the feature of node " + std::to_string(at) + ", '" + name->get<std::string>() +
                   "', is unknown");
      node.feature = static_cast<int16_t>(found - names.begin());
      node.threshold = threshold->get<float>();
      for (const auto& [child, to] :
           {std::pair{left->get<uint64_t>(), &node.left}, {right->get<uint64_t>(), &node.right}}) {
        if (child <= at || child >= nodes.size())
          return bad("node " + std::to_string(at) + " has node " + std::to_string(child) +
                     " as a child; a child stands behind its parent in the list");
        depth[child] = std::max(depth[child], depth[at] + 1);
        if (depth[child] > kDepthMax)
          return bad("it is deeper than " + std::to_string(kDepthMax) + " levels");
        *to = static_cast<uint16_t>(child);
      }
    }
    parsed.push_back(node);
  }
  return parsed;
}

Result<ClassTree> ClassTree::parse(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("nodes") || !json["nodes"].is_array())
    return bad("it is not JSON with a list of `nodes`");
  ClassTree tree;
  STOKER_ASSIGN(tree.nodes_, ClassTreeText::parse(json["nodes"], kFeatureNames));
  if (!json.contains("created")) return tree;
  if (!json["created"].is_array()) return bad("`created` is not a list");
  STOKER_ASSIGN(tree.created_, ClassTreeText::parse(json["created"], kCreationFeatureNames));
  return tree;
}

ClassTree ClassTree::contrary() const {
  ClassTree other = *this;
  for (Nodes* nodes : {&other.nodes_, &other.created_}) {
    for (Node& node : *nodes) {
      if (node.feature < 0)
        node.leaf = node.leaf == Class::read_write ? Class::write_only : Class::read_write;
    }
  }
  return other;
}

Class ClassTable::of(uint64_t id) const {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return Class::read_write;
  const Object& object = found->second;
  return object.stated || (object.guessed ? guessed_ : told_).trusts() ? object.held
                                                                       : Class::read_write;
}

CreationFeatures ClassTable::features_of(const Creation& made) const {
  const auto volume = volumes_.find(made.volume);
  return creation_features(made.key, made.bytes,
                           volume == volumes_.end() ? FolderHistory{} : volume->second.did);
}

Class ClassTable::at_creation(const Creation& made) const {
  const CreationFeatures known = features_of(made);
  return tells_of_use(known) && guessed_.trusts() ? tree_.classify(known) : Class::read_write;
}

void ClassTable::create(uint64_t id, const Creation& made) {
  forget(id);
  const CreationFeatures known = features_of(made);
  if (!tells_of_use(known)) return;
  Object& object = objects_[id];
  object.volume = made.volume;
  object.guessed = true;
  object.held = object.said = object.said_then = tree_.classify(known);
  object.made_as = std::make_unique<CreationFeatures>(known);
  guessed_.score.distrusted += guessed_.trusts() ? 0 : 1;
}

std::optional<ClassTable::Known> ClassTable::known(uint64_t id) const {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return {};
  return Known{found->second.held, found->second.stated};
}

void ClassTable::set(uint64_t id, uint32_t volume, Known known) {
  if (this->known(id) != known) add_to(volumes_[volume].did, known.held);
  Object& object = objects_[id];
  object.stated = known.stated;
  object.guessed = false;
  object.made_as.reset();
  object.said = known.held;
  hold(object, known.held);
}

void ClassTable::forget(uint64_t id) {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return;
  Object& object = found->second;
  if (object.seen && !object.stated && (object.made_as || !object.has_features)) {
    const bool untouched = object.window_reads == 0 && object.window_blocks == 0;
    // if nobody wanted what was written
    const Class before = object.reads > 0 ? Class::read_write : Class::write_only;
    const Class was =
        untouched ? before
                  : truth(object.window_reads, object.window_blocks, object.window_rewritten);
    object.made_as ? judge_creation(object, was) : add_to(volumes_.at(object.volume).did, was);
  }
  if (object.seen) {
    hold(object, Class::read_only);
    --volumes_.at(object.volume).objects;
  }
  objects_.erase(found);
  std::erase(touched_, id);
}

uint64_t ClassTable::memory_bytes() const {
  uint64_t bytes =
      objects_.size() * (sizeof(Object) + 64) + volumes_.size() * (sizeof(Volume) + 32);
  for (const auto& [id, object] : objects_)
    bytes += object.written.size() * (kPageBlocks / 8 + 40) +
             (object.made_as ? sizeof(CreationFeatures) + 16 : 0);
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
  for (uint64_t block = access.offset / kBlock; block * kBlock < access.offset + access.bytes;
       ++block) {
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

void ClassTable::Judge::hear(Class said, Class was) {
  const auto frequent = static_cast<size_t>(
      std::max_element(score.truth.begin(), score.truth.end()) - score.truth.begin());
  const bool right = said == was, majority_right = static_cast<Class>(frequent) == was;
  ++score.judged;
  score.right += right ? 1 : 0;
  score.majority_right += majority_right ? 1 : 0;
  recent_right = recent_right * kRolling + (right ? 1 - kRolling : 0);
  recent_majority_right = recent_majority_right * kRolling + (majority_right ? 1 - kRolling : 0);
}

// Of an object that did something in the window that ends.
void ClassTable::judge(Object& object) {
  const Class was = truth(object.window_reads, object.window_blocks, object.window_rewritten);
  if (object.has_features) {
    told_.hear(object.said, was);
    if (sample_) sample_(object.features, was);
    if (object.made_as) {
      judge_creation(object, was);
    } else {
      add_to(volumes_.at(object.volume).did, was);
    }
  }
  ++told_.score.truth[static_cast<size_t>(was)];
}

void ClassTable::judge_creation(Object& object, Class was) {
  guessed_.hear(object.said_then, was);
  ++guessed_.score.truth[static_cast<size_t>(was)];
  if (creation_sample_) creation_sample_(*object.made_as, was);
  object.made_as.reset();
  add_to(volumes_[object.volume].did, was);
}

void ClassTable::close_window() {
  if (!told_.trusts()) ++told_.score.distrusted;
  for (const uint64_t id : touched_) judge(objects_[id]);
  for (const uint64_t id : touched_) {
    Object& object = objects_[id];
    object.features = features_of(object);
    object.has_features = true;
    const Class says = tree_.classify(object.features);
    if (says == object.said && !object.stated) {
      hold(object, says);
      object.guessed = false;
    }
    object.said = says;
    object.last_window = window_;
    object.window_reads = object.window_blocks = object.window_rewritten = 0;
    for (float* each : {&object.reads, &object.writes, &object.bytes, &object.blocks_written,
                        &object.blocks_rewritten, &object.follows})
      *each /= 2;
  }
  touched_.clear();
  ++window_;
}

}  // namespace stoker
