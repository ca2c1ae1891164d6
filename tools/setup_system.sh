#!/usr/bin/env bash
# Installs the system packages of a list that are missing, as root or with sudo. Does nothing where all are there.
# Usage: setup_system.sh LIST, for example tools/packages/run.txt
set -euo pipefail
cd "$(dirname "$0")/.."
list=${1:?usage: setup_system.sh LIST}

fail() {
  echo "stoker setup: $*" >&2
  exit 1
}

names() { # names required|optional|unpacked
  awk -v want="$1" '/^[^#]/ { kind = ($2 ~ /^(optional|unpacked)$/) ? $2 : "required"; if (kind == want) print $1 }' "$list"
}

absence() { # what does not work without the package
  awk -v n="$1" '$1 == n { $1 = $2 = ""; print }' "$list"
}

# unpack KERNEL: its image and modules, to .venv/packages/KERNEL. It is not installed: the machine goes on booting its own.
unpack() (
  set -e
  folder=.venv/packages/$1
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  chmod 755 "$work"
  real=$(apt-cache depends "$1" | awk '/Depends: linux-image-[0-9]/ { print $2; exit }')
  (cd "$work" && apt-get download -qq "${real:-$1}" 2>/dev/null)
  mkdir "$work/tree"
  dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$work/tree" --wildcards --exclude='*/drivers/gpu/*' \
    --exclude='*/drivers/media/*' --exclude='*/drivers/net/*' --exclude='*/sound/*' './boot/vmlinuz*' './lib/modules'
  for version in "$work"/tree/lib/modules/*; do PATH=$PATH:/usr/sbin:/sbin depmod -b "$work/tree" "${version##*/}"; done
  mkdir -p "${folder%/*}"
  mv "$work/tree" "$folder"
)

missing() { # of the names given
  local name
  for name in "$@"; do
    dpkg-query -W -f='${db:Status-Status}\n' "$name" 2>/dev/null | grep -qx installed || echo "$name"
  done
}

check_cmake() {
  local found
  found=$(cmake --version | awk 'NR == 1 { print $3 }')
  printf '3.25\n%s\n' "$found" | sort -CV || fail "cmake $found is too old, 3.25 or newer is needed: use Debian 12, Ubuntu 24.04 or newer, or put a newer cmake on the PATH"
}

if ! command -v dpkg-query >/dev/null; then
  fail "this is not a Debian or Ubuntu system; install the equivalents of these packages yourself, then run \`touch\` on the stamp that \`make setup\` asked for: $(names required | tr '\n' ' ')"
fi

mapfile -t required < <(names required)
mapfile -t optional < <(names optional)
mapfile -t absent < <(missing "${required[@]}")
mapfile -t extra < <(missing "${optional[@]}")

if ((${#absent[@]} + ${#extra[@]})); then
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || fail "these system packages are missing, and you are neither root nor is there sudo; ask an administrator to run: apt-get install ${absent[*]} ${extra[*]}"
    as_root=(sudo)
  fi
  apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Dpkg::Use-Pty=0)
  echo "stoker setup: installing ${absent[*]} ${extra[*]}" >&2
  "${apt[@]}" update -qq </dev/null || echo "stoker setup: apt-get update failed; trying with the package lists that are there" >&2
  if ((${#absent[@]})); then
    "${apt[@]}" install -y -qq --no-install-recommends "${absent[@]}" </dev/null >&2 ||
      fail "apt-get could not install ${absent[*]}; see its messages above (no network, or another apt running?), then run make again"
  fi
  for name in "${extra[@]}"; do
    "${apt[@]}" install -y -qq --no-install-recommends "$name" </dev/null >&2 ||
      echo "stoker setup: $name could not be installed; without it this does not work:$(absence "$name")" >&2
  done
fi
for name in $(names unpacked); do
  [ -d ".venv/packages/$name" ] || unpack "$name" ||
    echo "stoker setup: $name could not be unpacked; without it this does not work:$(absence "$name")" >&2
done
check_cmake
