// The examples in docs/formats, for the tests that decode them and make the same bytes.
// STOKER_SOURCE_DIR is defined for these programs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace stoker {

// The block ```hex NAME of docs/formats/PAGE, padded with zeros to so many bytes.
inline std::vector<std::byte> format_example(const std::string& page, const std::string& name,
                                             size_t bytes) {
  std::ifstream file(std::string(STOKER_SOURCE_DIR "/docs/formats/") + page);
  std::string line;
  while (std::getline(file, line) && line != "```hex " + name) {
  }
  EXPECT_TRUE(file) << page << " has no example `" << name << "`";
  std::vector<std::byte> out(bytes);
  while (std::getline(file, line) && line != "```") {
    std::istringstream words(line);
    size_t at = 0;
    words >> std::hex >> at;
    for (unsigned byte = 0; words >> byte;) out.at(at++) = static_cast<std::byte>(byte);
  }
  return out;
}

// As it would stand there, without lines of zeros.
inline std::string example_text(std::span<const std::byte> bytes) {
  std::ostringstream out;
  for (size_t at = 0; at < bytes.size(); at += 16) {
    const auto line = bytes.subspan(at, std::min<size_t>(16, bytes.size() - at));
    if (std::all_of(line.begin(), line.end(), [](std::byte byte) { return byte == std::byte{0}; }))
      continue;
    char text[24];
    std::snprintf(text, sizeof text, "%04zx ", at);
    out << text;
    for (const std::byte byte : line) {
      std::snprintf(text, sizeof text, " %02x", static_cast<unsigned>(byte));
      out << text;
    }
    out << "\n";
  }
  return out.str();
}

}  // namespace stoker
