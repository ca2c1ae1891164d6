// The results of a replay as one SVG, without anything else: colours are in it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "curm/cli/curm.h"

namespace stoker::cli {
namespace {

constexpr int kLeft = 70, kPanelHeight = 190, kPanelGap = 46, kBar = 13, kGroupGap = 22;
constexpr std::array<const char*, 8> kColours = {"#8c8c8c", "#d98c3f", "#c4504b", "#9d5b9d",
                                                 "#b8a13a", "#4f8fc0", "#2f6f4f", "#7fb58a"};

struct Panel {
  const char* key;
  const char* title;
  double scale;
};
constexpr std::array kPanels = {
    Panel{"updates_per_second", "updates a second (modelled)", 1},
    Panel{"p99_us", "p99 of a write, microseconds (modelled)", 1},
    Panel{"background_bytes_per_byte", "background bytes for each byte updated", 1},
    Panel{"recovery_seconds", "rebuild of one node, seconds (modelled)", 1},
    Panel{"space_peak_bytes", "space at its peak, GiB", 1.0 / (1 << 30)}};

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), value >= 100 ? "%.0f" : "%.3g", value);
  return text.data();
}

std::string place(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

// File names come from outside.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text)
    out += c == '<'                             ? "&lt;"
           : c == '>'                           ? "&gt;"
           : c == '&'                           ? "&amp;"
           : c == '"'                           ? "&quot;"
           : static_cast<unsigned char>(c) < 32 ? "?"
                                                : std::string(1, c);
  return out;
}

std::string text_at(double x, double y, const std::string& text, const char* anchor = "start",
                    int size = 11) {
  return "<text x=\"" + place(x) + "\" y=\"" + place(y) + "\" font-size=\"" + std::to_string(size) +
         "\" text-anchor=\"" + anchor + "\">" + escaped(text) + "</text>\n";
}

// The safe rows if there are any: they are what is compared.
std::vector<const Json*> shown(const Json& replay) {
  std::vector<const Json*> safe, all;
  for (const Json& row : replay["results"]) {
    all.push_back(&row);
    if (row["form"] == "safe") safe.push_back(&row);
  }
  return safe.empty() ? all : safe;
}

}  // namespace

std::string replay_svg(const Json& replay) {
  const auto rows = shown(replay);
  std::vector<std::string> groups, schemes;
  const auto group_of = [](const Json& row) {
    return row["trace"].get<std::string>() + " " + row["code"].get<std::string>();
  };
  const auto once = [](std::vector<std::string>& list, const std::string& item) {
    if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
  };
  for (const Json* row : rows) {
    once(groups, group_of(*row));
    once(schemes, (*row)["scheme"]);
  }
  const double group_width = static_cast<double>(schemes.size()) * kBar + kGroupGap;
  const double width =
      std::max(620.0, kLeft + group_width * static_cast<double>(groups.size()) + 20);
  const double height = 60 + kPanels.size() * (kPanelHeight + kPanelGap);
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + place(width) +
                    " " + place(height) +
                    "\" font-family=\"sans-serif\" fill=\"#222\">\n<rect width=\"100%\" "
                    "height=\"100%\" fill=\"#fff\"/>\n";
  const Json& settings = replay["settings"];
  svg += text_at(10, 20,
                 (rows.empty() ? "" : (*rows[0])["form"].get<std::string>()) + " form, " +
                     std::to_string(settings["nodes"].get<int>()) + " nodes, " +
                     settings["device"]["name"].get<std::string>(),
                 "start", 14);
  for (size_t i = 0; i < schemes.size(); ++i) {
    const double x = 10 + 70 * static_cast<double>(i);
    svg += "<rect x=\"" + place(x) + "\" y=\"30\" width=\"10\" height=\"10\" fill=\"" +
           kColours[i % kColours.size()] + "\"/>" + text_at(x + 14, 39, schemes[i]);
  }
  for (size_t p = 0; p < kPanels.size(); ++p) {
    const double bottom = 60 + static_cast<double>(p + 1) * (kPanelHeight + kPanelGap) - kPanelGap;
    double top_value = 0;
    for (const Json* row : rows)
      top_value = std::max(top_value, (*row)[kPanels[p].key].get<double>() * kPanels[p].scale);
    const double room = kPanelHeight - 24;
    svg += text_at(10, bottom - kPanelHeight + 12, kPanels[p].title, "start", 12);
    svg += "<line x1=\"" + std::to_string(kLeft) + "\" x2=\"" + place(width - 10) + "\" y1=\"" +
           place(bottom) + "\" y2=\"" + place(bottom) + "\" stroke=\"#888\"/>\n";
    svg += text_at(kLeft - 6, bottom - room + 4, number(top_value), "end") +
           text_at(kLeft - 6, bottom + 4, "0", "end");
    for (const Json* row : rows) {
      const auto g = static_cast<double>(std::find(groups.begin(), groups.end(), group_of(*row)) -
                                         groups.begin());
      const auto s = static_cast<size_t>(
          std::find(schemes.begin(), schemes.end(), (*row)["scheme"].get<std::string>()) -
          schemes.begin());
      const double value = (*row)[kPanels[p].key].get<double>() * kPanels[p].scale,
                   tall = top_value > 0 ? value / top_value * room : 0;
      svg += "<rect x=\"" + place(kLeft + g * group_width + static_cast<double>(s) * kBar) +
             "\" y=\"" + place(bottom - tall) + "\" width=\"" + place(kBar - 1.5) + "\" height=\"" +
             place(tall) + "\" fill=\"" + kColours[s % kColours.size()] + "\"><title>" +
             escaped(group_of(*row) + " " + schemes[s] + ": " + number(value)) +
             "</title></rect>\n";
    }
    for (size_t g = 0; g < groups.size(); ++g)
      svg += text_at(kLeft + static_cast<double>(g) * group_width, bottom + 14,
                     groups[g].substr(0, 22), "start", 9);
  }
  return svg + "</svg>\n";
}

}  // namespace stoker::cli
