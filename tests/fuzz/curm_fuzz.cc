// The readers of traces and of class trees on any text: they take it or refuse it in a sentence.
//
// Input: a byte that says which (T trace, else tree), then the text.
#include <cstdint>
#include <string_view>

#include "curm/trace.h"
#include "stoker/base/check.h"
#include "stoker/classes/classes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stoker;
  using namespace stoker::curm;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] != 'T') {
    const auto tree = ClassTree::parse(text);
    if (!tree) return 0;
    // Whatever was taken ends at a leaf.
    for (const float value : {-1e30F, 0.F, 0.5F, 1e30F}) {
      ClassFeatures features;
      features.fill(value);
      STOKER_CHECK(static_cast<size_t>(tree->classify(features)) < kClasses.size());
      CreationFeatures known;
      known.fill(value);
      STOKER_CHECK(static_cast<size_t>(tree->classify(known)) < kClasses.size());
    }
    return 0;
  }
  const auto lenient = parse_trace("fuzz", text, true), strict = parse_trace("fuzz", text, false);
  STOKER_CHECK(lenient.has_value() || !strict.has_value());
  if (!lenient) return 0;
  STOKER_CHECK(strict.has_value() == (lenient->malformed == 0));
  ClassTable table(ClassTree::shipped());
  for (const Request& request : lenient->requests) {
    STOKER_CHECK(request.object < lenient->objects.size() && request.bytes > 0 &&
                 request.bytes <= kRequestBytesMax && request.offset <= kOffsetMax);
    if (request.bytes <= 1 << 20) table.see(request.offset >> 20, access_of(request));
  }
  for (const FileEvent& event : lenient->events) {
    STOKER_CHECK(event.object < lenient->objects.size() &&
                 event.before <= lenient->requests.size());
    if (event.made) {
      table.create(event.object, {event.folder, event.path, event.bytes});
    } else {
      table.forget(event.object);
    }
  }
  return 0;
}
