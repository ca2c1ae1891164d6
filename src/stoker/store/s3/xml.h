// The XML of S3's answers: elements and text, nothing else. What a server sends is not trusted:
// size and depth are bounded, and what may refer to anything outside (a DOCTYPE, an entity of its
// own) is refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "stoker/base/result.h"

namespace stoker::s3 {

struct Xml {
  std::string name;  // without a namespace prefix
  std::string text;  // of this element alone, entities resolved
  std::vector<Xml> children;

  const Xml* child(std::string_view of) const;          // the first of this name, or null
  std::string_view text_of(std::string_view of) const;  // of that child; empty if there is none
};

// The root element; corruption for anything that is no such document.
Result<Xml> parse_xml(std::string_view document);

}  // namespace stoker::s3
