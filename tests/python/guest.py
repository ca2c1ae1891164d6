"""A virtual machine with NVMe drives of its own: Debian's kernel, busybox, and one program of ours.

QEMU emulates the processor as well, so a guest starts in about ten seconds anywhere; what is
measured in it ranks the cost of instructions and says nothing about a real drive.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

# Unpacked by the set-up, or of this machine.
ROOTS = (Path(__file__).resolve().parents[2] / ".venv/packages/linux-image-amd64", Path("/"))
MODULES = ["nvme", "vfio", "vfio_iommu_type1", "vfio_pci"]
SHARE_MODULES = ["virtio_pci", "9pnet_virtio", "9p"]
# Addresses of a guest's drives, by their slots.
FIRST_DRIVE, SECOND_DRIVE = "0000:00:10.0", "0000:00:11.0"
QEMU = "qemu-system-x86_64"
# A timer that is emulated on a busy machine fails the kernel's check.
KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 nokaslr mitigations=off intel_iommu=on no_timer_check"
)
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /scratch
mount -t tmpfs none /scratch
export TMPDIR=/scratch TEST_TMPDIR=/scratch PATH=/bin
while read module; do insmod $module || echo "cannot load $module"; done < /modules
ulimit -l unlimited
tries=0
while [ ! -e /dev/nvme0n1 ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
sh /run.sh
echo "guest: status $?"
poweroff -f
"""
MOUNT_ROOT = """
mkdir -p /host
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro root /host || exit
mount -t proc none /host/proc
mount -t sysfs none /host/sys
mount -t devtmpfs none /host/dev
mount -t tmpfs none /host/tmp
"""


@dataclass(frozen=True)
class Kernel:
    image: Path
    modules: Path


def kernel() -> Kernel:
    """The newest kernel of Debian that is here; skips where there is none, or no QEMU."""
    if shutil.which(QEMU) is None or not Path("/bin/busybox").exists():
        pytest.skip("no virtual machine: install qemu-system-x86 and busybox-static")
    for root in ROOTS:
        for modules in sorted((root / "lib/modules").glob("*"), reverse=True):
            image = root / "boot" / f"vmlinuz-{modules.name}"
            if image.exists() and (modules / "modules.dep").exists():
                return Kernel(image, modules)
    pytest.skip("no kernel for a virtual machine: `make setup` unpacks linux-image-amd64")


def with_needs(found: Kernel, names: list[str]) -> list[Path]:
    """The files of the modules and of all they need, in the order in which they load."""
    needs = {}
    for line in (found.modules / "modules.dep").read_text().splitlines():
        module, others = line.split(":")
        needs[module] = others.split()
    by_name = {re.sub(r"\.ko.*", "", Path(path).name).replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in names:
        path = by_name.get(name.replace("-", "_"))
        if path is None:
            continue  # built into this kernel
        order += [each for each in [*reversed(needs[path]), path] if each not in order]
    return [found.modules / path for path in order]


def libraries(program: Path) -> list[Path]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", listed)]


class Archive:
    """An initramfs: the kernel unpacks it as its first file system."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._names: set[str] = set()

    def add(self, name: str, content: bytes, mode: int = 0o100755) -> None:
        for parent in reversed(Path(name).parents):
            if str(parent) != "." and str(parent) not in self._names:
                self._entry(str(parent), b"", 0o040755)
        self._entry(name, content, mode)

    def folder(self, name: str) -> None:
        self._entry(name, b"", 0o040755)

    def _entry(self, name: str, content: bytes, mode: int) -> None:
        if name in self._names:
            return
        self._names.add(name)
        numbers = [len(self._names), mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
        head = b"070701" + b"".join(b"%08X" % number for number in numbers) + name.encode() + b"\0"
        self._parts += [_padded(head), _padded(content)]

    def bytes(self) -> bytes:
        self._entry("TRAILER!!!", b"", 0)
        return b"".join(self._parts)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % 4)


@dataclass(frozen=True)
class Ran:
    """What a guest printed, and the exit status of its script (None: it did not get there)."""

    output: str
    status: int | None


@dataclass
class Guest:
    """One boot runs one script. `program` is in the guest as /bin/NAME."""

    folder: Path
    programs: list[Path]
    devices: list[str]
    memory_mib: int = 1024
    # the file system of this machine, read-only, as /host: `chroot /host` runs what is there
    shares_root: bool = False

    def run(self, script: str, seconds: float = 600) -> Ran:
        """The time only ends a guest that hangs; one takes about ten seconds on an idle core."""
        process = self.start(script)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        found = re.search(r"guest: status (\d+)", output)
        return Ran(output, int(found.group(1)) if found else None)

    def start(self, script: str) -> subprocess.Popen[str]:
        found = kernel()
        initramfs = self.folder / "initramfs"
        initramfs.write_bytes(self._archive(found, script))
        command = [
            *(QEMU, "-accel", "tcg", "-machine", "q35,kernel-irqchip=split", "-cpu", "max"),
            *("-smp", "2", "-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=48"),
            *("-m", str(self.memory_mib), "-nodefaults", "-no-reboot", "-display", "none"),
            *("-serial", "stdio", "-kernel", str(found.image), "-initrd", str(initramfs)),
            *("-append", KERNEL_OPTIONS),
            *self.devices,
        ]
        if self.shares_root:
            options = "local,path=/,mount_tag=root,security_model=none,readonly=on,id=root"
            command += ["-virtfs", options + ",multidevs=remap"]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def _archive(self, found: Kernel, script: str) -> bytes:
        archive = Archive()
        for name in ("dev", "proc", "sys"):
            archive.folder(name)
        archive.add("init", INIT.encode())
        archive.add("run.sh", ((MOUNT_ROOT if self.shares_root else "") + script).encode())
        archive.add("bin/busybox", Path("/bin/busybox").read_bytes())
        names = []
        for path in with_needs(found, MODULES + SHARE_MODULES * self.shares_root):
            names.append(f"/modules.d/{path.name}")
            archive.add(names[-1].lstrip("/"), path.read_bytes())
        archive.add("modules", "".join(f"{name}\n" for name in names).encode())
        for program in self.programs:
            stripped = self.folder / f"{program.name}.stripped"
            subprocess.run(["strip", "-o", stripped, program], check=True)
            archive.add(f"bin/{program.name}", stripped.read_bytes())
            for library in libraries(program):
                archive.add(str(library).lstrip("/"), library.read_bytes())
        return archive.bytes()


def drive(
    folder: Path,
    name: str,
    mib: int,
    block_bytes: int = 512,
    slot: int = 0x10,
    layer: str = "",
    limit: str = "",
) -> list[str]:
    """An empty NVMe drive of that size, as options of QEMU. `layer` is a driver of its that fails
    on purpose, `limit` what it may do in a second."""
    image = folder / f"{name}.img"
    with image.open("wb") as file:
        file.truncate(mib << 20)
    source = f"file={image}"
    if layer:
        source = (
            f"driver=raw,file.driver={layer},file.image.driver=file,file.image.filename={image}"
        )
    options = [source, "if=none", f"id={name}", "discard=unmap", "cache=unsafe", limit]
    if not layer:
        options.append("format=raw")
    blocks = f"logical_block_size={block_bytes},physical_block_size={block_bytes}"
    return [
        *("-drive", ",".join(filter(None, options))),
        *("-device", f"nvme,id={name}c,serial={name},addr={slot:#x}"),
        *("-device", f"nvme-ns,drive={name},bus={name}c,{blocks}"),
    ]
