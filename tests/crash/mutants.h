// The proof that checks can fail: each deliberate bug is switched on alone, in a process of its
// own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <string>

namespace stoker {

// What `check` says there; empty: it found nothing. What a bug does to the code itself, so that the
// process ends, is found, too.
inline std::string caught_in_a_child(const std::function<std::string()>& check) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    alarm(240);  // a bug may make the code wait for ever
    const std::string caught = check().substr(0, 400);
    const bool told =
        write(ends[1], caught.data(), caught.size()) == static_cast<ssize_t>(caught.size());
    _exit(told ? 0 : 1);
  }
  close(ends[1]);
  std::string caught(400, ' ');
  size_t got = 0;
  for (ssize_t n = 0; (n = read(ends[0], caught.data() + got, caught.size() - got)) > 0;)
    got += static_cast<size_t>(n);
  close(ends[0]);
  caught.resize(got);
  int status = 0;
  waitpid(child, &status, 0);
  // Its own checks, or memory that is not there. But whoever waits for ever was not caught.
  if (WIFSIGNALED(status))
    return WTERMSIG(status) == SIGALRM
               ? std::string()
               : "what it did to itself, which ended the process with signal " +
                     std::to_string(WTERMSIG(status));
  return caught;
}

}  // namespace stoker
