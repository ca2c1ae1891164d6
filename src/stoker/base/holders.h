// Which process is in the way: for errors.
#pragma once

#include <string>

namespace stoker {

// "process 7 (stoker)", "this process", or empty: nobody known. Only root sees the files of other
// users' processes.
std::string lock_holder(int fd);                 // holds the lock of flock(2) on the open file
std::string opener_of(const std::string& path);  // has the file open; another process only

}  // namespace stoker
