"""docs/formats/checkpoint.md: every byte counts, and nothing that is damaged is believed."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker import errors
from stoker.checkpoint import tensors
from stoker.checkpoint.reading import Reader
from stoker.ckpt.cli import main
from stoker.checkpoint.manifest import (
    CHUNK,
    MANIFEST,
    TABLE,
    File,
    Manifest,
    Name,
    Table,
    dump_table,
    hash_of,
    parse_table,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of a small checkpoint."""
    store = tmp_path_factory.mktemp("format")
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0]])
    opt = torch.optim.AdamW(model.parameters())
    with stoker.Checkpoints(store, staging="64MiB") as ckpt:
        ckpt.save(3, model=model, optimizer=opt, extra={"note": {1: (2, b"3")}}).wait()
    return next(store.iterdir())


def signed(text: str | bytes) -> bytes:
    """A manifest with a right digest, of a JSON object."""
    head = (text if isinstance(text, bytes) else text.encode())[:-1]
    return head + b',"digest":"' + hash_of(head).hex().encode() + b'"}\n'


def of_table(data: bytes, files: list[File]) -> Manifest:
    """A manifest that names this table."""
    return Manifest(
        1, 1, "00000000", 0.0, files=files, tables=[Table(TABLE, len(data), hash_of(data).hex())]
    )


def test_the_worked_example(saved):
    name = Name.of(saved.name)
    assert (name.step, name.attempt) == (3, 1)
    data = (saved / "model.safetensors").read_bytes()
    assert len(data) == 4104 and data[:8] == (4088).to_bytes(8, "little")
    assert json.loads(data[8:4096]) == {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
    }
    assert data[4096:].hex() == "0000803f00000040"
    table = (saved / TABLE).read_bytes()
    assert table[:8] == b"STKCHUNK" and table[64:80] == hash_of(data)
    assert table[80:96] == bytes(8) + (4104).to_bytes(4, "little") + bytes(4)
    manifest = json.loads((saved / MANIFEST).read_bytes())
    assert manifest["files"][0] == {"name": "model.safetensors", "bytes": 4104, "chunks": 1}


def test_every_changed_byte_is_found(saved):
    files = sorted(saved.iterdir())
    assert {MANIFEST, TABLE, "model.safetensors", "state-00000.pack"} == {
        each.name for each in files
    }
    rng = random.Random(1)
    with stoker.Checkpoints(saved.parent, staging="64MiB") as ckpt:

        def sound() -> bool:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                readers = list(ckpt.readers())
            try:
                for reader in readers:
                    reader.verify()
            except errors.Corruption:
                return False
            return bool(readers)

        for file in files:
            data = file.read_bytes()
            for at in sorted(rng.sample(range(len(data)), min(len(data), 100))):
                damaged = bytearray(data)
                damaged[at] ^= 1 << rng.randrange(8)
                file.write_bytes(damaged)
                assert not sound(), f"{file.name} {at}"
            for cut in (b"", data[: len(data) // 2], data[:-1], data + b"\0"):
                file.write_bytes(cut)
                assert not sound(), f"{file.name} of {len(cut)} bytes"
            file.unlink()
            assert not sound(), f"without {file.name}"
            file.write_bytes(data)
        assert sound()


def test_a_manifest_that_breaks_a_rule_is_refused_whatever_it_says(saved):
    good = json.loads((saved / MANIFEST).read_bytes())
    del good["digest"]
    parse = lambda value: Manifest.parse(signed(json.dumps(value, separators=(",", ":"))), "here")
    assert parse(good).step == 3
    for wrong in (
        {"format": "other"},
        {"files": []},
        {"tables": []},
        {"step": -1},
        {"step": "3"},
        {"objects": []},
        {"files": good["files"] * 2},
        {"files": [{**good["files"][0], "name": "../a"}]},
        {"more": 1},
        {"files": [{**good["files"][0], "chunks": 7}]},
        {"files": [{**good["files"][0], "bytes": 1 << 70}]},
        {"state": [{"name": "a"}]},
        {"created": 10**400},
        {"created": -1.0},
        {"created": 1e300},
        {"metric": 10**400},
    ):
        with pytest.raises((errors.Corruption, errors.Mismatch), match="here"):
            parse({**good, **wrong})
    with pytest.raises(errors.Mismatch, match="use a newer Stoker"):
        parse({**good, "version": 5})


def test_the_parts_of_a_sharded_tensor_are_all_of_it_and_no_more(saved):
    good = json.loads((saved / MANIFEST).read_bytes())
    del good["digest"]
    file = {**good["files"][0]}
    piece = {"name": "m", "dtype": "float32", "file": file["name"], "offset": 0}
    good["state"] = [
        {**piece, "shape": [2, 3], "bytes": 24},
        {**piece, "shape": [1, 3], "bytes": 12},
    ]
    parts = [{"begin": [0, 0], "part": 0}, {"begin": [2, 0], "part": 1}]

    def parse(cut, version: int = 2) -> Manifest:
        made = {**good, "version": version, "sharded": cut}
        return Manifest.parse(signed(json.dumps(made, separators=(",", ":"))), "here")

    assert parse({"0": {"shape": [3, 3], "parts": parts}}).sharded
    with pytest.raises(errors.Corruption, match="format . of what takes format"):
        parse({"0": {"shape": [3, 3], "parts": parts}}, 1)
    with pytest.raises(errors.Corruption, match="format . of what takes format"):
        parse({})
    wrong = [
        ([4, 3], parts),  # a gap
        ([3, 3], parts[:1]),
        ([3, 3], [parts[0], {"begin": [1, 0], "part": 1}]),  # twice
        ([3, 3], [parts[0], {"begin": [2, 1], "part": 1}]),  # beyond the end
        ([3, 3], [parts[0], {"begin": [2], "part": 1}]),
        ([3, 3], [parts[0], {"begin": [-1, 0], "part": 1}]),
        ([3, 3], [parts[0], {"begin": [2, 0], "part": 7}]),
        ([3, 3], [parts[1]]),
        (["3", 3], parts),
        (9, parts),
        ([3, 3], 9),
    ]
    for shape, those in wrong:
        with pytest.raises(errors.Corruption, match="here"):
            parse({"0": {"shape": shape, "parts": those}})
    for number in ("1x", "7", "-1"):
        with pytest.raises(errors.Corruption, match="here"):
            parse({number: {"shape": [3, 3], "parts": parts}})


def test_no_bytes_make_a_reader_fail_otherwise(saved):
    """Manifest, table and safetensors header, with random damage behind a right digest."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    manifest = (saved / MANIFEST).read_bytes()
    head = manifest[: manifest.rindex(b',"digest"')] + b"}"
    good = Manifest.parse(manifest, "here")
    table, weights = (saved / TABLE).read_bytes(), (saved / "model.safetensors").read_bytes()

    def damaged(data: bytes) -> bytes:
        data = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(min(len(data), 600))
            data[at : at + rng.randrange(3)] = bytes(
                rng.choice(b'0129{}[]",:-ex\x00\xff') for _ in range(rng.randrange(3))
            )
        return bytes(data)

    def of(parse, *arguments) -> None:
        try:
            parse(*arguments, "here")
        except (errors.Corruption, errors.Mismatch):
            pass

    for _ in range(1000):
        of(Manifest.parse, signed(damaged(head)))
        bad = damaged(table)
        of(parse_table, bad, of_table(bad, good.files))
        bad = damaged(weights)
        of(tensors.read_header, bad, len(bad))


@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_no_manifest_makes_a_whole_read_fail_otherwise(saved, tmp_path, rounds):
    """Values of the manifest changed at random, behind a right digest; then all is read."""
    seed = 15 if rounds == 300 else random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    store = tmp_path / "run"
    shutil.copytree(saved, store / saved.name)
    text = (saved / MANIFEST).read_bytes()
    good = text[: text.rindex(b',"digest"')] + b"}"
    odd = [
        None,
        -1,
        0,
        1,
        7,
        1 << 40,
        10**400,
        1.5,
        "",
        "x",
        "float16",
        [],
        [1],
        {},
        {"__part__": 5},
        True,
    ]

    def places(value, found) -> list:
        for key in value if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            if isinstance(value[key], (dict, list)):
                places(value[key], found)
        return found

    read = refused = 0
    with stoker.Checkpoints(store, staging="64MiB") as ckpt:
        tier = ckpt._tiers[0]
        for _ in range(rounds):
            bad = json.loads(good)
            inside, key = rng.choice(places(bad, []))
            inside[key] = rng.choice(odd)
            made = signed(json.dumps(bad, separators=(",", ":")))
            (store / saved.name / MANIFEST).write_bytes(made)
            try:
                reader = Reader(tier, Name.of(saved.name), ckpt._ring, [])
                reader.verify()
                reader.weights()
                reader.objects(list(reader.manifest.objects))
                stoker.Keep(last=1, every_steps=2, every_seconds=60, best=1).reasons(
                    [reader.manifest]
                )
                read += 1
            except (errors.Corruption, errors.Mismatch, errors.NotFound):
                refused += 1
    assert read and refused


def test_tables_of_many_chunks():
    files = [File("a", 3 * CHUNK + 5, 4), File("b", 0, 0), File("c", CHUNK, 1)]
    data = dump_table((each, [bytes([i]) * 16 for i in range(each.chunks)]) for each in files)
    found = parse_table(data, of_table(data, files), "here")
    assert [(each.offset, each.bytes) for each in found["a"]] == [
        (i * CHUNK, CHUNK) for i in range(3)
    ] + [(3 * CHUNK, 5)]
    assert found["b"] == [] and found["c"][0].bytes == CHUNK
    elsewhere = bytearray(data)
    elsewhere[80] = 1
    with pytest.raises(errors.Corruption, match="says that chunk 0 of .* has .* bytes from byte"):
        parse_table(bytes(elsewhere), of_table(bytes(elsewhere), files), "here")


def test_large_models_have_several_files_and_an_index(monkeypatch, tmp_path):
    monkeypatch.setattr(tensors, "FILE_BYTES", 1 << 20)
    model = nn.ModuleList(nn.Linear(300, 300) for _ in range(6))
    model[0].weight.requires_grad_(False)
    with stoker.Checkpoints(tmp_path, staging="64MiB") as ckpt:
        handle = ckpt.save(1, model=model)
        handle.wait()
        other = nn.ModuleList(nn.Linear(300, 300) for _ in range(6))
        ckpt.restore(model=other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    index = json.loads((tmp_path / handle.folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    frozen = index["weight_map"]["0.weight"]
    assert [name for name, file in index["weight_map"].items() if file == frozen] == ["0.weight"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_transformers_loads_the_folder(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    small = {
        "vocab_size": 96,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_key_value_heads": 1,
    }
    config = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2),
        "llama": lambda: transformers.LlamaConfig(**small),
        "mixtral": lambda: transformers.MixtralConfig(**small, num_local_experts=3),
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with stoker.Checkpoints(tmp_path / "ours", staging="64MiB") as ckpt:
        handle = ckpt.save(1, model=model)
        handle.wait()
    folder = tmp_path / "ours" / handle.folder
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for (name, ours), theirs in zip(loaded.state_dict().items(), model.state_dict().values()):
        assert torch.equal(ours, theirs), name
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "theirs" / "model.safetensors"),
    )
    if kind == "mixtral":  # save_pretrained() may name experts as older versions had them
        assert sum(each.numel() for each in ours.values()) == sum(
            each.numel() for each in theirs.values()
        )
        return
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_batch_norms_are_written_as_save_pretrained_does(tmp_path):
    """Their running means are buffers."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    )
    torch.manual_seed(0)
    model = transformers.ResNetModel(config)
    model(torch.randn(2, 3, 32, 32))  # in training mode: the means move
    with stoker.Checkpoints(tmp_path / "ours", staging="64MiB") as ckpt:
        handle = ckpt.save(1, model=model)
        handle.wait()
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "ours" / handle.folder, tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys() and any("running_mean" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "ours" / handle.folder)
    assert all(torch.equal(value, ours[name]) for name, value in loaded.state_dict().items())


def test_diff_tells_which_parts_of_the_state_differ(tmp_path, capsys):
    store = tmp_path / "run"
    model = nn.Linear(64, 64)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    with stoker.Checkpoints(store, staging="64MiB") as ckpt:
        for step in (1, 2):
            model(torch.ones(1, 64)).sum().backward()
            opt.step()
            ckpt.save(step, model=model, optimizer=opt, extra={"epoch": step}).wait()
            if step == 2:
                with torch.no_grad():
                    opt.state[model.weight]["exp_avg"][0, :3] += 1.0
                ckpt.save(3, model=model, optimizer=opt, extra={"epoch": 2}).wait()
    diff = lambda a, b: main(["diff", str(store), str(store), "--step", a, "--with-step", b])
    state = "tensors and planes of the state differ"
    assert diff("2", "2") == 0
    out = capsys.readouterr().out
    assert "0 of 2 tensors differ" in out and f"0 of 8 {state}" in out
    assert diff("2", "3") == 1
    out = capsys.readouterr().out
    assert "0 of 2 tensors differ" in out and f"1 of 8 {state}" in out
    assert "state.0.exp_avg: 3 of 4,096 values differ, by at most 1\n" in out
    assert "\n0 of " in out and "other values differ" in out
    assert diff("1", "2") == 1
    out = capsys.readouterr().out
    assert "2 of 2 tensors differ" in out and f"6 of 8 {state}" in out
    assert "extra.epoch.value: 1 and 2\n" in out
    assert "\n1 of " in out


def test_diff_of_offloaded_runs_names_planes_and_counters(tmp_path, capsys):
    store = tmp_path / "run"
    model = nn.Linear(64, 64, bias=False).bfloat16()
    model, opt = stoker.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        store=tmp_path / "store",
        dram="64MiB",
        snapshots=1,
    )
    with stoker.Checkpoints(store, staging="64MiB") as ckpt:
        for step in (1, 2):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            opt.step()
            opt.zero_grad()
            ckpt.save(step, optimizer=opt).wait()
    opt.close()
    assert main(["diff", str(store), str(store), "--step", "1"]) == 1
    out = capsys.readouterr().out
    for plane in "rmv":
        assert f"optimizer:{plane}/root/bfloat16: " in out
    assert "16,384 of 16,384 bytes differ\n" in out and "optimizer.state.step: 1 and 2\n" in out


def test_the_command(tmp_path, capsys):
    from safetensors.torch import load_file

    store = tmp_path / "run"
    model = nn.Linear(300, 300)
    with stoker.Checkpoints(store, staging="64MiB") as ckpt:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.bias.fill_(step)
            ckpt.save(step, model=model, metric=1.0 / step).wait()

    def run(*arguments) -> tuple[int, str, str]:
        status = main([str(each) for each in arguments])
        return status, *capsys.readouterr()

    status, out, _ = run("ls", store)
    assert status == 0 and [int(line.split()[0]) for line in out.splitlines()] == [3, 2, 1]
    assert json.loads(run("ls", store, "--json")[1])[0]["step"] == 3
    assert "bias  float32 [300]" in run("show", store)[1]
    assert '"step":2,' in run("show", store, "--json", "--step", 2)[1]
    status, out, _ = run("diff", store, store, "--with-step", 1)
    assert status == 1 and "bias: differs by at most 2\n1 of 2 tensors differ" in out
    for _ in range(2):  # the second finds it there
        assert run("cp", store, tmp_path / "other", "--step", 2)[0] == 0
    assert run("verify", tmp_path / "other")[0] == 0
    assert run("export", store, tmp_path / "out")[0] == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["bias"], model.bias)
    status, _, err = run("export", store, tmp_path / "out")
    assert status == 1 and err.count("\n") == 1 and "is not an empty folder" in err
    status, out, _ = run("gc", store, "--last", 1, "--dry-run")
    assert status == 0 and out.count("removes") == 2 and len(run("ls", store)[1].splitlines()) == 3
    assert run("gc", store, "--last", 1)[0] == 0 and len(run("ls", store)[1].splitlines()) == 1
    assert run("ls", tmp_path / "none") == (
        1,
        "",
        f"stoker ckpt ls: there is no folder {tmp_path}/none; check the path\n",
    )
    assert run("show", store, "--step", 9)[0] == 1
