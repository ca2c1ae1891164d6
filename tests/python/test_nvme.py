"""NVMe drives without the kernel's block layer, in a virtual machine that emulates them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from guest import FIRST_DRIVE, SECOND_DRIVE, Guest, drive

import stoker

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "build" / "release" / "tests" / "guest"
ENGINE, FAULTS, STORE, STORES = (
    PROGRAMS / f"stoker_guest_{name}_test"
    for name in ("engine", "faults", "store", "store_conformance")
)
STOKER = Path(sys.executable).parent / "stoker"


def passed(output: str) -> list[int]:
    """How many tests passed in each program that ran."""
    return [int(count) for count in re.findall(r"\[  PASSED  \]\D*?(\d+) tests?", output)]


# In a guest: `hold TARGET` starts a store that commits on, `let_go` kills its process, `refused
# COMMAND` wants it to fail.
HOLD = """
        hold() {
          STOKER_TARGET=$1 STOKER_COMMITS=1000000 stoker_guest_store_test \\
            --gtest_filter=*PowerIsCut > /held 2>&1 &
          holder=$!
          until grep -q committed /held; do
            kill -0 $holder || { cat /held; exit 1; }
            sleep 0.1
          done
        }
        let_go() { kill -9 $holder; wait $holder; }
        refused() { if "$@" 2>&1; then exit 1; fi; }"""
# What of the suite of all stores runs in `make test`; `make soak` runs all of it.
OF_STORES = (
    "ReadsWhatWasWritten",
    "ErrorsHaveTheirCodes",
    "AFailedWriteFailsTheCommitAndNothingOfItShows",
    "SnapshotsKeepTheirVersion",
    "WhatIsDurableIsThereAfterReopening",
    "AConditionHoldsOrTheCommitIsAConflict",
)
SOME = "--gtest_filter=" + ":".join(f"*.{name}/*" for name in OF_STORES)
HOLDER = r"process \d+ \(stoker_guest_st\)"  # the kernel knows 15 letters of a name


def test_the_suite_of_engines_passes_over_namespaces(tmp_path: Path) -> None:
    guest = Guest(
        tmp_path,
        [ENGINE, STORE, STORES, STOKER],
        drive(tmp_path, "d", 104) + drive(tmp_path, "e", 160, block_bytes=4096, slot=0x11),
    )
    part = "nvme:/dev/ng1n1@4096+150MiB"
    ran = guest.run(f"""{HOLD}
        export GTEST_BRIEF=1 GTEST_COLOR=no
        stoker_guest_engine_test || exit
        STOKER_TARGET=nvme:/dev/ng1n1 stoker_guest_engine_test || exit
        STOKER_TARGET=nvme:/dev/ng1n1 stoker_guest_store_conformance_test {SOME} || exit
        STOKER_TARGET={part} stoker_guest_store_test || exit
        hold {part}
        refused stoker ls local:{part}
        refused stoker create --overwrite --capacity 8MiB local:nvme:/dev/ng1n1@100MiB+50MiB
        refused stoker nvme bind {SECOND_DRIVE}
        let_go
        stoker ls local:{part}""")
    assert ran.status == 0, ran.output
    assert passed(ran.output) == [23, 23, len(OF_STORES), 1], ran.output
    in_use = rf"is in use by {HOLDER}; wait until it ends, or use another store"
    assert len(re.findall(in_use, ran.output)) == 2, ran.output
    assert re.search(rf"{HOLDER} uses /dev/ng1n1; end that first", ran.output), ran.output


def test_the_suite_of_engines_passes_over_our_own_driver(tmp_path: Path) -> None:
    guest = Guest(tmp_path, [ENGINE, STORE, STORES, STOKER], drive(tmp_path, "d", 104))
    ran = guest.run(f"""{HOLD}
        export GTEST_BRIEF=1 GTEST_COLOR=no STOKER_TARGET=nvme:{FIRST_DRIVE}
        stoker nvme list
        stoker_guest_engine_test --gtest_filter=*SaysWhatItIs* && exit 1
        stoker nvme bind {FIRST_DRIVE} || exit
        stoker nvme list
        stoker create --overwrite --capacity 8MiB --objects 99 local:nvme:{FIRST_DRIVE} || exit
        stoker_guest_store_conformance_test {SOME} || exit
        stoker_guest_engine_test || exit
        for round in first second; do
          STOKER_COMMITS=5 stoker_guest_store_test --gtest_filter=*PowerIsCut || exit
        done
        hold nvme:{FIRST_DRIVE}
        refused stoker ls local:nvme:{FIRST_DRIVE}
        refused stoker probe nvme:{FIRST_DRIVE}
        refused stoker nvme unbind {FIRST_DRIVE}
        let_go
        stoker ls local:nvme:{FIRST_DRIVE} || exit
        stoker nvme unbind {FIRST_DRIVE}
        stoker nvme list""")
    assert ran.status == 0, ran.output
    assert f"`stoker nvme bind {FIRST_DRIVE}`" in ran.output, "an unbound drive says how to bind it"
    assert passed(ran.output) == [0, len(OF_STORES), 23, 1, 1], ran.output
    assert re.findall(r"found (\d+)", ran.output) == ["0", "5"], ran.output
    assert f"{FIRST_DRIVE}  nvme  QEMU NVMe Ctrl  nvme:/dev/ng0n1" in ran.output
    assert ran.output.count(f"{FIRST_DRIVE}  nvme") == 2, "it was given back to the kernel"
    assert f"{FIRST_DRIVE}  vfio-pci  nvme:{FIRST_DRIVE}" in ran.output
    driven = (
        rf"{HOLDER} drives it or another of its IOMMU group \(Device or resource busy\);"
        " end that first, or use another"
    )
    assert len(re.findall(driven, ran.output)) == 2, ran.output
    assert re.search(rf"{HOLDER} uses /dev/vfio/\d+; end that first", ran.output), ran.output


def test_bad_sectors_and_slow_drives_are_told_and_borne(tmp_path: Path) -> None:
    rules = tmp_path / "bad.conf"
    rules.write_text("""
[inject-error]
event = "none"
iotype = "read"
sector = "2048"
errno = "5"

[inject-error]
event = "none"
iotype = "write"
sector = "4096"
errno = "5"
""")
    bad = drive(tmp_path, "bad", 16, layer=f"blkdebug,file.config={rules}")
    slow = drive(tmp_path, "slow", 16, slot=0x11, limit="throttling.iops-total=2")
    guest = Guest(tmp_path, [FAULTS], bad + slow)
    ran = guest.run(f"""
        export GTEST_BRIEF=1 GTEST_COLOR=no
        run() {{ STOKER_TARGET=nvme:$1 stoker_guest_faults_test --gtest_filter=$2; }}
        run /dev/ng0n1 Faults.* || exit
        run /dev/ng1n1 Slow.*WaitedFor || exit
        for drive in {FIRST_DRIVE} {SECOND_DRIVE}; do
          echo vfio-pci > /sys/bus/pci/devices/$drive/driver_override
          echo $drive > /sys/bus/pci/devices/$drive/driver/unbind
          echo $drive > /sys/bus/pci/drivers_probe
        done
        run {FIRST_DRIVE} Faults.* || exit
        run {SECOND_DRIVE} Slow.*""")
    assert ran.status == 0, ran.output
    assert passed(ran.output) == [1, 1, 1, 2], ran.output


@pytest.mark.soak
def test_the_suite_of_stores_passes_over_both_ways(tmp_path: Path) -> None:
    guest = Guest(tmp_path, [STORES, STOKER], drive(tmp_path, "d", 256))
    ran = guest.run(
        f"""
        export GTEST_BRIEF=1 GTEST_COLOR=no
        stoker_guest_store_conformance_test || exit
        stoker nvme bind {FIRST_DRIVE} || exit
        STOKER_TARGET=nvme:{FIRST_DRIVE} stoker_guest_store_conformance_test""",
        seconds=1200,
    )
    assert ran.status == 0, ran.output
    through_kernel, own_driver = passed(ran.output)
    assert through_kernel == own_driver > 30, ran.output


@pytest.mark.soak
def test_an_offloaded_run_on_a_namespace_has_the_bits_of_one_in_a_folder(tmp_path: Path) -> None:
    guest = Guest(
        tmp_path,
        [STOKER],
        drive(tmp_path, "d", 256) + drive(tmp_path, "e", 256, slot=0x11),
        memory_mib=3072,
        shares_root=True,
    )
    run = f"chroot /host {sys.executable} {ROOT}/tests/python/nvme_run.py"
    ran = guest.run(
        f"""
        export HOME=/tmp TMPDIR=/tmp
        {run} $HOME/folder local:nvme:/dev/ng0n1 || exit
        stoker nvme bind {SECOND_DRIVE} || exit
        {run} local:nvme:{SECOND_DRIVE}""",
        seconds=1200,
    )
    assert ran.status == 0, ran.output
    digests = re.findall(r"digest (\w{64})", ran.output)
    assert len(digests) == 3, ran.output
    assert len(set(digests)) == 1, ran.output


def cut_power(folder: Path, cuts: int) -> None:
    """Kills the machine while a store commits, again and again on one drive. Each next one finds
    all that was said to be committed, and no half of a commit."""
    options = drive(folder, "d", 104)
    committed = 0
    for commits in [*([5 + 7 * (cut % 4) for cut in range(cuts)]), 0]:
        guest = Guest(folder, [STORE], options)
        process = guest.start("""
            export GTEST_BRIEF=1 GTEST_COLOR=no
            STOKER_COMMITS=100000 stoker_guest_store_test --gtest_filter=*ThePowerIsCut""")
        output, found = [], None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.append(line)
                if match := re.search(r"(found|committed) (\d+)$", line.rstrip()):
                    number = int(match.group(2))
                    if match.group(1) == "found":
                        found = number
                        assert found in (committed, committed + 1), "".join(output)
                    committed = number
                    if found is not None and committed - found >= commits:
                        break
        finally:
            process.kill()
            process.wait()
        assert found is not None, "".join(output)
    assert committed >= 5


def test_a_store_on_a_namespace_holds_what_was_committed_when_power_is_cut(tmp_path: Path) -> None:
    cut_power(tmp_path, 1)


@pytest.mark.soak
def test_a_store_on_a_namespace_survives_many_power_cuts(tmp_path: Path) -> None:
    cut_power(tmp_path, 20)


@pytest.mark.parametrize("target", ["nvme:/dev/ng99n1", "nvme:0000:ff:1f.7"])
def test_a_namespace_that_is_not_there_is_said_and_makes_no_folder(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.AdamW(model.parameters())
    with pytest.raises(stoker.errors.StokerError, match=target):
        stoker.offload(model, opt, store=f"local:{target}", dram="64MiB")
    assert not any(tmp_path.iterdir())


def test_a_plan_for_a_namespace_says_what_to_give_instead(tmp_path: Path) -> None:
    words = [STOKER, "plan", "125M", "--dram", "8GiB", "--store", "local:nvme:/dev/ng0n1"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "Give the rates that `stoker probe` prints as --disk" in ran.stderr
    assert not any(tmp_path.iterdir())


def test_listing_says_that_a_machine_has_no_drive_or_names_them() -> None:
    ran = subprocess.run([STOKER, "nvme", "list"], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    assert ran.stdout == "This machine has no NVMe drive.\n" or re.match(
        r"\w{4}:\w\w:\w\w\.\w  ", ran.stdout
    )
