"""bench/hits.py measures hits of the level that it says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("bench_hits", ROOT / "bench/hits.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


def test_what_is_measured_are_hits(tmp_path, capsys):
    written = tmp_path / "hits.json"
    bench.main(["--dir", str(tmp_path), "--mib", "8", "--rounds", "2", "--json", str(written)])
    result = json.loads(written.read_text())
    assert result["fetched_bytes"] == 0
    assert result["disk_hits_from_memory_bytes"] == 0
    assert result["memory_hits_from_disk_bytes"] == 0
    assert min(result["mib_per_s"].values()) > 0
    assert capsys.readouterr().out.count(" | ") > 10
    assert [each.name for each in tmp_path.iterdir()] == ["hits.json"]
    result["disk_over_local"] = 0.5
    assert "| 0.50 | 0.95 | NO |" in bench.table(result)
