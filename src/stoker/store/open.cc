#include "stoker/store/open.h"

#include <algorithm>
#include <cctype>

#include "stoker/store/local/store.h"
#include "stoker/store/memory_store.h"

// Grammar of a composition:
//   composition = "memory:" | "local:" volumes | volumes
//   volumes     = path { "," path }
// A path may hold anything but a comma; one that starts with a word and a colon is written after "local:".

namespace stoker {
namespace {

Error bad(const std::string& composition, const std::string& why) {
  return make_error(Code::invalid_argument, "cannot open the store '" + composition + "': " + why, "store/open");
}

// The word before the first ':' where that looks like a scheme, else empty.
std::string_view scheme_of(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return {};
  const std::string_view word = text.substr(0, colon);
  const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
  return plain && !word.empty() ? word : std::string_view();
}

Result<std::vector<std::string>> parse_volumes(const std::string& composition, std::string_view text) {
  std::vector<std::string> volumes;
  for (;;) {
    const size_t comma = text.find(',');
    volumes.emplace_back(text.substr(0, comma));
    if (volumes.back().empty()) return bad(composition, "a folder, file or device is missing; write for example local:/nvme0,/nvme1");
    if (std::count(volumes.begin(), volumes.end(), volumes.back()) > 1) return bad(composition, "'" + volumes.back() + "' is named twice");
    if (comma == std::string_view::npos) return volumes;
    text.remove_prefix(comma + 1);
  }
}

Result<std::unique_ptr<Store>> open_memory(const Runtime& runtime, const StoreOptions& options) {
  MemoryStoreOptions memory;
  memory.chunk_bytes = options.chunk_bytes;
  memory.capacity_bytes = options.capacity_bytes;
  STOKER_ASSIGN(std::unique_ptr<Store> store, MemoryStore::make(runtime.budget, memory));
  return store;
}

}  // namespace

Result<std::vector<std::string>> local_volumes(const std::string& composition) {
  std::string_view text = composition;
  const std::string_view scheme = scheme_of(text);
  if (!scheme.empty() && scheme != "local") return bad(composition, "this works on a local store: a folder, a file, a device, or local: and several of them");
  if (scheme == "local") text.remove_prefix(std::string_view("local:").size());
  return parse_volumes(composition, text);
}

Result<std::unique_ptr<Store>> open_store(const std::string& composition, const Runtime& runtime, const StoreOptions& options) {
  std::string_view text = composition;
  const std::string_view scheme = scheme_of(text);
  if (scheme == "memory") {
    if (text != "memory:") return bad(composition, "nothing may stand after memory:");
    if (options.read_only) return bad(composition, "a memory store starts empty, so it cannot be opened to read only");
    return open_memory(runtime, options);
  }
  if (!scheme.empty() && scheme != "local") {
    return bad(composition, "there is no kind of store called '" + std::string(scheme) + "'; there are memory: and local:");
  }
  if (text.ends_with(")")) return bad(composition, "this version composes no stores; there are memory: and local:");
  STOKER_ASSIGN(auto volumes, local_volumes(composition));
  return open_local_store(std::move(volumes), runtime, options);
}

}  // namespace stoker
