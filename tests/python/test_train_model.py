"""The trainer's model, its export, and the small parts around the loop."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from stoker.data.vocabulary import train_tokenizer
from stoker.errors import InvalidArgument
from stoker.train.export import export_model
from stoker.report.ledger_file import LedgerFile, read_ledger
from stoker.train import model as train_model
from stoker.train.memory import MemoryPeak, resident_bytes
from stoker.train.model import Model, ModelConfig, initialise, next_token_loss
from stoker.train.settings import Settings, human_bytes, parse_bytes, read_run, resolve, write_run
from stoker.train.stop import Stopped, StopSignals
from stoker.train.trainer import rate_at

CONFIG = ModelConfig(vocabulary=300, layers=3, hidden=64, heads=4, feed_forward=160, window=48)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        [
            "the quick brown fox jumps over the lazy dog " * 20,
            "an index of words and things\n" * 20,
        ],
        300,
    )


@contextlib.contextmanager
def resident(params):
    yield


def made(dtype: torch.dtype) -> Model:
    torch.manual_seed(4)
    model = Model(CONFIG, dtype)
    initialise(model)
    for parameter in model.parameters():  # norms away from one, so that a swapped pair would show
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


# -- model and export ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_export_and_computes_the_same_logits(tmp_path, tokenizer, dtype):
    transformers = pytest.importorskip("transformers")
    model = made(dtype)
    export_model(model, tokenizer, tmp_path, resident)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert theirs.dtype == dtype and type(theirs).__name__ == "LlamaForCausalLM"
    tokens = torch.randint(0, 300, (2, 48))
    with torch.no_grad():
        ours, other = model(tokens).float(), theirs(tokens).logits.float()
    assert (ours - other).abs().max() <= (
        2e-5 if dtype == torch.float32 else 0.03
    ) * ours.abs().max()
    if dtype == torch.float32:
        assert torch.equal(ours.argmax(-1), other.argmax(-1))


def test_transformers_generates_with_the_exported_tokenizer(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers")
    export_model(made(torch.bfloat16), tokenizer, tmp_path, resident)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "the quick brown dog"
    assert words(text)["input_ids"] == tokenizer.encode(text).ids
    assert words.decode(words(text)["input_ids"]) == text
    out = model.generate(
        **words(text, return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=8,
        min_new_tokens=8,
    )
    assert out.shape[1] == len(tokenizer.encode(text).ids) + 8


def test_the_exported_file_holds_the_weights_bit_for_bit(tmp_path, tokenizer):
    model = made(torch.bfloat16)
    gathered = []

    @contextlib.contextmanager
    def gather(params):
        gathered.append(len(params))
        yield

    export_model(model, tokenizer, tmp_path, gather)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            assert torch.equal(file.get_tensor(name), parameter)
    assert gathered == [1] * len(list(model.parameters()))  # never more than one in memory
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_model_sees_only_the_past():
    model = made(torch.float32)
    tokens = torch.randint(0, 300, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 300
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    assert torch.equal(one[:, :12], other[:, :12]) and not torch.equal(one[:, 12], other[:, 12])


def test_the_loss_is_the_mean_cross_entropy_of_the_next_token():
    model = made(torch.float32)
    windows = torch.randint(0, 300, (3, 11))
    with torch.no_grad():
        log_share = model(windows[:, :-1]).log_softmax(-1)
        by_hand = -sum(log_share[b, t, windows[b, t + 1]] for b in range(3) for t in range(10)) / 30
        assert torch.allclose(next_token_loss(model, windows), by_hand, atol=1e-5)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, count",
    [
        ("160MiB", 160 << 20),
        ("20GiB", 20 << 30),
        ("1.5 gb", 1_500_000_000),
        ("4096", 4096),
        ("2k", 2048),
    ],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "12 parsecs", "-1GiB", "0", "GiB"])
def test_bad_amounts_of_memory_are_sentences(text):
    with pytest.raises(InvalidArgument, match="amount of memory"):
        parse_bytes(text)


def test_human_bytes():
    assert [human_bytes(n) for n in (0, 999, 1500, 2.5e6, 3e9, 4e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.00 TB",
    ]


def test_a_resume_takes_the_stored_settings_and_refuses_others(tmp_path):
    write_run(tmp_path, Settings(steps=77, data=("/a", "/b"), dram="50MiB"), corpus_key="k")
    stored = read_run(tmp_path)["settings"]
    assert resolve({}, stored) == Settings(steps=77, data=("/a", "/b"), dram="50MiB")
    assert resolve({"dram": "60MiB", "policy": "sync", "steps": 77}, stored).dram == "60MiB"
    # also where the run knew none
    assert (
        resolve(
            {"stall_seconds": 20},
            {name: value for name, value in stored.items() if name != "stall_seconds"},
        ).stall_seconds
        == 20
    )
    with pytest.raises(InvalidArgument, match=r"--seed 5 \(stored: 0\), --steps 78 \(stored: 77\)"):
        resolve({"steps": 78, "seed": 5}, stored)
    with pytest.raises(InvalidArgument, match=r"--data /c \(stored: /a /b\)"):
        resolve({"data": ("/c",)}, stored)


def test_a_resume_keeps_what_its_run_chose(tmp_path):
    stored = {"precision": "float32", "steps": 77}
    kept = Settings(precision="float32", steps=77, checkpoint_every="off")  # the run knew of none
    assert resolve({"precision": "auto", "steps": 0}, stored) == resolve({}, stored) == kept
    with pytest.raises(InvalidArgument, match=r"--precision bfloat16 \(stored: float32\)"):
        resolve({"precision": "bfloat16"}, stored)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"steps": -1}, "--steps must be at least 1"),
        ({"hidden": 100, "heads": 8}, "try --hidden 112"),
        ({"vocabulary": 100}, "at least 257"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"stall_seconds": 0}, "--stall-seconds must be at least 1, not 0"),
    ],
)
def test_settings_that_cannot_work_are_sentences(given, words):
    with pytest.raises(InvalidArgument, match=words):
        resolve(given, None)


def test_a_damaged_run_file_is_a_sentence(tmp_path):
    (tmp_path / "run.json").write_text("{ cut")
    with pytest.raises(InvalidArgument, match=r"run\.json is damaged"):
        read_run(tmp_path)


def test_the_rate_warms_up_and_falls():
    settings = Settings(steps=100, warmup=10)
    rates = [rate_at(step, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == pytest.approx(1.0)
    assert all(a > b for a, b in zip(rates[10:], rates[11:])) and rates[100] == pytest.approx(0.05)


# -- ledger file -----------------------------------------------------------------------------------


def opened(path: Path, committed_step: int, record: dict | None = None) -> LedgerFile:
    ledger = LedgerFile(path)
    if record is not None:
        ledger.load_state_dict(record)
    ledger.open(committed_step)
    return ledger


def losses(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_ledger(path)]


def test_a_reopened_ledger_loses_what_was_not_committed_and_no_more(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path, 0)
    for step in range(1, 6):
        ledger.about(loss=float(step))
        ledger.decided({"step": step, "seconds": 1.0})
        ledger.check()
        # there before the commit
        assert read_ledger(path)[-1] == {"step": step, "seconds": 1.0, "loss": float(step)}
        assert ledger.state_dict() == {"unwritten": []}
    ledger.close()
    with open(path, "a", encoding="utf-8") as torn:
        torn.write('{"step": 6, "lo')
    again = opened(path, 3)
    again.about(loss=40.0)
    again.decided({"step": 4})
    again.close()
    assert losses(path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    opened(path, 0).close()
    assert read_ledger(path) == []


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_line_that_the_disk_did_not_take_travels_with_the_step(tmp_path, monkeypatch, call):
    path, write = tmp_path / "ledger.jsonl", os.write

    def full(descriptor: int, data: bytes = b"") -> int:
        write(descriptor, data[:7])  # a torn line, as a disk leaves it that is almost full
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = opened(path, 0)
    ledger.about(loss=1.0)
    ledger.decided({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        ledger.about(loss=2.0)
        ledger.decided({"step": 2})
        with pytest.raises(OSError, match=r"No space left.*ledger\.jsonl"):
            ledger.check()
    assert losses(path) == [(1, 1.0)]
    record = ledger.state_dict()
    assert record == {"unwritten": [{"step": 2, "loss": 2.0}]}
    ledger.about(loss=3.0)
    ledger.decided({"step": 3})  # room was made: all that is missing is written
    ledger.check()
    ledger.close()
    assert losses(path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    opened(path, 2, record).close()  # the line is in both: once
    assert losses(path) == [(1, 1.0), (2, 2.0)]
    opened(path, 1).close()
    opened(path, 2, record).close()
    assert losses(path) == [(1, 1.0), (2, 2.0)]
    opened(path, 1, record).close()  # step 2 was not committed after all
    assert losses(path) == [(1, 1.0)]


# -- memory and signals ----------------------------------------------------------------------------


def test_the_memory_peak_sees_an_allocation_that_is_gone():
    before = resident_bytes()
    with MemoryPeak(0.002) as peak:
        # fresh pages: a tensor's may come from heap that is resident already
        with mmap.mmap(-1, 16 << 20) as block:
            block.write(b"\1" * len(block))
            time.sleep(0.1)
    assert peak.bytes >= before + (15 << 20)


def test_a_signal_outside_of_a_step_stops_at_once_and_inside_after_it(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(), pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert stopped.value.exit_status == 143
    with StopSignals() as stop:
        with stop.stepping():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            assert stop.requested == signal.SIGINT
        with pytest.raises(Stopped) as stopped:
            stop.check()
        assert stopped.value.exit_status == 130
    assert "finishing this step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_in_a_finaliser_is_neither_printed_nor_lost(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: printed.append(what.exc_type))
    hook = sys.unraisablehook

    class Gone:
        pass

    def finalised(callback) -> None:
        gone = Gone()
        reference = weakref.ref(gone, callback)
        del gone
        assert reference() is None

    with StopSignals() as stop:
        finalised(lambda _: 1 / 0)
        finalised(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped):
            stop.check()
    assert printed == [ZeroDivisionError]  # what else is raised there is printed as ever
    assert sys.unraisablehook == hook


def test_the_start_of_a_device_is_not_taken_for_its_speed(monkeypatch):
    """A plan once said 10 s a step where a GPU took 0.07: its first product took a second."""
    now, calls = [0.0], []

    def run(part: int) -> None:
        calls.append(part)
        now[0] += 1.5 if len(calls) == 1 else 0.01 * part

    monkeypatch.setattr(train_model.time, "perf_counter", lambda: now[0])
    assert train_model._seconds(run, 16, torch.device("cpu")) == pytest.approx(0.16)
    assert len(calls) < 10
