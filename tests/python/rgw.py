"""A Ceph object gateway (RGW) of the tests' own: a monitor, an OSD in memory and radosgw on
loopback.

As a program it prints a line of JSON (endpoint, access, secret, bucket) once it serves, and ends
when its standard input does. The programs come from the Debian packages ceph-mon, ceph-osd and
radosgw.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAMS = ["ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw"]
PROGRAMS += ["radosgw-admin"]
START_S = 120  # a loaded machine takes its time

CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{v2}/0,v1:127.0.0.1:{v1}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}
admin socket =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
crash dir = {folder}
pid file =
# One OSD holds everything, in memory.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
rgw rados pool pg num min = 4
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = {bytes}
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
mon osd full ratio = 0.98
# A change of the maps waits a second for others otherwise, and there are dozens.
paxos propose interval = 0.05
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw run sync thread = false
rgw enable ops log = false
# What was overwritten leaves the memory soon, not after two hours.
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
"""


def missing() -> list[str]:
    """The programs that this machine lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@dataclass(frozen=True)
class Gateway:
    endpoint: str
    access: str = "AKIDTEST"
    secret: str = "secret/of+the=test"
    bucket: str = "bucket"
    folder: Path = Path()  # of its files and logs

    def store(self, prefix: str = "", patience: int = 60) -> str:
        """The composition of a store in its bucket."""
        where = self.bucket + (f"/{prefix}" if prefix else "")
        return f"s3://{where}?endpoint={self.endpoint}&patience={patience}"

    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access, "AWS_SECRET_ACCESS_KEY": self.secret}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    def __init__(self, folder: Path, device_bytes: int) -> None:
        v2, v1, port = free_ports(3)
        self.folder, self.fsid = folder, str(uuid.uuid4())
        self.mon = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        self.gateway = Gateway(f"http://127.0.0.1:{port}", folder=folder)
        self.daemons: list[subprocess.Popen] = []
        text = CONF.format(
            folder=folder, fsid=self.fsid, v2=v2, v1=v1, port=port, bytes=device_bytes
        )
        (folder / "ceph.conf").write_text(text)

    def run(self, *command: str | Path, stdin: str = "") -> str:
        done = subprocess.run(
            [*command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=START_S,
            env={**os.environ, "CEPH_CONF": str(self.folder / "ceph.conf")},
        )
        if done.returncode != 0:
            words = " ".join(str(word) for word in command)
            raise RuntimeError(f"{words} failed: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("w")
        # It ends with us, however we end.
        self.daemons.append(
            subprocess.Popen(
                [*command, "-c", str(self.folder / "ceph.conf"), "-f"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,
            )
        )

    def start(self) -> Gateway:
        keyring, monmap = self.folder / "keyring", self.folder / "monmap"
        caps = {
            "mon.": ["mon", "allow *"],
            "client.admin": ["mon", "allow *", "osd", "allow *", "mgr", "allow *"],
            "client.rgw": ["mon", "allow rw", "osd", "allow rwx"],
            "osd.0": ["mon", "allow profile osd", "osd", "allow *"],
        }
        for index, (name, allowed) in enumerate(caps.items()):
            words = [word for pair in zip(allowed[::2], allowed[1::2]) for word in ("--cap", *pair)]
            create = ["--create-keyring"] if index == 0 else []
            self.run("ceph-authtool", keyring, *create, "--gen-key", "-n", name, *words)
        self.run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", self.mon, monmap)
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.daemon("ceph-mon", "-i", "a")
        uid = str(uuid.uuid4())
        (self.folder / "osd").mkdir()
        self.run("ceph", "osd", "new", uid, "0")
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", uid)
        self.daemon("ceph-osd", "-i", "0")
        gateway = self.gateway
        self.run(
            *("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test"),
            *("--access-key", gateway.access, "--secret", gateway.secret),
        )
        self.daemon("radosgw", "-n", "client.rgw")
        self.wait_for_gateway()
        return gateway

    def wait_for_gateway(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(self.gateway.endpoint, timeout=10).read()
                return
            except (OSError, urllib.error.URLError) as error:
                ended = [each.args for each in self.daemons if each.poll() is not None]
                if ended or time.monotonic() > until:
                    raise RuntimeError(
                        f"radosgw does not serve ({error}); ended: {ended}"
                    ) from error
            time.sleep(0.1)

    def stop(self) -> None:
        for each in reversed(self.daemons):
            each.send_signal(signal.SIGKILL)  # nothing of it is kept
        for each in self.daemons:
            each.wait()


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def gateway(device_bytes: int = 4 << 30) -> Iterator[Gateway]:
    """A gateway with an empty bucket."""
    with tempfile.TemporaryDirectory(prefix="stoker_rgw_") as folder:
        cluster = Cluster(Path(folder), device_bytes)
        try:
            found = cluster.start()
            make_bucket(found)
            yield found
        finally:
            cluster.stop()


def make_bucket(found: Gateway) -> None:
    """The store makes none."""
    ask(found, "PUT")


def ask(found: Gateway, method: str, word: str = "") -> str:
    """A request to the bucket, `?word` behind it, signed by hand."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    host = found.endpoint.removeprefix("http://")
    digest = hashlib.sha256(b"").hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    query = f"{word}=" if word else ""
    canonical = "\n".join([method, f"/{found.bucket}", query, *lines, "", names, digest])
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}"
    key = f"AWS4{found.secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    proof = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"{found.access}/{scope}"
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={proof}"
    )
    url = f"{found.endpoint}/{found.bucket}" + (f"?{query}" if query else "")
    request = urllib.request.Request(url, method=method, headers=headers)
    return urllib.request.urlopen(request, timeout=START_S).read().decode()


if __name__ == "__main__":
    with gateway(int(sys.argv[1]) if len(sys.argv) > 1 else 4 << 30) as served:
        print(json.dumps(asdict(served), default=str), flush=True)
        sys.stdin.read()
