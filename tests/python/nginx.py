"""A folder of files served by nginx (the Debian package nginx-light) on loopback, as a ceiling."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rgw import end_with_parent, free_ports

CONF = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
{user}worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  sendfile on;
  tcp_nodelay on;
  keepalive_requests 100000;
  server {{
    listen 127.0.0.1:{port};
    # The look at a bucket when a store is opened, and its files.
    location = /bucket {{ return 200 "<ListBucketResult></ListBucketResult>"; }}
    location /bucket/ {{ alias {data}/; }}
  }}
}}
"""


def program() -> str | None:
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


@contextlib.contextmanager
def serve(data: Path, folder: Path) -> Iterator[str]:
    """The endpoint that serves data/KEY as /bucket/KEY; `folder` takes its own files."""
    [port] = free_ports(1)
    # By default the worker is a user who may not look into the folders of a test.
    user = "user root root;\n" if os.geteuid() == 0 else ""
    conf = folder / "nginx.conf"
    conf.write_text(CONF.format(folder=folder, data=data, port=port, user=user))
    serving = subprocess.Popen(
        [program(), "-p", folder, "-c", conf], stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
    )
    try:
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if serving.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "error.log").read_text()[-2000:])
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.wait()
