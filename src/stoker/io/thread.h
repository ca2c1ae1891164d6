// Threads of the io layer take no signals: those belong to the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace stoker {

// Starts `f` with all signals blocked, under `name` (at most 15 characters). May throw
// std::system_error.
template <typename F>
std::thread start_io_thread(const char* name, F f) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  std::thread thread(std::move(f));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace stoker
