// Bytes between memory and a plain file: direct I/O through the Loop where the piece is large and
// its memory lies as its offset does, and the page cache for the rest. On threads that may wait.
#pragma once

#include <string>

#include "stoker/io/buffered.h"
#include "stoker/io/loop.h"
#include "stoker/memory/slice.h"

namespace stoker::dir {

inline constexpr size_t kDirectBytes = 1 << 20;  // shorter pieces go through the page cache

// Whether a part of this goes by direct I/O.
bool goes_direct(uint64_t offset, const Slice& bytes);
// The path under which the Loop opens a file that we hold open: no name is looked up again.
std::string path_of(int fd);

// What came of a read of bytes that were in the file when it was opened.
Status outcome_of(const BufferedRead& read);

Status read_file(Loop& loop, int fd, uint64_t offset, Slice into, Priority priority);
// `direct`: the file as open in the Loop; -1: the page cache takes it all.
Status write_file(Loop& loop, int fd, FileId direct, uint64_t offset, Slice from,
                  Priority priority);

}  // namespace stoker::dir
