"""The s3: store against a real server: Ceph's RGW, started here (rgw.py)."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import rgw

import stoker
from stoker.errors import Conflict, InDoubt, NotFound, Unsupported

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "build/release/src/stoker/store/stoker_s3_test"
STOKER = Path(sys.executable).parent / "stoker"
KIB, MIB = 1 << 10, 1 << 20

pytestmark = pytest.mark.skipif(
    bool(rgw.missing()),
    reason="Ceph is not installed (ceph-mon, ceph-osd, radosgw of tools/packages/test.txt)",
)


@pytest.fixture(scope="module")
def gateway():
    with rgw.gateway() as served:
        yield served


@pytest.fixture
def where(gateway, monkeypatch, request):
    for name, value in gateway.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    return gateway.store(request.node.name)


def put(store, key: str, data: bytes, tag: str | None = "any") -> None:
    change = store.begin()
    try:
        change.resize(key, len(data))
        change.write_bytes(key, 0, data)
        if tag != "any":
            change.require(key, tag)
        change.commit().wait()
    finally:
        change.abandon()


def digests(store) -> dict[str, str]:
    found = {}
    for each in store.list():
        found[each["key"]] = hashlib.sha256(store.read_bytes(each["key"])).hexdigest()
    return found


@pytest.mark.parametrize("suite", ["S3", "Cached"])
def test_conformance(gateway, suite):
    program = CONFORMANCE.with_name(f"stoker_{suite.lower()}_test")
    if not program.exists():
        pytest.skip(f"{program} is not built")
    given = gateway.store("conformance").replace("?", "|?", 1)
    done = subprocess.run(
        [program, "--gtest_filter=*given"],
        env={**os.environ, **gateway.environment(), "STOKER_TEST_S3": given},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    case = "StoreConformance.AConditionHoldsOrTheCommitIsAConflict"
    assert f"[       OK ] {suite}/{case}" in done.stdout


def test_no_increment_is_lost_under_a_condition(where):
    """Four writers count in one object. What each was told to be done, is; RGW answers some of
    those who race with 500, which leaves them in doubt."""
    with stoker.open_store(where) as store:
        put(store, "count", b"0", None)
        done, doubts = [0] * 4, [0] * 4

        def count(writer: int) -> None:
            with stoker.open_store(where) as mine:
                while done[writer] + doubts[writer] < 5:
                    tag = mine.stat("count")["tag"]
                    number = int(mine.read_bytes("count"))
                    try:
                        put(mine, "count", b"%d" % (number + 1), tag)
                        done[writer] += 1
                    except InDoubt:
                        doubts[writer] += 1
                    except Conflict:
                        time.sleep(random.random() / 50)

        threads = [threading.Thread(target=count, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sum(done) + sum(doubts) == 20
        assert sum(done) <= int(store.read_bytes("count")) <= 20


def test_large_objects_go_in_parts_and_come_back(where):
    data = random.Random(1).randbytes(40 * MIB + 12345)
    with stoker.open_store(where) as store:
        with pytest.raises(Unsupported, match="at most 16 MiB, as its server ignores conditions"):
            put(store, "large", data, None)  # RGW 16 knows them for PUT alone
        assert store.list() == []
        put(store, "large", data)
        assert store.stat("large")["tag"].endswith("-3"), "three parts"
        assert store.read_bytes("large") == data
        assert store.read_bytes("large", 15 * MIB, 3 * MIB) == data[15 * MIB : 18 * MIB]
        store.copy("large", "copy")
        assert hashlib.sha256(store.read_bytes("copy")).digest() == hashlib.sha256(data).digest()


BEGUN = """
import sys
import stoker
with stoker.open_store(sys.argv[1]) as store:
    change = store.begin()
    change.resize("large", 40 << 20)
    change.write_bytes("large", 0, bytes(20 << 20))
    print("written", flush=True)
    sys.stdin.read()
"""


def test_uploads_of_a_dead_writer_are_aborted(gateway, where, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def uploads() -> int:
        return rgw.ask(gateway, "GET", "uploads").count("<UploadId>")

    before = uploads()
    pipe = subprocess.PIPE
    writer = subprocess.Popen([sys.executable, "-c", BEGUN, where], stdin=pipe, stdout=pipe)
    assert writer.stdout.readline() == b"written\n"
    until = time.monotonic() + 60
    noted = tmp_path / "stoker" / "uploads"
    while not any(b"begun" in each.read_bytes() for each in noted.glob("*")):
        assert time.monotonic() < until
        time.sleep(0.05)
    with stoker.open_store(where):
        assert uploads() == before + 1, "its writer lives"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    with stoker.open_store(where, read_only=True):
        assert uploads() == before + 1, "who reads aborts nothing"
    with stoker.open_store(where) as store:
        assert uploads() == before
        assert store.list() == []
    assert not list(noted.iterdir())


def test_a_listing_goes_on_over_pages_and_odd_names(where):
    names = [f"page/{i:04}" for i in range(1100)]
    names += ["a b", "a+b", "ä/ö", "a&b=c", "a%20b", "quote'\"<>", "~tilde-_.", "star*(x)!"]
    with stoker.open_store(where) as store:
        commits = []
        for i, name in enumerate(names):
            change = store.begin()
            change.resize(name, i % 3)
            commits.append((change, change.commit()))
        for _, commit in commits:
            commit.wait()
        found = store.list()
        assert [each["key"] for each in found] == sorted(names, key=str.encode)
        assert [each["key"] for each in store.list("page/10")] == names[1000:1100]
        for name in names[1100:]:
            assert store.stat(name)["bytes"] == names.index(name) % 3
    subprocess.run([STOKER, "rm", where, *names[1:]], check=True)
    with stoker.open_store(where) as store:
        assert [each["key"] for each in store.list()] == names[:1]


def test_what_is_not_there_is_said(gateway, where):
    with stoker.open_store(where) as store, pytest.raises(NotFound, match="there is no object"):
        store.read_bytes("none")
    other = gateway.store("x", patience=1).replace("s3://bucket", "s3://nobody")
    with pytest.raises(NotFound, match="there is no bucket 'nobody'"):
        stoker.open_store(other).__enter__()


def test_wrong_credentials_are_said(where, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(OSError, match="SignatureDoesNotMatch"):
        stoker.open_store(where).__enter__()


def make_files(folder: Path, small: int, large_bytes: int) -> None:
    random_ = random.Random(2)
    for i in range(small):
        path = folder / f"small/{i % 10}/{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_.randbytes(random_.randrange(8 * KIB)))
    with (folder / "large").open("wb") as file:
        for at in range(0, large_bytes, 16 * MIB):
            file.write(random_.randbytes(min(16 * MIB, large_bytes - at)))


def file_digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def cp_killed_twice(source: str, target: str, kill_after: tuple[float, float]) -> tuple[str, int]:
    """What the third run says, and how many were killed before they ended."""
    killed = 0
    for seconds in kill_after:
        copying = subprocess.Popen([STOKER, "cp", source, target], stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        copying.send_signal(signal.SIGKILL)
        killed += copying.wait() == -signal.SIGKILL
    done = subprocess.run([STOKER, "cp", source, target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr, killed


def there_and_back(where: str, folder: Path, files: int, kill_after: tuple[float, float]) -> None:
    there, killed_there = cp_killed_twice(f"dir:{folder}/from", where, kill_after)
    with stoker.open_store(where, read_only=True) as store:
        assert len(store.list()) == files
    back, killed_back = cp_killed_twice(where, f"dir:{folder}/back", kill_after)
    print(there, back, f"killed {killed_there} and {killed_back} times", sep="")
    assert killed_there + killed_back > 0, "all ended before they could be killed"
    before = file_digests(folder / "from")
    assert len(before) == files
    assert file_digests(folder / "back") == before, (
        "nothing else is there, no temporary file either"
    )


def test_cp_there_and_back_that_is_killed_twice_ends_equal(where, tmp_path):
    make_files(tmp_path / "from", 300, 40 * MIB)
    there_and_back(where, tmp_path, 301, (0.15, 0.3))


@pytest.mark.soak
def test_cp_of_10000_objects_and_a_large_one_that_is_killed_twice_ends_equal(monkeypatch, tmp_path):
    with rgw.gateway(14 << 30) as own:
        for name, value in own.environment().items():
            monkeypatch.setenv(name, value)
        make_files(tmp_path / "from", 10_000, 4 << 30)
        began = time.monotonic()
        there_and_back(own.store("large"), tmp_path, 10_001, (6, 12))
        print(f"{time.monotonic() - began:.0f} s")
