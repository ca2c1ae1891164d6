"""A save to a bucket, and what follows it, may end behind any of its requests: nothing that was
promised is lost, and what is left behind goes."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.checkpoint.manifest import MANIFEST, Name
from stoker.checkpoint.reading import Reader
from stoker.ckpt.cli import main


class Bucket:
    """Of s3_server.py, and what it holds."""

    def __init__(self, where: str) -> None:
        self._endpoint = where.partition("endpoint=")[2].partition("&")[0]

    def ask(self, path: str, what: dict | None = None) -> bytes:
        data = None if what is None else json.dumps(what).encode()
        request = urllib.request.Request(f"{self._endpoint}{path}", data=data)
        with urllib.request.urlopen(request) as answer:
            return answer.read()

    def held(self) -> dict:
        return json.loads(self.ask("/_held"))

    def keys(self) -> set[str]:
        return {key.removeprefix("prefix/") for key in self.held()["keys"]}


def made(width: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One weight is frozen: its file is copied by the server."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 8))
    model[1].weight.requires_grad_(False)
    left = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.SGD(left, lr=1e-2, momentum=0.9)


def train(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 64)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def values(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = opt.state_dict()["state"].values()
    found = [*model.state_dict().values(), *(v for each in states for v in each.values())]
    return [each.clone() for each in found]


def checkpoints(where: str) -> stoker.Checkpoints:
    return stoker.Checkpoints(where, keep=1, staging="64MiB")


class Dead:
    """What a writer that died has written down of its uploads (docs/stores/s3.md)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "stoker" / "uploads"
        self._lines: list[str] = []

    def learn(self) -> None:
        """As the writer lives."""
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            lines = path.read_text().splitlines()
            if any(line.startswith("begun ") for line in lines):
                self._lines = [line for line in lines if not line.startswith("ended ")]

    def dies(self, uploads: dict[str, str]) -> None:
        lines = [each for each in self._lines[1:] if each.split()[1] in uploads]
        assert len(lines) == len(uploads)
        if lines:
            text = "\n".join([self._lines[0], *lines]) + "\n"
            (self._folder / "dead.uploads").write_text(text)


WAYS = [
    pytest.param(600, True, 4, id="few"),
    pytest.param(600, True, 1, id="all", marks=pytest.mark.soak),
    pytest.param(600, False, 1, id="no-conditions", marks=pytest.mark.soak),
    pytest.param(90_000, True, 1, id="uploads", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("width", "conditions", "every"), WAYS)
def test_a_save_to_a_bucket_may_end_behind_any_request(
    s3, tmp_path, monkeypatch, width, conditions, every
):
    """Every prefix of its requests is restored from; every so many-th is also gone on from."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bucket, dead, expected = Bucket(s3), Dead(tmp_path), {}
    bucket.ask("/_control", {"conditions": conditions})
    model, opt = made(width, 0)
    with checkpoints(s3) as ckpt:
        for step in (1, 2):
            train(model, opt)
            expected[step] = values(model, opt)
            bucket.ask("/_control", {"conditions": conditions, "record": step == 2})
            handle = ckpt.save(step, model=model, optimizer=opt)
            handle.wait()
            ckpt.wait()  # the one before has gone
        dead.learn()
    states = bucket.held()["states"]
    found = []
    for number in range(states):
        bucket.ask("/_at", {"state": number})
        dead.dies(bucket.held()["uploads"])
        model, opt = made(width, 1)
        train(model, opt)
        with checkpoints(s3) as ckpt:
            for name in ckpt._tiers[0].names():
                Reader(ckpt._tiers[0], name, ckpt._ring, []).verify()
            found.append(ckpt.restore(model=model, optimizer=opt).step)
            for ours, theirs in zip(values(model, opt), expected[found[-1]], strict=True):
                assert torch.equal(ours, theirs), number
            assert bucket.held()["uploads"] == {}
            if goes_on := number % every == 0 or number == states - 1:
                train(model, opt)
                saved = Name.of(ckpt.save(3, model=model, optimizer=opt).folder)
                ckpt.wait()
                there = {MANIFEST, *ckpt._tiers[0].manifest(saved).objects_there}
                assert bucket.keys() == {f"{saved}/{each}" for each in there}, number
        if goes_on:
            assert main(["verify", s3, "--all"]) == 0
            bucket.ask("/_at", {"state": number})
            dead.dies(bucket.held()["uploads"])
            assert main(["rm", s3, "--after", "0"]) == 0
            left = bucket.held()
            assert left["keys"] == [] and left["uploads"] == {}, number
    assert found == sorted(found) and set(found) == {1, 2}
