// What a process that was forked may not do: the threads of its parent are not there, and its locks
// are as they happened to be.
#pragma once

#include <cstdint>
#include <memory>

namespace stoker {

// How many forks lie between the start of the program and this process.
uint64_t forks();

// Deletes only in the process that made it. In a forked one the object's threads are missing: it
// stays as it is.
struct DeleteWhereMade {
  uint64_t made = forks();
  bool here() const { return made == forks(); }
  template <typename T>
  void operator()(T* object) const {
    if (here()) delete object;
  }
};

template <typename T>
using Unforked = std::unique_ptr<T, DeleteWhereMade>;

}  // namespace stoker
