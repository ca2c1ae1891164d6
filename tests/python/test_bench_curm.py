"""bench/curm.py: the comparison of update schemes as one run, its tables worked out by hand, and
that docs/numbers.md has them and no others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from faults import COMMAND, run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import curm  # noqa: E402

TITLE = "## Update schemes (`make bench-curm`, bench/results/curm.json)"


def made(log_bytes: int = 64 << 20) -> dict:
    """Two traces, of which the first fills the logs; every scheme alike but where a test changes
    it."""
    results, more = [], []
    for trace, update_bytes in (("long.csv", 64 << 20), ("short.csv", 1 << 20)):
        for code in curm.CODES:
            for scheme in curm.SCHEMES:
                for form in ("published", "safe"):
                    results.append(
                        {
                            "trace": trace,
                            "scheme": scheme,
                            "form": form,
                            "code": code,
                            "updates": update_bytes >> 12,
                            "updates_per_second": 10_000.0,
                            "background_bytes_per_byte": 4.0,
                            "foreground_bytes_per_byte": 5.0,
                            "foreground_reads_per_update": 1.0,
                            "p99_us": 9.0,
                            "recovery_seconds": 2.0,
                            "space_peak_bytes": 1000,
                        }
                    )
                    more.append(
                        {
                            "drained_updates_per_second": 5_000.0,
                            "space_base_bytes": 900,
                            "reserved_peak_bytes": 0,
                            "update_bytes": update_bytes,
                        }
                    )
    larger = [
        {
            "trace": "long.csv",
            "code": code,
            "updates_per_second": 11_000.0,
            "drained_updates_per_second": 5_000.0,
            "background_bytes_per_byte": 2.0,
            "space_peak_bytes": 1000,
        }
        for code in curm.CODES
    ]
    return {
        "settings": {"log_bytes": log_bytes},
        "results": results,
        "more": more,
        "larger_logs": larger,
    }


def changed(answer: dict, scheme: str, trace: str, **values) -> None:
    for row, more in zip(answer["results"], answer["more"], strict=True):
        if row["scheme"] == scheme and row["trace"] == trace:
            row.update({key: value for key, value in values.items() if key in row})
            more.update({key: value for key, value in values.items() if key in more})


def test_the_goals_are_worked_out():
    ssd, hdd = made(), made()
    changed(
        ssd,
        "curm",
        "long.csv",
        updates_per_second=15_000.0,
        recovery_seconds=1.0,
        space_peak_bytes=960,
    )
    changed(ssd, "plr", "long.csv", space_peak_bytes=1900)
    changed(ssd, "fo", "long.csv", updates_per_second=1e9)  # no rival
    changed(ssd, "curm", "short.csv", updates_per_second=30_000.0)
    changed(
        hdd, "parix", "short.csv", updates_per_second=20_000.0, drained_updates_per_second=10_000.0
    )
    changed(
        ssd,
        "curm-reserve",
        "long.csv",
        updates_per_second=18_000.0,
        background_bytes_per_byte=3.0,
        space_peak_bytes=960 + (8 << 20),
        reserved_peak_bytes=12 << 20,
    )
    changed(hdd, "curm-reserve", "long.csv", drained_updates_per_second=4_950.0)
    traces, known, comparison, goals, reserves = curm.tables({"ssd": ssd, "hdd": hdd})
    assert (
        "| long | 16,384 | 64.0 | yes | 1.64, 1.09 |" in traces
        and "| short | 256 | 1.0 | **no** | 0.0256, 0.00853 |" in traces
    )
    assert (
        "6+3; long)" in known
        and "| parix | 4.00 | 8.9 to 10.5 | 5.00 | 7.0 to 7.5 | 1.00 | 0.43 to 0.97 |" in known
    )
    assert "| long | 16,384 | 1000000 (4.0) | 10 (4.0) |" in comparison and comparison.splitlines()[
        2
    ].endswith("| 15 (4.0) | 18 (3.0) | +50% |")
    assert "| short | 256, too short to fold |" in comparison and comparison.splitlines()[
        3
    ].endswith("| 30 (4.0) | 10 (4.0) | +200% |")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in goals.splitlines()]
    assert lines[0][1:] == ["SSD 6+3", "SSD 10+4", "hard disk 6+3", "hard disk 10+4"]
    cells = {line[0]: line[1:] for line in lines[2:]}
    assert (
        cells["update throughput, at least +40 %, once +82.5 %"]
        == ["+125% (+50% to +200%)"] * 2 + ["-25% (-50% to +0%)"] * 2
    )
    assert (
        cells["the same, of the traces that fill the logs"]
        == ["+50% (+50% to +50%)"] * 2 + ["+0% (+0% to +0%)"] * 2
    )
    assert (
        cells["the same, everything folded at the end"]
        == ["+0% (+0% to +0%)"] * 2 + ["-25% (-50% to +0%)"] * 2
    )
    assert cells["rebuild of a node, at least -47 % against pl"][0] == "-25% (-50% to +0%)"
    assert cells["space, at least -15 % against the largest"][0] == "-25% (-49% to +0%)"
    assert cells["of that, logs and reserves alone"][0] == "-47% (-94% to +0%)"
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in reserves.splitlines()
    ]
    assert lines[0] == [
        "curm-reserve beside curm, safe (long)",
        "SSD 6+3",
        "SSD 10+4",
        "hard disk 6+3",
        "hard disk 10+4",
    ]
    assert lines[2:] == [
        ["updates a second", "+20.0%", "+20.0%", "+0.0%", "+0.0%"],
        ["the same, everything folded at the end", "+0.0%", "+0.0%", "-1.0%", "-1.0%"],
        ["background bytes", "-25.0%", "-25.0%", "+0.0%", "+0.0%"],
        ["p99 of a write", "+0.0%", "+0.0%", "+0.0%", "+0.0%"],
        ["rebuild of a node", "+100.0%", "+100.0%", "+0.0%", "+0.0%"],
        ["space at its peak, MiB", "+8", "+8", "+0", "+0"],
        ["reserved at its most, in all logs, MiB", "+12", "+12", "+0", "+0"],
        [
            "curm, as much more log for all: updates a second",
            "-26.7%",
            "-26.7%",
            "+10.0%",
            "+10.0%",
        ],
        ["the same, everything folded at the end", "+0.0%", "+0.0%", "+0.0%", "+0.0%"],
        ["background bytes", "-50.0%", "-50.0%", "-50.0%", "-50.0%"],
        ["space at its peak, MiB", "+0", "+0", "+0", "+0"],
    ]


def test_the_tables_in_docs_are_of_the_results():
    result = json.loads((ROOT / "bench/results/curm.json").read_text())
    page = (ROOT / "docs/numbers.md").read_text()
    assert page.count(TITLE) == 1
    section = page.split(TITLE)[1].split("\n## ")[0]
    blocks = [block for block in section.split("\n\n") if block.startswith("|")]
    assert [block.strip() for block in blocks] == curm.tables(result), (
        "docs/numbers.md does not hold what `bench/curm.py --markdown bench/results/curm.json`"
        " prints"
    )


@pytest.mark.skipif(
    not COMMAND.exists(),
    reason="the stoker command is not installed beside this Python: run `make build`",
)
def test_a_run_writes_results_plot_and_tables(tmp_path, capsys):
    traces = []
    for profile, requests in (("hm", 600), ("wdev", 300)):
        traces.append(tmp_path / f"{profile}.csv")
        traces[-1].write_text(run("curm", "generate", profile, "--requests", str(requests)).stdout)
    out, plot = tmp_path / "curm.json", tmp_path / "plot.svg"
    assert curm.main([*map(str, traces), "--json", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert set(result) == set(curm.DEVICES) and [
        result[device]["settings"]["device"]["name"] for device in curm.DEVICES
    ] == ["ssd", "hdd"]
    assert {(row["trace"], row["code"]) for row in result["hdd"]["results"]} == {
        (path.name, code) for path in traces for code in curm.CODES
    }
    assert result["ssd"]["larger_logs"] == []  # these traces do not fill the logs
    assert plot.read_text().startswith("<svg") and "safe form, 25 nodes, ssd" in plot.read_text()
    assert "| hm | " in said and "**no**" in said
    assert curm.main(["--markdown", str(out)]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.skipif(
    not COMMAND.exists(),
    reason="the stoker command is not installed beside this Python: run `make build`",
)
def test_what_cannot_be_run_writes_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit, match="nothing was written"):
        curm.main(
            [
                str(tmp_path / "none.csv"),
                "--json",
                str(tmp_path / "x.json"),
                "--plot",
                str(tmp_path / "x.svg"),
            ]
        )
    assert not (tmp_path / "x.json").exists()
    for words in ([], ["a.csv", "--markdown", "b.json"]):
        with pytest.raises(SystemExit) as ended:
            curm.main(words)
        assert ended.value.code == 2 and "not both" in capsys.readouterr().err
