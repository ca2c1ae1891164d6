#!/usr/bin/env bash
# Makes the environment of `make bench-peers`, apart from .venv: pinned packages, and the peer's operators compiled once.
# Usage: setup_peers.sh FOLDER. What is there already stays; about 5 minutes on two cores where nothing is.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: setup_peers.sh FOLDER}
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
torch=$(grep -v '^#' requirements-torch.txt)

say() { echo "stoker setup: $*" >&2; }
fail() {
  say "$*"
  exit 1
}

tools/setup_system.sh bench/peers/packages.txt

# The Python of .venv: both sides of the comparison run the same one.
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv" || fail "the virtual environment $venv could not be made"
installed() { "$venv/bin/python" -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; }
if ! installed; then
  say "1 of 3: torch into $venv"
  "$venv/bin/pip" install -q "$torch+cpu" 2>/dev/null || "$venv/bin/pip" install -q "$torch" || fail "pip could not install $torch into $venv; see its messages above (no network?)"
fi
say "2 of 3: the peers' packages"
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$venv/bin/pip" install -q -r bench/peers/requirements.txt || fail "pip could not install bench/peers/requirements.txt into $venv; see its messages above"
say "3 of 3: compiling the peer's operators (about 4 minutes the first time; messages in $venv/operators.log)"
env DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$venv/operators" MAX_JOBS="$(nproc)" PATH="$venv/bin:$PATH" "$venv/bin/python" - >"$venv/operators.log" 2>&1 <<'PYTHON' ||
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder

AsyncIOBuilder().load()
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load()
PYTHON
  fail "the peer's operators could not be compiled; the last messages: $(tail -n 5 "$venv/operators.log")"
