#!/usr/bin/env bash
# Runs every fuzzer from its kept corpus for some seconds. Usage: fuzz.sh SECONDS JOBS
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1 jobs=$2
command -v clang++-14 >/dev/null || {
  echo "stoker fuzz: clang 14 is missing; install it with: apt-get install clang-14 libclang-rt-14-dev" >&2
  exit 1
}
fuzzers=()
for source in tests/fuzz/*_fuzz.cc; do fuzzers+=("$(basename "$source" .cc)"); done
cmake --preset fuzz
cmake --build --preset fuzz -j "$jobs" --target "${fuzzers[@]}"
for name in "${fuzzers[@]}"; do
  fuzzer=build/fuzz/tests/fuzz/$name
  kept=tests/fuzz/corpus/${name%_fuzz}
  grown=build/fuzz/corpus/$name # what this run finds; the kept corpus is only read
  mkdir -p "$grown"
  seeds=()
  [ ! -d "$kept" ] || seeds=("$kept")
  echo "stoker fuzz: $name for $seconds s" >&2
  "$fuzzer" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$name-" "$grown" "${seeds[@]}" 2>&1 | tail -n 12
done
