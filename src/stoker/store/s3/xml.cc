#include "stoker/store/s3/xml.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

namespace stoker::s3 {
namespace {

constexpr size_t kBytesMax = 16 << 20;
constexpr size_t kDepthMax = 16;
constexpr size_t kElementsMax = 200'000;

Error bad(const std::string& why) {
  return fail(Code::corruption,
              "the server's answer is not XML of S3: {}; check that endpoint= is an S3 server",
              why);
}

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

void put_utf8(std::string& out, uint32_t code) {
  const auto byte = [&out](uint32_t value) {
    out += static_cast<char>(static_cast<unsigned char>(value));
  };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | code >> 6);
    byte(0x80 | (code & 63));
  } else if (code < 0x10000) {
    byte(0xE0 | code >> 12);
    byte(0x80 | (code >> 6 & 63));
    byte(0x80 | (code & 63));
  } else {
    byte(0xF0 | code >> 18);
    byte(0x80 | (code >> 12 & 63));
    byte(0x80 | (code >> 6 & 63));
    byte(0x80 | (code & 63));
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  Result<Xml> document() {
    STOKER_TRY(skip_misc());
    if (!rest_.starts_with('<')) return bad("it does not begin with an element");
    Xml root;
    STOKER_TRY(element(root, 1));
    STOKER_TRY(skip_misc());
    if (!rest_.empty()) return bad("something stands behind its end");
    return root;
  }

 private:
  // Blanks, the declaration, comments.
  Status skip_misc() {
    for (;;) {
      while (!rest_.empty() && is_blank(rest_.front())) rest_.remove_prefix(1);
      if (rest_.starts_with("<?")) {
        STOKER_TRY(skip_to("?>"));
      } else if (rest_.starts_with("<!--")) {
        STOKER_TRY(skip_to("-->"));
      } else if (rest_.starts_with("<!")) {
        return bad("it has a declaration of its own");
      } else {
        return {};
      }
    }
  }

  Status skip_to(std::string_view end) {
    const size_t at = rest_.find(end);
    if (at == std::string_view::npos) return bad("it is cut off");
    rest_.remove_prefix(at + end.size());
    return {};
  }

  // From its '<' to behind its end.
  Status element(Xml& into, size_t depth) {
    if (depth > kDepthMax || ++elements_ > kElementsMax)
      return bad("it is nested too deep, or has too many elements");
    rest_.remove_prefix(1);
    const size_t close = rest_.find('>');
    if (close == std::string_view::npos) return bad("it is cut off");
    std::string_view tag = rest_.substr(0, close);  // attributes of S3 hold no '>'
    rest_.remove_prefix(close + 1);
    const bool empty = tag.ends_with('/');
    if (empty) tag.remove_suffix(1);
    const std::string_view full = tag.substr(
        0, static_cast<size_t>(std::find_if(tag.begin(), tag.end(), is_blank) - tag.begin()));
    into.name = full.substr(full.rfind(':') + 1);  // all of it where there is no prefix
    if (into.name.empty() || full.find('<') != std::string_view::npos)
      return bad("an element has no name");
    return empty ? Status() : content(into, full, depth);
  }

  Status content(Xml& into, std::string_view full, size_t depth) {
    for (;;) {
      const size_t open = rest_.find('<');
      if (open == std::string_view::npos) return bad("it is cut off");
      STOKER_TRY(text(into.text, rest_.substr(0, open)));
      rest_.remove_prefix(open);
      if (rest_.starts_with("</")) {
        const size_t close = rest_.find('>');
        if (close == std::string_view::npos) return bad("it is cut off");
        std::string_view name = rest_.substr(2, close - 2);
        while (!name.empty() && is_blank(name.back())) name.remove_suffix(1);
        if (name != full) return bad("an element ends as another than it began");
        rest_.remove_prefix(close + 1);
        return {};
      }
      if (rest_.starts_with("<!--")) {
        STOKER_TRY(skip_to("-->"));
      } else if (rest_.starts_with("<!") || rest_.starts_with("<?")) {
        return bad("it has a declaration of its own");
      } else {
        STOKER_TRY(element(into.children.emplace_back(), depth + 1));
      }
    }
  }

  static Status text(std::string& into, std::string_view from) {
    while (!from.empty()) {
      const size_t amp = from.find('&');
      into += from.substr(0, amp);
      if (amp == std::string_view::npos) return {};
      from.remove_prefix(amp + 1);
      const size_t end = from.substr(0, 12).find(';');
      if (end == std::string_view::npos) return bad("an entity has no end");
      STOKER_TRY(entity(into, from.substr(0, end)));
      from.remove_prefix(end + 1);
    }
    return {};
  }

  static Status entity(std::string& into, std::string_view name) {
    if (name == "amp")
      into += '&';
    else if (name == "lt")
      into += '<';
    else if (name == "gt")
      into += '>';
    else if (name == "quot")
      into += '"';
    else if (name == "apos")
      into += '\'';
    else if (name.starts_with('#'))
      return character(into, name.substr(1));
    else
      return bad("an entity is unknown");
    return {};
  }

  static Status character(std::string& into, std::string_view digits) {
    const bool hex = digits.starts_with('x');
    if (hex) digits.remove_prefix(1);
    uint32_t code = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, hex ? 16 : 10);
    if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() ||
        code == 0 || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
      return bad("a character has no such number");
    put_utf8(into, code);
    return {};
  }

  std::string_view rest_;
  size_t elements_ = 0;
};

}  // namespace

const Xml* Xml::child(std::string_view of) const {
  const auto found = std::find_if(children.begin(), children.end(),
                                  [of](const Xml& each) { return each.name == of; });
  return found == children.end() ? nullptr : &*found;
}

std::string_view Xml::text_of(std::string_view of) const {
  const Xml* found = child(of);
  return found == nullptr ? std::string_view() : std::string_view(found->text);
}

Result<Xml> parse_xml(std::string_view document) {
  if (document.size() > kBytesMax) return bad("it has more than 16 MiB");
  return Parser(document).document();
}

}  // namespace stoker::s3
