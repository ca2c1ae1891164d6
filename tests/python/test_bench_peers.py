"""bench/peers/compare.py without the peers: its rounds, what it keeps, the form of its result, the
ratios, and our side of the tiny form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from faults import COMMAND
from stoker.bench.model import Model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
import compare  # noqa: E402
import summary  # noqa: E402
import systems  # noqa: E402
import tensors  # noqa: E402

GIB = 1 << 30


def options(*words: str):
    return compare.options().parse_args(list(words))


def block(
    system: str,
    repetition: int,
    seconds: float,
    peak: float,
    losses=(3.0, 2.0),
    clipped=(2.5,),
    size="220M",
    compute="io",
) -> dict:
    moved = {"stoker": (10, 12), "deepspeed": (20, 18), "torch": (0, 0)}[
        systems.SYSTEMS[system].kind
    ]
    parameters = systems.SIZES[size].parameters
    step = {
        "seconds": seconds,
        "forward": seconds / 4,
        "backward": seconds / 4,
        "step": seconds / 2,
    }
    disk = {"read": 2.8e9, "write": 5.6e9}
    return {
        "part": "offload",
        "system": system,
        "repetition": repetition,
        "size": size,
        "compute": compute,
        "settings": dict(systems.SYSTEMS[system].settings),
        "steps": [step, {**step, "seconds": seconds * 1.01}, {**step, "seconds": seconds * 0.99}],
        "peak_bytes": int(peak * GIB),
        "rss_bytes": int(peak * GIB),
        "read_bytes": 3 * moved[0] * parameters,
        "written_bytes": 3 * moved[1] * parameters,
        "disk": {"before": disk, "after": disk},
        "core_seconds": 1.0,
        "losses": list(losses),
        "clipped_losses": [] if repetition else list(clipped),
        "torch": "2",
        "form": [2, 4],
    }


def finished() -> list[dict]:
    """What a run leaves behind: two rounds at one setting, and tensors."""
    offload = [
        each
        # the disk of the second round was slower, for all alike
        for number, slower in enumerate((1.0, 1.5))
        for each in (
            block("deepspeed-tuned", number, 3.6 * slower, 4.7, losses=(3.1, 2.1), clipped=(2.6,)),
            block("stoker-speculate", number, 1.5 * slower, 1.5),
            block("stoker-lazy", number, 1.7 * slower, 1.5),
            block("stoker-equal", number, 1.2 * slower, 4.6),
        )
    ]
    offload += [
        block("control", 0, 0.9, 4.4),
        block("deepspeed-none", 0, 2.2, 5.8, losses=(3.1, 2.1), clipped=(2.625,)),
    ]
    sizes = {"1 GiB": [GIB], "many": [GIB // 2, GIB // 2]}
    rate = lambda system, seconds: {
        "part": "tensors",
        "system": system,
        "repetition": 0,
        "sizes": sizes,
        "cases": {case: {"load": [seconds], "store": [seconds / 2]} for case in sizes},
    }
    return [
        {
            "part": "kernels",
            "kernel_seconds": {"exact": 1e-9, "bf16": 1e-9},
            "checksum_seconds": 1e-10,
            "cores": 2,
        },
        {"part": "plain", "size": "220M", "compute": "io", "core_seconds": 0.6},
        *offload,
        rate("stoker", 0.4),
        rate("deepnvme-tuned", 0.6),
        rate("deepnvme-default", 0.7),
        {"part": "fio", "repetition": 0, "read": GIB / 0.4, "write": GIB / 0.25},
        {
            "part": "offload",
            "system": "deepspeed-default",
            "repetition": 0,
            "size": "220M",
            "compute": "io",
            "error": "ended with status 1: no",
        },
    ]


@pytest.fixture(scope="module")
def result() -> dict:
    return summary.document(finished(), {"cores": 2, "memory_bytes": 24 * GIB})


def ratio_of(result: dict, *words: str) -> dict:
    found = [each for each in result["ratios"] if all(word in each["what"] for word in words)]
    assert len(found) == 1, (words, [each["what"] for each in result["ratios"]])
    return found[0]


def test_rows_hold_what_was_measured(result):
    summary.check(json.loads(json.dumps(result)))
    rows = {row["system"]: row for row in result["rows"]}
    ours = rows["stoker-speculate"]
    assert (
        ours["parameters"] == 218_318_848
        and ours["read_b_per_p"] == 10
        and ours["written_b_per_p"] == 12
    )
    assert ours["rss_bytes"] == int(1.5 * GIB) and ours["repetitions"] == {0: 1.5, 1: 2.25}
    floor = 218_318_848 * (10 / 2.8e9 + 12 / 5.6e9)  # the disk's; the processors would take 0.65 s
    assert ours["floor_seconds"] == pytest.approx(floor) and ours["floor_ratio"] == pytest.approx(
        (1.5 + 2.25) / 2 / floor
    )
    # the processors': it moves nothing
    assert rows["control"]["floor_seconds"] == pytest.approx((0.6 + 0.218318848) / 2)
    assert ours["losses_apart"] == {"beside": "control", "unclipped": 0, "clipped": 0}
    assert rows["deepspeed-tuned"]["losses_apart"] == {
        "beside": "deepspeed-none",
        "unclipped": 0,
        "clipped": pytest.approx(0.025),
    }


def test_ratios_are_taken_within_rounds_and_judged(result):
    exact = ratio_of(result, "tuned DeepSpeed's seconds over ours, exact (speculate)")
    assert (
        exact["range"] == [pytest.approx(2.4), pytest.approx(2.4)]
        and exact["goal"] == 2
        and exact["met"] is True
    )
    assert ratio_of(result, "at most its memory", "tuned")["met"] is False  # 3.0, and the goal is 4
    assert ratio_of(result, "resident memory")["met"] is True
    assert ratio_of(result, "over the floor")["met"] is False  # 1.50, and the goal is 1.15
    assert ratio_of(result, "load, many", "DeepNVMe's best (deepnvme-tuned)")[
        "value"
    ] == pytest.approx(1.5)
    assert (
        ratio_of(result, "load, many", "fio")["met"] is True
        and ratio_of(result, "store, 1 GiB", "fio")["met"] is True
    )
    assert not [each for each in result["ratios"] if "bf16" in each["what"]], (
        "nothing to compare: no ratio"
    )


def test_the_sizes_are_those_of_the_model():
    for size in systems.SIZES.values():
        with torch.device("meta"):
            assert size.parameters == sum(
                param.numel()
                for param in Model(size.layers, size.width, size.vocabulary).parameters()
            )


def test_the_form_is_checked(result):
    for change, said in (
        ({"rows": [{"system": "x"}]}, "a row lacks 'setting'"),
        ({"ratios": [{}]}, "a ratio lacks 'what'"),
        ({"disk_ceiling": 3}, "has 3 for 'disk_ceiling'"),
    ):
        with pytest.raises(ValueError, match=said):
            summary.check({**result, **change})
    with pytest.raises(ValueError, match="was not measured"):
        summary.check({**result, "rows": [{**result["rows"][0], "losses": []}]})


def test_the_table_and_the_page(result):
    text = summary.terminal(result)
    assert (
        "218.3 M parameters, 64 tokens a step" in text
        and "failed: deepspeed-default: ended with status 1: no" in text
    )
    line = next(line for line in text.splitlines() if line.startswith("stoker-speculate"))
    assert line.split("  ")[-1].strip() == "equal" and "10.0 / 12.0" in line and "1.50" in line
    page = summary.markdown(json.loads(json.dumps(result)), "peers.json")
    assert (
        page.startswith(summary.title("peers.json"))
        and "| NO |" in page
        and "| stoker-equal |" in page
        and "deepspeed-default failed" in page
    )
    assert (
        "Those of memory are of the peaks of all rounds, those over fio of the medians of all"
        " rounds" in page
    )
    peaks = {row["system"]: row["rss_bytes"] for row in result["rows"]}
    assert (
        ratio_of(result, "resident memory")["value"]
        == peaks["stoker-speculate"] / peaks["deepspeed-tuned"]
    )


@pytest.mark.parametrize("name", ["peers.json", "peers_60m.json", "peers_tensors.json"])
def test_the_page_in_docs_is_of_the_result(name, capsys):
    page = (ROOT / "docs" / "numbers.md").read_text()
    assert page.count(summary.title(name)) == 1
    assert compare.main(["--markdown", str(ROOT / "bench" / "results" / name)]) == 0
    assert capsys.readouterr().out in page, (
        "docs/numbers.md does not hold what `bench/peers/compare.py --markdown"
        f" bench/results/{name}` prints"
    )


def test_systems_take_turns_and_finished_ones_are_left_out(tmp_path):
    args = options(
        "--sizes",
        "220M",
        "--compute",
        "io",
        "--repetitions",
        "2",
        "--systems",
        "stoker-equal,control,deepspeed-tuned",
    )
    kept = compare.Kept(tmp_path / "blocks.jsonl", resume=False)
    names = lambda: [
        [task.system for task in tasks] for tasks in compare.Bench(args, kept).rounds()
    ]
    everybody = [*systems.TENSOR_SYSTEMS, "fio"]
    # whose memory another is given comes first; the control, whose losses do not change, is in the
    # first round only
    assert names() == [
        ["deepspeed-tuned", "stoker-equal", "control"],
        everybody,
        ["deepspeed-tuned", "stoker-equal"],
        everybody,
    ]
    kept.add({**block("stoker-equal", 0, 1.0, 1.0), "form": [args.warmup, args.steps]})
    # of another form: again
    kept.add({**block("stoker-equal", 1, 1.0, 1.0), "form": [args.warmup, args.steps + 1]})
    # failed: again
    kept.add(
        {
            "part": "offload",
            "system": "control",
            "size": "220M",
            "compute": "io",
            "repetition": 0,
            "form": [args.warmup, args.steps],
            "error": "no",
        }
    )
    args.only = "offload"
    assert names() == [["deepspeed-tuned", "control"], ["deepspeed-tuned", "stoker-equal"]]
    args.systems = ["stoker-equal"]
    args.only = "tensors"
    assert names() == [["stoker", "fio"]] * 2, "no peer was chosen"


def test_what_was_kept_survives_a_kill(tmp_path):
    path = tmp_path / "blocks.jsonl"
    kept = compare.Kept(path, resume=False)
    kept.add(block("control", 0, 1.0, 1.0))
    kept.add(block("control", 1, 1.0, 1.0))
    kept.add(block("control", 1, 2.0, 1.0))
    path.write_text(path.read_text() + '{"part": "offl')
    kept = compare.Kept(path, resume=True)
    assert [(each["repetition"], each["steps"][0]["seconds"]) for each in kept.blocks] == [
        (0, 1.0),
        (1, 2.0),
    ]
    kept.add(block("control", 2, 1.0, 1.0))
    assert len(compare.Kept(path, resume=True).blocks) == 3
    compare.Kept(path, resume=False)
    assert not path.exists() and (tmp_path / "blocks.previous.jsonl").exists()


def test_time_is_bounded_by_whole_rounds(tmp_path, monkeypatch, capsys):
    args = options(
        "--sizes",
        "220M",
        "--compute",
        "io",
        "--only",
        "offload",
        "--systems",
        "control",
        "--once",
        "torch",
        "--minutes",
        "1",
    )
    clock = iter(range(0, 10_000, 15))  # each look at the clock finds it 15 s later
    monkeypatch.setattr(compare.time, "monotonic", lambda: next(clock))
    bench = compare.Bench(args, compare.Kept(tmp_path / "blocks.jsonl", resume=False))
    monkeypatch.setattr(bench, "calibrate", lambda: None)
    monkeypatch.setattr(bench, "disk", lambda: {"read": 1.0, "write": 1.0})
    monkeypatch.setattr(
        compare, "in_process", lambda *_: {"steps": [{"seconds": 1.0}], "peak_bytes": 1}
    )
    bench.run()
    said = capsys.readouterr().err
    assert "5 blocks in 5 rounds" in said and "is left out" in said and "--resume adds it" in said
    assert 0 < len(bench.kept.blocks) < 5


def test_memory_is_what_the_peer_held(tmp_path):
    bench = compare.Bench(options(), compare.Kept(tmp_path / "blocks.jsonl", resume=False))
    task = compare.Task("offload", "stoker-equal", 1, "220M", "io")
    assert bench._budget(task, "deepspeed-tuned", []) is None
    done = [
        block("deepspeed-tuned", 0, 3.6, 4.5),
        block("deepspeed-tuned", 1, 3.6, 4.75),
        block("deepspeed-tuned", 1, 3.6, 9.0, size="60M"),
    ]
    assert (
        bench._budget(task, "deepspeed-tuned", done) == int(4.75 * GIB) - systems.MEMORY_BESIDE_DRAM
    )


def test_the_peers_configuration():
    sizes = [8 << 20, *[1 << 20] * 100]
    tuned = systems.configuration({"offload": "nvme", "tuned": True}, sizes, "DIR")
    zero = tuned["zero_optimization"]
    assert zero["offload_param"]["max_in_cpu"] == 0 and zero["offload_param"]["buffer_size"] > max(
        sizes
    )
    assert (
        zero["sub_group_size"] == sum(sizes) // 9
        and zero["offload_optimizer"]["pipeline_write"]
        and tuned["aio"]["queue_depth"] == 32
    )
    default = systems.configuration({"offload": "nvme", "tuned": False}, sizes, "DIR")
    assert "aio" not in default and "sub_group_size" not in default["zero_optimization"]
    assert (
        "offload_param"
        not in systems.configuration({"offload": "none", "tuned": False}, sizes, "DIR")[
            "zero_optimization"
        ]
    )


def test_options_are_checked(tmp_path, capsys):
    for words, said in (
        (["--sizes", "7B"], "7B: not one of tiny"),
        (["--quick", "--peers", str(tmp_path / "none")], "there is no"),
    ):
        with pytest.raises(SystemExit) as ended:
            compare.main([*words, "--dir", str(tmp_path)])
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_tensors_come_back(tmp_path):
    cases = {"one": [256 << 10], "many": [64 << 10, 128 << 10, 8 << 10]}
    found = tensors.run(
        {
            "kind": "stoker",
            "directory": str(tmp_path),
            "settings": {},
            "cases": cases,
            "passes": 1,
            "threads": 1,
        }
    )
    assert set(found["cases"]) == set(cases)
    assert {name: len(taken) for name, taken in found["cases"]["many"].items()} == {
        "store": 4,
        "load": 4,
        "store durable": 4,
    }


def test_tensors_that_come_back_wrong_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors.Stoker, "load", lambda self, made: None)
    with pytest.raises(RuntimeError, match="loaded other bytes"):
        tensors.run(
            {
                "kind": "stoker",
                "directory": str(tmp_path),
                "settings": {},
                "cases": {"one": [64 << 10]},
                "passes": 1,
                "threads": 1,
            }
        )


def test_the_mixed_sizes_are_whole_pages():
    for scale in (1, 64):
        sizes = compare.tensor_sizes(scale)
        assert all(size % 8192 == 0 for case in sizes.values() for size in case)
        assert sum(sizes["many"]) >= systems.MANY_BYTES // scale and len(sizes["many"]) > 50
    assert max(compare.tensor_sizes(1)["many"]) > 30 << 20


@pytest.mark.skipif(
    not COMMAND.exists(),
    reason=(
        "the stoker command, which measures the disk, is not installed beside this Python: run"
        " `make build`"
    ),
)
def test_our_side_of_the_tiny_form(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "kernel_seconds", lambda moments: 1e-9)
    monkeypatch.setattr(compare, "checksum_seconds", lambda: 1e-10)
    words = [
        "--quick",
        "--only",
        "offload",
        "--systems",
        "stoker-speculate,stoker-equal,control",
        "--dir",
        str(tmp_path),
    ]
    assert compare.main(words) == 0
    said = capsys.readouterr()
    assert "stoker-equal: left out" in said.err and "tiny" in said.err
    found = json.loads((tmp_path / "quick.json").read_text())
    summary.check(found)
    rows = {row["system"]: row for row in found["rows"]}
    assert set(rows) == {"stoker-speculate", "control"} and not found["failed"]
    ours = rows["stoker-speculate"]
    assert (
        ours["losses_apart"] == {"beside": "control", "unclipped": 0, "clipped": 0}
        and len(ours["clipped_losses"]) == 3
    )
    assert 11 < ours["written_b_per_p"] < 14 and rows["control"]["read_b_per_p"] == 0
    assert ours["rss_bytes"] > systems.SIZES["tiny"].dram and "stoker-speculate" in said.out
