#!/usr/bin/env bash
# clang-tidy over every C++ source of the library and the command, or those that changed since a commit.
# Usage: tidy.sh BUILD_DIR JOBS [SINCE]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 jobs=$2 since=${3:-}
tidy=$(command -v clang-tidy-14 || command -v clang-tidy) || {
  echo "stoker tidy: clang-tidy is missing; install it with: apt-get install clang-tidy-14" >&2
  exit 1
}
# Tests are left out: gtest's macros trip half of the checks. The bindings too: nanobind's headers need a newer clang.
if [ -n "$since" ]; then
  mapfile -t sources < <(git diff --name-only --diff-filter=AM "$since" -- 'src/*.cc' 'cli/*.cc' 'lab/*.cc' | grep -v '_test\.cc$')
else
  mapfile -t sources < <(git ls-files --cached --others --exclude-standard 'src/*.cc' 'cli/*.cc' 'lab/*.cc' | grep -v '_test\.cc$')
fi
((${#sources[@]})) || exit 0
# The flags in the build's list are gcc's: clang need not know them all.
printf '%s\n' "${sources[@]}" |
  xargs -P "$jobs" -n 4 "$tidy" -p "$build" --quiet --warnings-as-errors='*' --extra-arg=-Wno-unknown-warning-option
echo "stoker tidy: ${#sources[@]} sources are clean" >&2
