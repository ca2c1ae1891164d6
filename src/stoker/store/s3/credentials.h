// Where credentials and the region come from. The one file of the library that reads the
// environment, beside the log's level.
#pragma once

#include <memory>
#include <string>

#include "stoker/base/result.h"
#include "stoker/store/s3/sigv4.h"

namespace stoker::s3 {

// From the environment, else from the shared files' profile (credentials, then config). Else from
// the metadata service of the container or the instance, for which it waits. Looks anew each time:
// what was there may have expired. not_found, saying where it looked, if there is nothing.
Result<Credentials> find_credentials();

// From the environment, else from the profile in the shared config file, else us-east-1.
std::string find_region();

// From the environment, else from the profile in the shared config file; empty if neither names
// one.
std::string find_endpoint();

// Where the user's programs keep what outlives them; empty if the environment names none.
std::string find_state_folder();

// One profile of a file in the shared format ("[name]", then "key = value"); empty where it has
// none.
Credentials credentials_in(std::string_view file, std::string_view profile);
std::string region_in(std::string_view file, std::string_view profile);
std::string endpoint_in(std::string_view file, std::string_view profile);

}  // namespace stoker::s3
