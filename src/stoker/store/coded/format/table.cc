#include "stoker/store/coded/format/table.h"

#include <algorithm>
#include <functional>

#include "stoker/base/check.h"

namespace stoker::coded {
namespace {

enum Kind : uint8_t { kObject = 1, kStripe = 2, kRemove = 3, kClass = 4 };
constexpr uint8_t kStated = 128;  // of a class

Error broken(const std::string& what) { return fail(Code::corruption, "{}", what); }

}  // namespace

void put_object(ByteWriter& out, std::string_view key, uint64_t bytes, uint32_t chunk_bytes,
                Version number) {
  STOKER_CHECK(!key.empty() && key.size() <= kKeyMax && bytes <= kObjectBytesMax);
  out.put(uint8_t{kObject});
  out.put_string(key);
  out.put(bytes);
  out.put(chunk_bytes);
  out.put(number);
}

void put_stripe(ByteWriter& out, size_t index, const Stripe& stripe) {
  STOKER_CHECK(stripe.id != 0);  // that of a hole
  out.put(uint8_t{kStripe});
  out.put(static_cast<uint32_t>(index));
  out.put(stripe.id);
  for (const uint32_t slot : stripe.slots) out.put(slot);
}

void put_remove(ByteWriter& out, std::string_view key) {
  out.put(uint8_t{kRemove});
  out.put_string(key);
}

void put_class(ByteWriter& out, const ClassTable::Known& known) {
  out.put(uint8_t{kClass});
  out.put(static_cast<uint8_t>(static_cast<uint8_t>(known.held) | (known.stated ? kStated : 0)));
}

uint64_t class_id(std::string_view key) { return std::hash<std::string_view>()(key); }

uint32_t class_volume(std::string_view key) {
  const size_t slash = key.rfind('/');
  return static_cast<uint32_t>(
      class_id(slash == std::string_view::npos ? std::string_view() : key.substr(0, slash)));
}

void Table::learn(const ClassTable& classes) {
  for (const auto& [key, object] : objects_) {
    object->known = classes.known(class_id(key));
    if (object->known == ClassTable::Known()) object->known.reset();  // what is taken for granted
  }
}

ObjectPtr Table::find(std::string_view key) const {
  const auto at = objects_.find(key);
  return at == objects_.end() ? nullptr : at->second;
}

Status Table::apply(const Shape& shape, std::string_view items, const Resolve& resolve) {
  ByteReader in(std::as_bytes(std::span(items)));
  ObjectPtr object;  // the one put last, ours alone
  uint64_t of = 0;   // its class_id
  while (in.left() > 0) {
    const auto kind = in.get<uint8_t>();
    if (kind == kStripe) {
      const auto index = in.get<uint32_t>();
      const auto id = in.get<uint64_t>();
      std::vector<uint32_t> slots;
      for (size_t i = 0; i < shape.n(); ++i) slots.push_back(in.get<uint32_t>());
      if (!in.ok() || !object || index >= object->stripes.size())
        return broken("the object table names a stripe outside of its object");
      object->stripes[index] = id == 0 ? nullptr : resolve(id, std::move(slots));
      if (object->stripes[index]) object->stripes[index]->object = of;
      if (id != 0 && !object->stripes[index])
        return broken("the object table names a stripe twice, or one in slots that cannot be");
      continue;
    }
    if (kind == kClass) {
      const auto said = in.get<uint8_t>();
      if (!in.ok() || !object || (said & ~kStated) >= kClasses.size())
        return broken("the object table says of an object a class that cannot be");
      object->known = ClassTable::Known{static_cast<Class>(said & ~kStated), (said & kStated) != 0};
      continue;
    }
    const std::string key(in.get_string());
    if (!in.ok() || key.empty() || key.size() > kKeyMax)
      return broken("the object table has a name that cannot be");
    if (kind == kRemove) {
      objects_.erase(key);
      object.reset();
    } else if (kind == kObject) {
      const ObjectPtr old = find(key);
      object = old ? std::make_shared<Object>(*old) : std::make_shared<Object>();
      object->bytes = in.get<uint64_t>();
      object->chunk_bytes = in.get<uint32_t>();
      object->number = in.get<uint64_t>();
      if (!in.ok() || object->bytes > kObjectBytesMax)
        return broken("the object table has an object whose size cannot be");
      object->stripes.resize((object->bytes + shape.stripe_bytes() - 1) / shape.stripe_bytes());
      objects_.insert_or_assign(key, object);
      of = class_id(key);
    } else {
      return broken("the object table has an item of no known kind");
    }
  }
  return {};
}

std::vector<std::string> Table::image(size_t piece_bytes) const {
  std::vector<std::string> pieces;
  ByteWriter out;
  const auto cut = [&] {
    if (out.size() > 0) pieces.push_back(out.take());
    out = ByteWriter();
  };
  for (const auto& [key, object] : objects_) {
    put_object(out, key, object->bytes, object->chunk_bytes, object->number);
    if (object->known) put_class(out, *object->known);
    for (size_t i = 0; i < object->stripes.size(); ++i) {
      if (!object->stripes[i]) continue;
      put_stripe(out, i, *object->stripes[i]);
      if (out.size() < piece_bytes) continue;
      cut();
      // a piece begins with its object
      put_object(out, key, object->bytes, object->chunk_bytes, object->number);
    }
    if (out.size() >= piece_bytes) cut();
  }
  cut();
  return pieces;
}

uint64_t Table::image_bytes(const Shape& shape) const {
  uint64_t bytes = 0;
  for (const auto& [key, object] : objects_) {
    bytes += 27 + key.size();
    for (const StripePtr& stripe : object->stripes) bytes += stripe ? 13 + 4 * shape.n() : 0;
  }
  // framing, and the objects that are named again where a piece begins
  return bytes + bytes / 8 + 4 * kBlock;
}

uint64_t Table::memory_bytes(const Shape& shape) const {
  uint64_t bytes = 0;
  for (const auto& [key, object] : objects_) {
    bytes += sizeof(Object) + key.size() + object->stripes.size() * sizeof(StripePtr);
    for (const StripePtr& stripe : object->stripes) {
      if (!stripe) continue;
      bytes += sizeof(Stripe) + shape.n() * 12 + stripe->overlay.size() * 80;
      const bool on_the_cap = stripe->headers_grant.bytes() > 0;
      if (stripe->headers && !on_the_cap) bytes += headers_bytes(shape);
    }
  }
  return bytes;
}

}  // namespace stoker::coded
