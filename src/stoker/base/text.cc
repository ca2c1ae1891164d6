#include "stoker/base/text.h"

#include <cstdio>

namespace stoker {

std::string printable(std::string_view text) {
  std::string out;
  const auto escape = [&out](unsigned char byte) {
    char escaped[5];
    std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
    out += escaped;
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    // U+0080 to U+009F control terminals as well
    const bool second_set = byte == 0xC2 && next >= 0x80 && next < 0xA0;
    if (byte >= 0x20 && byte != 0x7F && !second_set) {
      out += text[i];
      continue;
    }
    escape(byte);
    if (second_set) escape(static_cast<unsigned char>(text[++i]));
  }
  return out;
}

}  // namespace stoker
