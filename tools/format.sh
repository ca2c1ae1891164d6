#!/usr/bin/env bash
# Lays out every C, C++ and Python source as .clang-format and pyproject.toml say; with --check it
# only says which are laid out otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
sources() { git ls-files --cached --others --exclude-standard -- "$@"; }
if [ "${1:-}" = --check ]; then
  c=(--dry-run --Werror) python=(--check --quiet)
else
  c=(-i) python=(--quiet)
fi
status=0
sources '*.c' '*.cc' '*.h' | xargs .venv/bin/clang-format "${c[@]}" || status=1
sources '*.py' '*.pyi' | xargs .venv/bin/ruff format "${python[@]}" || status=1
((status == 0)) || echo "stoker format: lay the sources out with: make format" >&2
exit $status
