#include "stoker/base/fork.h"

#include <pthread.h>

#include <atomic>

namespace stoker {
namespace {

std::atomic<uint64_t> count{0};

}  // namespace

uint64_t forks() {
  [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { ++count; });
  return count;
}

}  // namespace stoker
