// What every engine does with the outcome of a system call: one routine checks lengths, continues
// short transfers and repeats what was interrupted, so that an Op ends with all its bytes or with
// an error.
#pragma once

#include <cstdint>
#include <string>

#include "stoker/base/counters.h"
#include "stoker/io/op.h"

namespace stoker {

// Refuses what no engine can start: offset, size or memory off the alignment, or bytes where none
// belong. Also resets op.moved.
Status check_op(Op& op, uint32_t align, const std::string& path);

// Books `outcome` (bytes moved by the last system call, or -errno) on the op.
// True: the op is over and op.result is set; the caller then completes it. False: issue the rest,
// from op.offset + op.moved.
bool advance(Op& op, int64_t outcome, const std::string& path, IoCounters& counters);

// Ends the op with an error that names the file and the place in it.
void fail(Op& op, int sys_errno, const std::string& path, const std::string& what);

}  // namespace stoker
