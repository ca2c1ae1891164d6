"""bench/hits.py measures hits of the level that it says."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
bench = load_script(ROOT / "bench/hits.py")


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


def test_its_section_of_numbers_is_written_in_its_place(tmp_path):
    result = {
        "cores": 2,
        "load_average": "0.10 0.10 0.10",
        "set_mib": 512,
        "in_flight": 8,
        "mib_per_s": {"local": 100, "hits from disk": 99, "copy": 50, "hits from memory": 48},
        "disk_over_local": 0.99,
        "memory_over_copy": 0.96,
    }
    page = tmp_path / "numbers.md"
    page.write_text((ROOT / "docs/numbers.md").read_text())
    headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    for _ in range(2):
        bench.tables.write_section(bench.HEADING, bench.section(result), bench.BEHIND, page)
        text = page.read_text()
        assert text.count(bench.HEADING) == 1
        assert bench.table(result) in text
        now = [line for line in text.splitlines() if line.startswith("## ")]
        assert [line for line in now if line != bench.HEADING] == [
            line for line in headings if line != bench.HEADING
        ]
        assert now[now.index(bench.HEADING) - 1].startswith(bench.BEHIND)
        result["disk_over_local"] = 0.97


def test_the_table_in_docs_is_of_the_results():
    page = (ROOT / "docs/numbers.md").read_text()
    written = ROOT / "bench/results/hits.json"
    assert written.exists() == (bench.HEADING in page), "bench/hits.py writes both, with --docs"
    if written.exists():
        assert bench.table(json.loads(written.read_text())) in page
