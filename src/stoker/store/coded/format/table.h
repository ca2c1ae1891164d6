// The object table of a coded store: names, sizes, and which stripes hold an object. Guarded by the
// CommittedMap's mutex.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "stoker/classes/classes.h"
#include "stoker/store/coded/format/stripe.h"
#include "stoker/store/store.h"

namespace stoker::coded {

inline constexpr uint64_t kObjectBytesMax = uint64_t{1} << 42;
inline constexpr size_t kKeyMax = 1024;

// Once shared only `number` and `known` change, under the CommittedMap's mutex; anything else
// makes a new Object. So a reader keeps what it looked up.
struct Object {
  uint64_t bytes = 0;
  uint32_t chunk_bytes = 0;
  Version number = 0;  // the commit that last changed it
  // of its class, as the table had it or is about to have it; what counts is in the ClassTable
  std::optional<ClassTable::Known> known;
  std::vector<StripePtr> stripes;  // as many as the bytes need; null: a hole
};
using ObjectPtr = std::shared_ptr<Object>;
// The number is enough of a tag: every commit is durable before anybody sees it, so none is given
// twice.
inline std::string tag_of(const Object& object) { return std::to_string(object.number); }

// Table items, as in COMMIT records and images.
void put_object(ByteWriter& out, std::string_view key, uint64_t bytes, uint32_t chunk_bytes,
                Version number);
void put_stripe(ByteWriter& out, size_t index, const Stripe& stripe);
void put_remove(ByteWriter& out, std::string_view key);
void put_class(ByteWriter& out, const ClassTable::Known& known);

// An object as the ClassTable knows it, within this process; two that are taken for one are treated
// alike, no more.
uint64_t class_id(std::string_view key);
// The folder that it lies in.
uint32_t class_volume(std::string_view key);

class Table {
 public:
  using Objects = std::map<std::string, ObjectPtr, std::less<>>;
  // Finds or makes the stripe that an item names; null: it cannot be (corruption).
  using Resolve = std::function<StripePtr(uint64_t id, std::vector<uint32_t> slots)>;

  const Objects& objects() const { return objects_; }
  // Before an image is taken: what was learnt since.
  void learn(const ClassTable& classes);
  ObjectPtr find(std::string_view key) const;
  // Changes the table by the items of one commit. On corruption it may be changed in part.
  Status apply(const Shape& shape, std::string_view items, const Resolve& resolve);
  // All of it, in pieces of about this many bytes.
  std::vector<std::string> image(size_t piece_bytes) const;
  uint64_t image_bytes(const Shape& shape) const;
  // Without what is on the cap: headers.
  uint64_t memory_bytes(const Shape& shape) const;

 private:
  Objects objects_;
};

}  // namespace stoker::coded
