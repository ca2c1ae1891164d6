// Splits independent work over the pool while the caller waits.
#pragma once

#include <cstddef>
#include <functional>

#include "stoker/base/pool.h"

namespace stoker::offload {

// Calls each(i) for every i below `count`, on pool threads only (the caller sleeps, so no core gets
// a second runnable thread). Returns when all are done. Not to be called on a pool thread.
void parallel(Pool& pool, size_t count, const std::function<void(size_t)>& each);

}  // namespace stoker::offload
