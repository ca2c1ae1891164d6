#!/usr/bin/env bash
# Builds the C++ tests of a sanitizer's preset and runs them. Usage: sanitize.sh PRESET JOBS LEFT_OUT [SECONDS]
# LEFT_OUT is a regular expression of test names; what it matches is not built either. A test may take SECONDS (900).
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1 jobs=$2 left_out=$3 seconds=${4:-900}
cmake --preset "$preset"
tests=$(ctest --preset "$preset" --show-only=json-v1 -E "$left_out" |
  python3 -c 'import json, sys; print(*(t["name"] for t in json.load(sys.stdin)["tests"]))')
[ -n "$tests" ] || {
  echo "stoker sanitize: no test is left under $preset" >&2
  exit 1
}
read -ra names <<<"$tests"
cmake --build --preset "$preset" -j "$jobs" --target "${names[@]/#/stoker_}"
ctest --preset "$preset" -j "$jobs" --timeout "$seconds" -E "$left_out"
