#!/usr/bin/env bash
# The layout of every source, and names of Python that nothing defines. Then clang-tidy (with the
# checks of base/mutex.h) over the C++ sources, or over those that changed since a commit.
# Usage: tidy.sh BUILD_DIR JOBS [SINCE]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 jobs=$2 since=${3:-}
tools/format.sh --check
git ls-files -- '*.py' '*.pyi' | xargs .venv/bin/ruff check --isolated --quiet --select F821
tidy=$(command -v clang-tidy-14 || command -v clang-tidy) || {
  echo "stoker tidy: clang-tidy is missing; install it with: apt-get install clang-tidy-14" >&2
  exit 1
}
# What changed since, but for the commits that a script made of every file (they were looked at whole).
changed() {
  git rev-list --no-merges "$since..HEAD" | grep -vxFf .git-blame-ignore-revs |
    git diff-tree --stdin --no-commit-id --name-only --diff-filter=AM -r
  git diff --name-only --diff-filter=AM HEAD
}
listed() {
  if [ -n "$since" ]; then changed; else git ls-files --cached --others --exclude-standard; fi
}
# Tests are left out: gtest's macros trip half of the checks. The bindings too: nanobind's headers
# need a newer clang.
sources=()
while read -r source; do
  [[ $source =~ ^(src|cli|lab)/.*\.cc$ && $source != *_test.cc && -f $source ]] &&
    sources+=("$source")
done < <(listed | sort -u)
((${#sources[@]})) || exit 0
# The flags in the build's list are gcc's: clang need not know them all.
printf '%s\n' "${sources[@]}" |
  xargs -P "$jobs" -n 4 "$tidy" -p "$build" --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wthread-safety
echo "stoker tidy: ${#sources[@]} sources are clean" >&2
