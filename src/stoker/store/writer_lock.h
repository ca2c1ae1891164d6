// The kernel's lock that excludes a second writer from a file of a store, and the holder's name in
// it, for people.
#pragma once

#include <cstdint>
#include <string>

#include "stoker/base/result.h"

namespace stoker {

inline constexpr uint64_t kHolderAt = 8192;  // where in the file the name stands
inline constexpr size_t kHolderBytes = 512;

// One writer, or any number of readers, until unlock_file() or the end of this process, whatever it
// forked. `path` is what the user named. busy: says who is in the way.
Result<int> lock_file(const std::string& file_path, const std::string& path, bool read_only);
// Lets go of it. Nothing in a process that was forked since: the lock is its parent's alone.
void unlock_file(int fd);
// An empty name: nobody holds it.
void write_holder(int fd, const std::string& name);

}  // namespace stoker
