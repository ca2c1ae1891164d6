"""Stores beyond the local disk as Python and the command see them.

What they promise is tested in C++; s3_server.py is the server here, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import asked, s3_server

import stoker
from stoker.errors import Conflict, NotFound, Unsupported

STOKER = Path(sys.executable).parent / "stoker"
MIB = 1 << 20


def put(store, key: str, data: bytes, tag: str | None = "any") -> None:
    change = store.begin()
    change.resize(key, len(data))
    change.write_bytes(key, 0, data)
    if tag != "any":
        change.require(key, tag)
    change.commit().wait()


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_open_store_gives_objects_conditions_and_copies(kind, s3, tmp_path):
    where = s3 if kind == "s3" else f"dir:{tmp_path}/objects"
    with stoker.open_store(where, create=kind == "dir") as store:
        assert store.features() == {
            "atomic": "object",
            "update": False,
            "snapshots": False,
            "conditional": True,
            "verified": False,
            "versions": False,
        }
        put(store, "a/one", b"first", None)
        with pytest.raises(Conflict):
            put(store, "a/one", b"second", None)
        tag = store.stat("a/one")["tag"]
        put(store, "a/one", b"third", tag)
        with pytest.raises(Conflict):
            put(store, "a/one", b"fourth", tag)
        store.copy("a/one", "b")
        assert [each["key"] for each in store.list()] == ["a/one", "b"]
        assert store.read_bytes("b") == b"third"
    with pytest.raises(NotFound), stoker.open_store(f"dir:{tmp_path}/none"):
        pass


@pytest.mark.parametrize("store", ["dir:{}/run", "s3://bucket/run"])
def test_offload_refuses_a_store_without_transactions(store, tmp_path):
    store = store.format(tmp_path)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(Unsupported, match="changes many objects at once"):
        stoker.offload(model, torch.optim.AdamW(model.parameters()), store=store, dram="64MiB")
    assert not list(tmp_path.iterdir()), "nothing was made"


def run(*arguments: str | Path, ok: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run([STOKER, *map(str, arguments)], capture_output=True, text=True)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_the_commands_open_every_store(kind, s3, tmp_path):
    where = s3 if kind == "s3" else f"dir:{tmp_path}/objects"
    if kind == "dir":
        (tmp_path / "objects").mkdir()
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "a").write_bytes(b"x" * 100)
    (source / "below" / "b").write_bytes(os.urandom(17 * MIB))
    run("put", where, "set/", source)
    assert "set/below/b" in run("ls", where).stdout
    run("export", where, "set/", tmp_path / "back")
    assert (tmp_path / "back" / "set" / "below" / "b").read_bytes() == (
        source / "below" / "b"
    ).read_bytes()
    assert "2 objects" in run("fsck", where).stdout
    run("rm", where, "set/a")
    assert "set/a" not in run("ls", where).stdout
    assert "no object" in run("rm", where, "set/a", ok=False).stderr


def test_bytes_of_python_need_one_request_and_no_budget(s3):
    data = random.Random(3).randbytes(48 * MIB)
    with stoker.open_store(s3, dram="40MiB") as store:
        put(store, "large", data)
        before = len(asked(s3))
        assert store.read_bytes("large", 7, MIB) == data[7 : 7 + MIB]
        assert asked(s3)[before:] == [("GET", "/bucket/prefix/large")]
        assert store.read_bytes("large") == data
        with pytest.raises(NotFound):
            store.read_bytes("none", 0, 5)
        with pytest.raises(ValueError, match="beyond the end"):
            store.read_bytes("large", 48 * MIB - 1, 2)


def test_rm_of_many_objects_is_one_request(s3):
    names = [f"many/{i} <&>" for i in range(5)]
    with stoker.open_store(s3) as store:
        for name in [*names, "stays"]:
            put(store, name, b"x")
    before = len(asked(s3))
    run("rm", s3, *names)
    methods = [method for method, path in asked(s3)[before:] if "list-type" not in path]
    assert methods == ["HEAD"] * 5 + ["POST"]
    assert "no object" in run("rm", s3, "stays", "none", ok=False).stderr
    with stoker.open_store(s3) as store:
        assert [each["key"] for each in store.list()] == ["stays"]


def ask(port: int, path: str, body: dict | None = None, context=None) -> bytes:
    """Of s3_server.py itself."""
    url = f"{'https' if context else 'http'}://127.0.0.1:{port}/{path}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(url, data, context=context).read()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_is_wanted_and_checked(s3_credentials, tmp_path):
    pem = tmp_path / "server.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made += ["-nodes", "-keyout", pem, "-out", tmp_path / "ca.pem", "-days", "2"]
    made += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + (tmp_path / "ca.pem").read_bytes())
    with s3_server(pem) as port:
        where = f"s3://bucket?endpoint=https://127.0.0.1:{port}"
        # At once: patience, two minutes, would bring no other certificate.
        with pytest.raises(OSError, match=r"certificate is not trusted .* by ca=$"):
            stoker.open_store(where).__enter__()
        with stoker.open_store(f"{where}&ca={tmp_path}/ca.pem") as store:
            put(store, "key", b"by TLS")
            assert store.read_bytes("key") == b"by TLS"
            # Parts have a CRC32C alone, where the server checks it.
            tell = partial(
                ask, port, context=ssl.create_default_context(cafile=tmp_path / "ca.pem")
            )
            tell("_control", {"checksums": True})
            data = random.Random(2).randbytes(17 * MIB)
            put(store, "large", data)
            assert store.read_bytes("large") == data
            assert json.loads(tell("_seen"))["checked"] == 2
        other = where.replace("127.0.0.1", "127.0.0.2")  # the certificate is for another name
        with pytest.raises(OSError, match="certificate is not trusted"):
            stoker.open_store(f"{other}&ca={tmp_path}/ca.pem").__enter__()


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_cp_that_is_killed_twice_ends_equal(s3, tmp_path):
    source = tmp_path / "source"
    draw = random.Random(1)
    for i in range(300):
        path = source / f"{i % 7}" / f"{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(draw.randrange(3000)))
    (source / "large").write_bytes(draw.randbytes(40 * MIB + 5))
    for attempt in range(2):
        copy = subprocess.Popen([STOKER, "cp", f"dir:{source}", s3], stderr=subprocess.PIPE)
        time.sleep(0.15 * (attempt + 1))
        copy.send_signal(signal.SIGKILL)
        copy.wait()
    run("cp", f"dir:{source}", s3)
    assert "301 were there already" in run("cp", f"dir:{source}", s3).stderr
    back = tmp_path / "back"
    copy = subprocess.Popen([STOKER, "cp", s3, f"dir:{back}"], stderr=subprocess.PIPE)
    time.sleep(0.2)
    copy.send_signal(signal.SIGKILL)
    copy.wait()
    run("cp", s3, f"dir:{back}")
    found = hashes(back)
    assert {name: value for name, value in found.items() if ".stoker-" not in name} == hashes(
        source
    )
    # Into a store with transactions, with what changed alone.
    local = f"local:{tmp_path}/local"
    run("cp", f"dir:{back}", local, "--capacity", "128MiB")
    (back / "3" / "3").write_bytes(b"changed")
    assert "1 objects" in run("cp", f"dir:{back}", local).stderr
    with stoker.open_store(local, read_only=True) as store:
        assert store.read_bytes("3/3") == b"changed"
        assert hashlib.sha256(store.read_bytes("large")).hexdigest() == hashes(source)["large"]


def test_export_leaves_a_file_beside_it_alone(tmp_path):
    (tmp_path / "in").mkdir()
    long = "n" * 250
    for name in ("a", long):
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "a.partial").write_text("somebody's")
    run("export", f"dir:{tmp_path}/in", "a", tmp_path / "a")
    assert (tmp_path / "a").read_text() == "a"
    assert (tmp_path / "a.partial").read_text() == "somebody's"
    run("export", f"dir:{tmp_path}/in", long, tmp_path / long)
    assert (tmp_path / long).read_text() == long
    assert {each.name for each in tmp_path.iterdir()} == {"in", "a", "a.partial", long}


def test_export_of_an_object_that_is_replaced_meanwhile_is_a_conflict(s3, tmp_path):
    with stoker.open_store(s3) as store:
        put(store, "key", b"a" * (9 * MIB))
    port = int(s3.rpartition(":")[2].partition("&")[0])
    ask(port, "_control", {"faults": [{"kind": "replace", "method": "GET", "match": "key"}]})
    said = run("export", s3, "key", tmp_path / "out", ok=False).stderr
    assert "was changed while it was exported" in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".stoker-*"))


def test_ls_shows_folders_without_what_lies_below(s3):
    with stoker.open_store(s3) as store:
        for key in ("a/b", "a/c", "d"):
            put(store, key, b"x")
    shown = run("ls", s3, "--folders").stdout.split()
    assert "a/" in shown and "d" in shown and "a/b" not in shown
    found = json.loads(run("ls", s3, "--folders", "--json").stdout)
    assert found["folders"] == ["a/"] and [each["key"] for each in found["objects"]] == ["d"]


def test_odd_names_go_there_and_back(s3, tmp_path):
    names = ["a b", "a+b", "a%20b", "%", "ä/ö", "-", "*?[x]", "\\", "'\"<&>", "a\nb", "a\rb"]
    for name in [*names, "n" * 200 + "/" + "m" * 200]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    run("cp", f"dir:{tmp_path}/in", s3)
    run("cp", s3, f"dir:{tmp_path}/back")
    assert hashes(tmp_path / "back") == hashes(tmp_path / "in")


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_names_that_are_none_are_said(kind, s3, tmp_path):
    where = s3 if kind == "s3" else f"dir:{tmp_path}/objects"
    with stoker.open_store(where, create=True) as store:
        for key in ("", "/a", "a//b", "a/", "../a", "a/./b", "n" * 1025):
            with pytest.raises(ValueError, match="is not a (key|name) of an object"):
                put(store, key, b"x")
            with pytest.raises(ValueError, match="is not a (key|name) of an object"):
                store.stat(key)
        assert store.list() == []


@pytest.mark.parametrize("kind", ["dir", "local", "coded"])
def test_calls_beside_the_end_of_a_store_work_or_are_refused(kind, tmp_path):
    """Threads read, write and drop transactions while two close the store."""
    script = f"""
import os, sys, threading, time
from stoker import _core
from stoker.errors import InvalidArgument, StokerError
sys.setswitchinterval(1e-5)
root = {str(tmp_path)!r}
store = {{"dir": f"dir:{{root}}/d", "local": f"local:{{root}}/l",
          "coded": f"coded(2+1, {{root}}/c{{{{0..2}}}})"}}[{kind!r}]
size = dict(capacity_bytes=16 << 20, same_disk=True) if {kind!r} != "dir" else {{}}
runtime = _core.Runtime(threads=2)
data = os.urandom(70_000)
opened = runtime.open_store(store, create=True, **size)
txn = opened.begin()
txn.resize("a", len(data))
txn.write_bytes("a", 0, data)
txn.commit("durable").wait()
opened.close()
counts = {{"work": 0, "refused": 0}}

def works(opened, which):
    try:
        while True:
            if which == 0:
                assert opened.read_bytes("a") == data
            elif which == 1:
                opened.begin().resize("b", 1 << 16)
            elif which == 2:
                txn = opened.begin()
                txn.resize("c", 4096)
                txn.write_bytes("c", 0, data[:4096])
                del txn
            else:
                opened.info(), opened.list(), opened.stat("a")
            counts["work"] += 1
    except InvalidArgument as error:
        assert "closed" in str(error), error
        counts["refused"] += 1

for _ in range(40):
    opened = runtime.open_store(store)
    threads = [threading.Thread(target=works, args=(opened, i)) for i in range(4)]
    threads += [threading.Thread(target=opened.close) for _ in range(2)]
    for each in threads[:4]:
        each.start()
    time.sleep(0.01)
    for each in threads[4:]:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
print(counts)
assert counts["refused"] == 160
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, (ran.returncode, ran.stdout, ran.stderr[-2000:])
