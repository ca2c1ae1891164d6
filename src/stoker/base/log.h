// The one leveled log, on stderr. The level comes from the environment variable STOKER_LOG
// (trace, debug, info, warn, error, off; default warn): the only one that Stoker reads.
// spdlog writes it, and only log.cc includes that: it and its formatting take seconds to compile.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace spdlog {
class logger;
}

namespace stoker {

// A line with a {} for each of so many words: another number of them does not compile.
template <size_t kWords>
class LogLine {
 public:
  consteval LogLine(const char* text) : text_(text) {  // NOLINT(google-explicit-constructor)
    size_t places = 0;
    for (size_t at = text_.find("{}"); at != text_.npos; at = text_.find("{}", at + 2)) ++places;
    if (places != kWords) throw "a line of the log has a {} for each of its words";
  }
  std::string_view text() const { return text_; }

 private:
  std::string_view text_;
};

class Log {
 public:
  enum class Level : uint8_t { debug, info, warn, error };

  template <typename... Words>
  void debug(LogLine<sizeof...(Words)> line, const Words&... words) const {
    write(Level::debug, line.text(), {word(words)...});
  }
  template <typename... Words>
  void info(LogLine<sizeof...(Words)> line, const Words&... words) const {
    write(Level::info, line.text(), {word(words)...});
  }
  template <typename... Words>
  void warn(LogLine<sizeof...(Words)> line, const Words&... words) const {
    write(Level::warn, line.text(), {word(words)...});
  }
  template <typename... Words>
  void error(LogLine<sizeof...(Words)> line, const Words&... words) const {
    write(Level::error, line.text(), {word(words)...});
  }

  spdlog::logger& logger() const;  // for a test that listens

 private:
  static std::string word(std::string_view text) { return std::string(text); }
  static std::string word(std::integral auto number) { return std::to_string(number); }
  void write(Level level, std::string_view line, std::initializer_list<std::string> words) const;
};

const Log& log();  // any thread

}  // namespace stoker
