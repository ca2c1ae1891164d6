#include "stoker/classes/creation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>

namespace stoker {
namespace {

constexpr float kHistoryMax = 256;  // then all of it is halved
constexpr size_t kWordMax = 12;
constexpr float kDigitsMax = 8;

enum Says : uint8_t { kData, kSaved, kLog, kState };  // the first features
struct Word {
  std::string_view word;
  Says says;
};
// What people call things, sorted. Nothing here decides on a class: the tree does.
constexpr std::array kWords = {
    Word{"archive", kSaved},     Word{"arrow", kData},        Word{"backup", kSaved},
    Word{"backups", kSaved},     Word{"bak", kSaved},         Word{"cache", kState},
    Word{"checkpoint", kSaved},  Word{"checkpoints", kSaved}, Word{"ckpt", kSaved},
    Word{"ckpts", kSaved},       Word{"corpus", kData},       Word{"csv", kData},
    Word{"dataset", kData},      Word{"datasets", kData},     Word{"db", kState},
    Word{"dump", kSaved},        Word{"dumps", kSaved},       Word{"events", kLog},
    Word{"images", kData},       Word{"index", kState},       Word{"journal", kLog},
    Word{"jpg", kData},          Word{"jsonl", kData},        Word{"log", kLog},
    Word{"logs", kLog},          Word{"metrics", kLog},       Word{"npy", kData},
    Word{"parquet", kData},      Word{"png", kData},          Word{"pt", kSaved},
    Word{"safetensors", kSaved}, Word{"scratch", kState},     Word{"shards", kData},
    Word{"snapshot", kSaved},    Word{"snapshots", kSaved},   Word{"sqlite", kState},
    Word{"state", kState},       Word{"swap", kState},        Word{"tar", kData},
    Word{"temp", kState},        Word{"tfevents", kLog},      Word{"tfrecord", kData},
    Word{"tmp", kState},         Word{"tokens", kData},       Word{"trace", kLog},
    Word{"traces", kLog},        Word{"train", kData},        Word{"wal", kState},
    Word{"wandb", kLog}};
static_assert(std::is_sorted(kWords.begin(), kWords.end(),
                             [](const Word& a, const Word& b) { return a.word < b.word; }));

constexpr char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }
constexpr bool is_letter(char c) { return lower(c) >= 'a' && lower(c) <= 'z'; }

std::optional<Says> find_word(std::string_view word) {
  if (word.size() > kWordMax) return {};
  std::array<char, kWordMax> letters{};
  std::transform(word.begin(), word.end(), letters.begin(), lower);
  const std::string_view small(letters.data(), word.size());
  const auto* found =
      std::lower_bound(kWords.begin(), kWords.end(), small,
                       [](const Word& a, std::string_view b) { return a.word < b; });
  return found != kWords.end() && found->word == small ? std::optional(found->says) : std::nullopt;
}

// Of the last word that says anything.
std::optional<Says> what_it_says(std::string_view key) {
  for (size_t end = key.size(); end > 0;) {
    if (!is_letter(key[end - 1])) {
      --end;
      continue;
    }
    size_t begin = end - 1;
    while (begin > 0 && is_letter(key[begin - 1])) --begin;
    if (const auto says = find_word(key.substr(begin, end - begin))) return says;
    end = begin;
  }
  return {};
}

}  // namespace

void add_to(FolderHistory& history, Class did) {
  history[static_cast<size_t>(did)] += 1;
  if (std::accumulate(history.begin(), history.end(), 0.F) <= kHistoryMax) return;
  for (float& each : history) each /= 2;
}

CreationFeatures creation_features(std::string_view key, uint64_t bytes,
                                   const FolderHistory& folder) {
  CreationFeatures known{};
  if (const auto says = what_it_says(key)) known[*says] = 1;
  const std::string_view last = key.substr(key.rfind('/') + 1);  // npos + 1 is 0
  known[4] = std::min(
      kDigitsMax, static_cast<float>(std::count_if(last.begin(), last.end(),
                                                   [](char c) { return c >= '0' && c <= '9'; })));
  known[5] = std::log2(1 + static_cast<float>(bytes));
  const float times = std::accumulate(folder.begin(), folder.end(), 0.F);
  if (times == 0) return known;
  for (size_t each = 0; each < folder.size(); ++each) known[6 + each] = folder[each] / times;
  known[9] = std::log2(1 + times);
  return known;
}

bool tells_of_use(const CreationFeatures& known) {
  return known[9] > 0 ||
         std::any_of(known.begin(), known.begin() + 4, [](float says) { return says > 0; });
}

}  // namespace stoker
