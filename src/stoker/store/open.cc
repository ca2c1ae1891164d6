#include "stoker/store/open.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <optional>
#include <utility>

#include "stoker/base/bytes.h"
#include "stoker/store/cached/store.h"
#include "stoker/store/coded/store.h"
#include "stoker/store/dir/store.h"
#include "stoker/store/local/store.h"
#include "stoker/store/memory_store.h"
#include "stoker/store/remote/client.h"
#include "stoker/store/s3/store.h"

// Grammar of a composition, with blanks around commas as one likes:
//   composition = "memory:"
//               | "dir:" path
//               | "unix:" path
//               | "s3://" bucket ["/" prefix] ["?" options]     (s3/location.h)
//               | "local:" volumes | volumes
//               | "coded(" number "+" number { " " rate "=" bytes } "," shards ")"
//               | "cached(" composition "," composition { "," word "=" bytes } ")"
//   rate        = "scrub" | "repair" | "fold", each once at most
//   word        = "disk" | "dram" | "block", each once at most
//   volumes     = path { "," path }, without blanks around commas
//   shards      = path { "," path }; a path may hold one "{" number ".." number "}", which
//                 stands for each number
// A path may hold anything but a comma; one that starts with a word and a colon is written after
// "local:".

namespace stoker {
namespace {

Error bad(const std::string& composition, const std::string& why) {
  return fail(Code::invalid_argument, "cannot open the store '{}': {}", composition, why);
}

// The word before the first ':' where that looks like a scheme, else empty.
std::string_view scheme_of(std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return {};
  const std::string_view word = text.substr(0, colon);
  const bool plain = std::all_of(word.begin(), word.end(),
                                 [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
  return plain && !word.empty() ? word : std::string_view();
}

Result<std::vector<std::string>> parse_volumes(const std::string& composition,
                                               std::string_view text) {
  std::vector<std::string> volumes;
  for (;;) {
    const size_t comma = text.find(',');
    volumes.emplace_back(text.substr(0, comma));
    if (volumes.back().empty())
      return bad(composition,
                 "a folder, file or device is missing; write for example local:/nvme0,/nvme1");
    if (std::count(volumes.begin(), volumes.end(), volumes.back()) > 1)
      return bad(composition, "'" + volumes.back() + "' is named twice; name it once");
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

std::optional<size_t> number(std::string_view text) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty() || value > 1'000'000)
    return {};
  return value;
}

std::string_view trim(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

// "/disk{0..2}" -> /disk0, /disk1, /disk2.
Result<std::vector<std::string>> expand(const std::string& composition, std::string_view path) {
  const size_t open = path.find('{');
  if (open == std::string_view::npos) return std::vector<std::string>{std::string(path)};
  const size_t dots = path.find("..", open);
  const size_t close = path.find('}', open);
  if (close == std::string_view::npos || dots > close)
    return bad(composition, "'" + std::string(path) +
                                "' has a brace that is not a range; write for example /disk{0..8}");
  const auto first = number(path.substr(open + 1, dots - open - 1));
  const auto last = number(path.substr(dots + 2, close - dots - 2));
  if (!first || !last || *first > *last || *last - *first >= 1024)
    return bad(composition, "'" + std::string(path) +
                                "' has a brace that is not a range; write for example /disk{0..8}");
  std::vector<std::string> paths;
  for (size_t i = *first; i <= *last; ++i)
    paths.push_back(std::string(path.substr(0, open)) + std::to_string(i) +
                    std::string(path.substr(close + 1)));
  return paths;
}

// "scrub=4MiB repair=16MiB"
Status parse_rates(const std::string& composition, std::string_view text, CodedPlan& plan) {
  const std::array<std::pair<std::string_view, std::optional<uint64_t>*>, 3> rates = {
      {{"scrub=", &plan.scrub_rate},
       {"repair=", &plan.busy_repair_rate},
       {"fold=", &plan.busy_fold_rate}}};
  for (text = trim(text); !text.empty(); text = trim(text)) {
    const std::string_view word = text.substr(0, text.find(' '));
    const auto rate = std::find_if(rates.begin(), rates.end(), [word](const auto& each) {
      return word.starts_with(each.first);
    });
    const auto bytes = rate != rates.end() && !*rate->second
                           ? parse_bytes(word.substr(rate->first.size()))
                           : Result<uint64_t>(bad(composition, ""));
    if (!bytes) {
      return bad(composition,
                 "'" + std::string(word) +
                     "' is not an option, or is given twice. After the code come rates in bytes a "
                     "second: coded(6+3 scrub=4MiB repair=64MiB fold=64MiB, /disk{0..8}). scrub= "
                     "is the rate of the constant scrub (0: never). repair= and fold= limit repair "
                     "and folds while others use the store (0: no limit)");
    }
    *rate->second = *bytes;
    text.remove_prefix(word.size());
  }
  return {};
}

bool is_cached(std::string_view text) { return text.starts_with("cached("); }

// What stands in the parentheses of cached().
struct CachedPlan {
  std::string fast, slow;
  CachedOptions options;
};

// "a, b(c, d), e" -> "a", "b(c, d)", "e"
std::vector<std::string_view> split_outside_parentheses(std::string_view text) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  int depth = 0;
  for (size_t at = 0; at <= text.size(); ++at) {
    if (at < text.size() && text[at] == '(') ++depth;
    if (at < text.size() && text[at] == ')') --depth;
    if (at < text.size() && (text[at] != ',' || depth > 0)) continue;
    parts.push_back(trim(text.substr(begin, at - begin)));
    begin = at + 1;
  }
  return parts;
}

Result<CachedPlan> parse_cached(const std::string& composition) {
  const char* how =
      "write for example cached(local:/nvme/cache, s3://bucket/data, disk=100GiB, dram=4GiB)";
  std::string_view text = composition;
  if (!text.ends_with(")"))
    return bad(composition, std::string("the closing parenthesis is missing; ") + how);
  text = text.substr(7, text.size() - 8);
  CachedPlan plan;
  std::vector<std::string> stores;
  uint64_t block = plan.options.block_bytes;
  std::vector<std::pair<std::string_view, uint64_t*>> options = {
      {"dram=", &plan.options.dram_bytes}, {"disk=", &plan.options.disk_bytes}, {"block=", &block}};
  for (const std::string_view part : split_outside_parentheses(text)) {
    const auto option = std::find_if(options.begin(), options.end(), [part](const auto& each) {
      return part.starts_with(each.first);
    });
    if (option != options.end()) {
      const auto bytes = parse_bytes(part.substr(option->first.size()));
      if (!bytes) return bad(composition, "'" + std::string(part) + "' is not a size; " + how);
      *option->second = *bytes;
      options.erase(option);  // each once
      continue;
    }
    const bool begins = stores.empty() || !scheme_of(part).empty() || part.ends_with(")");
    if (begins && stores.size() == 2)
      return bad(composition,
                 "'" + std::string(part) + "' is one store too many, or an option twice; " + how);
    if (begins) {
      stores.emplace_back(part);
    } else {  // one more volume
      stores.back() += "," + std::string(part);
    }
  }
  if (stores.size() != 2 || stores[0].empty())
    return bad(composition, std::string("two stores are needed, the second with its kind; ") + how);
  if (stores[1] == "memory:")
    return bad(composition, "memory: loses its content when it is closed, so it cannot be cached");
  if (block > UINT32_MAX)
    return bad(composition, "a block has at most 8 MiB; give a smaller block=");
  plan.options.block_bytes = static_cast<uint32_t>(block);
  plan.fast = stores[0];
  plan.slow = stores[1];
  return plan;
}

Result<std::unique_ptr<Store>> open_cached(const std::string& composition, const Runtime& runtime,
                                           const StoreOptions& options) {
  STOKER_ASSIGN(const CachedPlan plan, parse_cached(composition));
  STOKER_ASSIGN(auto slow, open_store(plan.slow, runtime, options));
  OpenFast fast = [name = plan.fast, runtime, holder = options.holder](uint64_t create_bytes) {
    StoreOptions made;
    made.create = create_bytes != 0;
    made.capacity_bytes = create_bytes;
    made.holder = holder;
    return open_store(name, runtime, made);
  };
  return open_cached_store(composition, std::move(fast), std::move(slow), runtime, plan.options);
}

bool is_coded(std::string_view text) { return text.starts_with("coded("); }

}  // namespace

Result<std::optional<CodedPlan>> coded_plan(const std::string& composition) {
  std::string_view text = composition;
  if (!is_coded(text)) return std::optional<CodedPlan>();
  const char* how = "write for example coded(6+3, /disk{0..8})";
  if (!text.ends_with(")"))
    return bad(composition, std::string("the closing parenthesis is missing; ") + how);
  text = text.substr(6, text.size() - 7);
  const size_t plus = text.find('+');
  const size_t comma = text.find(',');
  if (plus == std::string_view::npos || comma == std::string_view::npos || plus > comma)
    return bad(composition, std::string("a code and its disks are needed; ") + how);
  const auto k = number(trim(text.substr(0, plus)));
  const std::string_view behind = trim(text.substr(plus + 1, comma - plus - 1));
  const std::string_view code_end = behind.substr(0, behind.find(' '));
  const auto m = number(code_end);
  if (!k || !m) return bad(composition, std::string("the code is not a pair of numbers; ") + how);
  CodedPlan plan{*k, *m, {}, {}};
  STOKER_TRY(parse_rates(composition, behind.substr(code_end.size()), plan));
  std::string list;
  for (std::string_view rest = text.substr(comma + 1);;) {
    const size_t next = rest.find(',');
    list += (list.empty() ? "" : ",") + std::string(trim(rest.substr(0, next)));
    if (next == std::string_view::npos) break;
    rest.remove_prefix(next + 1);
  }
  STOKER_ASSIGN(const auto patterns, parse_volumes(composition, list));
  for (const std::string& each : patterns) {
    STOKER_ASSIGN(const auto paths, expand(composition, each));
    for (const std::string& path : paths) {
      if (std::count(plan.paths.begin(), plan.paths.end(), path) != 0)
        return bad(composition, "'" + path + "' is named twice; name it once");
      plan.paths.push_back(path);
    }
  }
  return std::optional<CodedPlan>(std::move(plan));
}

Result<std::vector<std::string>> local_volumes(const std::string& composition) {
  std::string_view text = composition;
  const std::string_view scheme = scheme_of(text);
  if (!scheme.empty() && scheme != "local")
    return bad(
        composition,
        "this works on a local store: a folder, a file, a device, or local: and several of them");
  if (scheme == "local") text.remove_prefix(std::string_view("local:").size());
  return parse_volumes(composition, text);
}

Result<std::unique_ptr<Store>> open_store(const std::string& composition, const Runtime& runtime,
                                          const StoreOptions& options) {
  std::string_view text = composition;
  const std::string_view scheme = scheme_of(text);
  if (is_cached(text)) return open_cached(composition, runtime, options);
  if (scheme == "memory") {
    if (text != "memory:") return bad(composition, "nothing may stand after memory:");
    if (options.read_only)
      return bad(composition, "a memory store starts empty, so it cannot be opened read-only");
    return open_memory(runtime, options);
  }
  if (scheme == "dir") {
    text.remove_prefix(std::string_view("dir:").size());
    if (text.empty())
      return bad(composition, "the folder is missing; write for example dir:/data/set");
    return open_dir_store(std::string(text), runtime, options);
  }
  if (scheme == "unix") {
    text.remove_prefix(std::string_view("unix:").size());
    if (text.empty())
      return bad(composition, "the socket is missing; write for example unix:/run/stoker.sock");
    return open_remote_store(std::string(text), options);
  }
  if (scheme == "s3") return open_s3_store(composition, runtime, options);
  if (!scheme.empty() && scheme != "local") {
    return bad(composition, "there is no kind of store called '" + std::string(scheme) +
                                "'; there are memory:, dir:, s3:, local:, unix:, coded(k+m, ...) "
                                "and cached(fast, slow)");
  }
  STOKER_ASSIGN(auto coded, coded_plan(composition));
  if (coded) return open_coded_store(*coded, runtime, options);
  if (text.ends_with(")"))
    return bad(composition,
               "this version knows no such composition; there are memory:, dir:, s3:, local:, "
               "coded(k+m, ...) and cached(fast, slow)");
  STOKER_ASSIGN(auto volumes, local_volumes(composition));
  return open_local_store(std::move(volumes), runtime, options);
}

}  // namespace stoker
