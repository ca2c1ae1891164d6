#include "run_summary.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <nlohmann/json.hpp>
#include <set>

#include "stoker/base/bytes.h"

namespace stoker::cli {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kRecordMax = 64 * kMiB;  // far beyond any model's: a larger one is not ours

// Null where there is no such object, or it is no JSON.
Json record(Store& store, std::string_view key, std::string_view snapshot) {
  const auto info = store.stat(key, snapshot);
  if (!info || info->bytes > kRecordMax) return {};
  std::string text(info->bytes, '\0');
  const Slice into{reinterpret_cast<std::byte*>(text.data()), text.size(), -1};
  if (!store.read(key, 0, into, {.snapshot = snapshot}).wait()) return {};
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

RunParameter parameter(const Json& unit, const Json& param) {
  RunParameter made;
  made.name = param.at(0).get<std::string>();
  made.type = unit.at("dtype").get<std::string>();
  made.unit = unit.at("name").get<std::string>();
  made.trained = unit.at("updated").get<bool>();
  made.elements = 1;
  for (const Json& size : param.at(1)) {
    made.elements *= size.get<uint64_t>();
    made.shape += (made.shape.empty() ? "" : " x ") + std::to_string(size.get<uint64_t>());
  }
  if (made.shape.empty()) made.shape = "scalar";
  return made;
}

RunSummary summary(const Json& model, const Json& state) {
  RunSummary run;
  run.algorithm = model.at("algorithm").get<std::string>();
  run.moments = model.value("moments", "exact");
  if (state.is_object()) run.step = state.at("step").get<uint64_t>();
  for (const Json& unit : model.at("blocks")) {
    for (const Json& param : unit.at("params")) run.parameters.push_back(parameter(unit, param));
  }
  return run;
}

}  // namespace

uint64_t RunSummary::elements(bool trained_only) const {
  uint64_t sum = 0;
  for (const RunParameter& each : parameters)
    sum += each.trained || !trained_only ? each.elements : 0;
  return sum;
}

std::string RunSummary::types() const {
  std::set<std::string> all;
  for (const RunParameter& each : parameters) all.insert(each.type);
  std::string text;
  for (const std::string& type : all) text += (text.empty() ? "" : " and ") + type;
  return text;
}

std::optional<RunSummary> run_summary(Store& store, std::string_view snapshot) {
  const Json model = record(store, "meta/model", snapshot);
  if (!model.is_object()) return std::nullopt;
  try {
    return summary(model, record(store, "meta/state", snapshot));
  } catch (const Json::exception&) {  // somebody else's object of this name
    return std::nullopt;
  }
}

std::string last_written(const std::vector<std::string>& files) {
  time_t newest = 0;
  for (const std::string& file : files) {
    struct stat status {};
    if (stat(file.c_str(), &status) == 0) newest = std::max(newest, status.st_mtime);
  }
  std::tm local{};
  std::array<char, 32> text{};
  if (newest == 0 || localtime_r(&newest, &local) == nullptr) return {};
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M", &local)};
}

}  // namespace stoker::cli
