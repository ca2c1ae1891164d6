// What Transaction::require() comes to when a store commits.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "stoker/base/result.h"

namespace stoker {

using Requirements = std::map<std::string, std::string, std::less<>>;  // tags by key; empty: absent

// conflict, in a sentence, unless what is there has the tag that was asked for. `found` is empty
// where there is no object.
Status check_required(std::string_view key, std::string_view tag, std::string_view found);

}  // namespace stoker
