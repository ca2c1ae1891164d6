// Text that others chose, as a terminal may show it.
#pragma once

#include <string>
#include <string_view>

namespace stoker {

// Control characters become \xNN: a key, a path or a server's answer may hold any.
std::string printable(std::string_view text);

}  // namespace stoker
