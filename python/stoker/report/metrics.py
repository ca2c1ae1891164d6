"""Metrics: the sums of a run's ledger in Prometheus' text format, served over HTTP.

It is Python's own http.server: the ledger's counters live in Python, a scrape comes every few
seconds, and so a C++ library beside it would only need a bridge back.
"""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..errors import InvalidArgument
from . import figures
from .figures import Row

_HELP = {
    "stoker_steps_total": "Steps decided by this process.",
    "stoker_step": "The number of the last step.",
    "stoker_step_seconds_total": "Wall time of the steps.",
    "stoker_compute_seconds_total": "Of that, what was not waiting.",
    "stoker_wait_seconds_total": "Waiting by cause; waits for data by stage and tier.",
    "stoker_read_bytes_total": "Bytes of the model's states read from disk, by class.",
    "stoker_written_bytes_total": "Bytes of the model's states written to disk, by class.",
    "stoker_sample_bytes_total": "Bytes of samples by the tier that gave them.",
    "stoker_batches_total": "Batches that loaders gave out.",
    "stoker_samples_total": "Samples of those batches.",
    "stoker_loader_threads": "C++ threads that a loader has now.",
    "stoker_loader_busy_seconds_total": "That they worked, added up.",
    "stoker_cache_held_bytes": "Bytes of blocks that a cache holds.",
    "stoker_cache_usable_bytes": "Bytes of blocks that it can hold.",
    "stoker_checkpoints_total": "Checkpoints saved by this process.",
    "stoker_checkpoint_bytes_total": "Bytes of those checkpoints.",
    "stoker_pool_bytes_peak": "The most that Stoker's pools held, in bytes.",
    "stoker_process_bytes_peak": "The most memory that the process had, in bytes.",
    "stoker_loss": "The loss of the last step.",
}
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """One thread adds rows, others read the text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, Labels]] = Counter()

    def add(self, row: Row) -> None:
        waits = figures.waits(row)
        with self._lock:
            self._add("stoker_steps_total", 1)
            self._set("stoker_step", row["step"])
            self._add("stoker_step_seconds_total", row["seconds"])
            computed = max(0.0, row["seconds"] - sum(waits.values()))
            self._add("stoker_compute_seconds_total", computed)
            for cause, seconds in waits.items():
                self._add("stoker_wait_seconds_total", seconds, cause=cause)
            for way in ("read", "written"):
                for name, count in row[f"{way}_bytes"].items():
                    self._add(f"stoker_{way}_bytes_total", count, **{"class": name})
            for tier, count in figures.loaders(row, "bytes").items():
                self._add("stoker_sample_bytes_total", count, tier=tier)
            for name, account in row.get("loaders", {}).items():
                self._add("stoker_batches_total", account["batches"], loader=name)
                self._add("stoker_samples_total", account["samples"], loader=name)
                if "threads" in account:
                    self._set("stoker_loader_threads", account["threads"], loader=name)
                    busy = account["busy_seconds"]
                    self._add("stoker_loader_busy_seconds_total", busy, loader=name)
            for name, cache in figures.caches(row).items():
                self._set("stoker_cache_held_bytes", cache["held_bytes"], store=name)
                self._set("stoker_cache_usable_bytes", cache["usable_bytes"], store=name)
            if saved := row.get("checkpoints"):
                self._set("stoker_checkpoints_total", saved["saved"])
                self._set("stoker_checkpoint_bytes_total", saved["bytes"])
            self._set("stoker_pool_bytes_peak", row["dram_bytes_peak"])
            for key, name in (
                ("process_bytes_peak", "stoker_process_bytes_peak"),
                ("loss", "stoker_loss"),
            ):
                if key in row:
                    self._set(name, row[key])

    def _add(self, name: str, value: float, **labels: str) -> None:
        self._values[name, tuple(labels.items())] += value

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._values[name, tuple(labels.items())] = value

    def text(self) -> str:
        """Text exposition format, version 0.0.4."""
        with self._lock:
            values = dict(self._values)
        told: list[str] = []
        for name, about in _HELP.items():
            mine = sorted(
                (labels, value) for (each, labels), value in values.items() if each == name
            )
            if not mine:
                continue
            kind = "counter" if name.endswith("_total") else "gauge"
            told += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            for labels, value in mine:
                inside = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels)
                told.append(f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}")
        return "\n".join(told) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def parse_address(text: str) -> tuple[str, int]:
    """ "9400" is that port of the loopback address; "0.0.0.0:9400" is one of all."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise InvalidArgument(
            f"{text!r} is not an address for metrics: give a port from 0 to 65535, or HOST:PORT"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class MetricsServer:
    """Answers GET /metrics from its own thread until close(). Port 0 takes any; `port` says which.
    InvalidArgument where the address cannot be had."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds for a peer that says nothing

            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/metrics", "/"):
                    return self.send_error(404, "the metrics are at /metrics")
                body = metrics.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """A scrape is nothing to tell."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise InvalidArgument(
                f"metrics cannot be served at {host}:{port} ({error.strerror or error}): give"
                " another port"
            ) from None
        self._server.daemon_threads = True
        self.host, self.port = host, self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="stoker-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
