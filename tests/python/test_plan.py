"""`stoker plan`: plans of models of which there is no weight, checked against calculations by
hand."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from stoker import _core
from stoker.offload.planning import planner
from stoker.offload.planning import products
from stoker.offload.division.machine import Machine
from stoker.offload.planning.rehearsal import CountedSession
from stoker.plan import cli, measure
from stoker.plan.cli import main, quantity
from stoker.plan.outlook import gpu_memory
from stoker.plan.shapes import describe
from stoker.plan.text import PolicyEvents

DISK = ["--disk", "read=7GB/s,write=5GB/s"]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def known_processor(monkeypatch):
    """Kernels and checksums are not measured: the plan is then a matter of arithmetic."""
    known = Machine(
        read=1e12, write=1e12, update_seconds=1e-9, byte_seconds=4e-11, commit_seconds=0.005
    )
    monkeypatch.setattr(cli, "measure_machine", lambda folders, seconds, moments: known)
    monkeypatch.setattr(cli, "kernel_seconds", lambda moments: known.update_seconds)
    monkeypatch.setattr(
        cli,
        "quickest_type",
        lambda tokens, width: products.Quickest("bfloat16", {"bfloat16": 1e11, "float32": 5e10}),
    )


def planned(capsys, *words: str) -> dict:
    status = main([*words, "--json", "--check"])
    made = capsys.readouterr()
    result = json.loads(made.out)
    assert status == (0 if result["fits"] else 1), made.err
    return result


def llama_config(folder, width: int, layers: int, inner: int, **more) -> str:
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": width // 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return str(folder)


def test_7b_on_a_24_gib_gpu_by_hand(tmp_path, capsys):
    words = [
        llama_config(tmp_path / "llama", 4096, 32, 11008),
        "--dram",
        "32GiB",
        "--gpu",
        "24GiB",
        "--cores",
        "16",
        "--endurance",
        "1200TB",
        *DISK,
    ]
    plan = planned(capsys, *words)
    # 2 x 32000 x 4096 of embedding and head; a layer has 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096;
    # the last norm 4096
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    parameters = 2 * 32000 * 4096 + 32 * layer + 4096
    assert plan["parameters"] == parameters == 6_738_415_616
    assert plan["classes"] == {
        "weights": 2 * parameters,
        "remainder": 2 * parameters,
        "m": 4 * parameters,
        "v": 4 * parameters,
        "gradients": 2 * parameters,
    }
    # 32 GiB, less a 64th for the map's growth, hold gradients and weights (13.5 GB each), two
    # layers at work (0.8), twelve tiles of 6 MiB, and then in order the state of the embedding, of
    # two layers and of the norm: 10 B for each of their parameters.
    kept = 10 * (32000 * 4096 + 2 * layer + 4096)
    assert plan["dram"]["state"] == kept == 5_358_428_160 and plan["dram"]["retained_units"] == 4
    step = plan["step"]
    assert plan["policy"] == "speculate" and step["written_bytes"] == {
        "weights": 2 * parameters,
        "remainder": 2 * parameters,
        "m": 4 * parameters,
        "v": 4 * parameters,
    }
    assert step["read_bytes"]["weights"] == 0
    assert sum(step["read_bytes"].values()) == pytest.approx(10 * parameters - kept, rel=1e-3)
    disk = (10 * parameters - kept) / 7e9 + 12 * parameters / 5e9  # 8.86 + 16.17 s
    assert (
        plan["resource_seconds"]["disk"] == pytest.approx(disk, rel=1e-3)
        and plan["bottleneck"] == "disk"
    )
    # 6 operations a token and parameter, a third more to recompute; the embedding is looked up
    compute = 6 * 8192 * (parameters - 32000 * 4096) / 70e12 * 4 / 3
    assert plan["compute_alone_seconds"] == pytest.approx(compute) and compute == pytest.approx(
        6.19, rel=0.01
    )
    # the overlap hides a part of the computing, and no more than all of it
    assert disk < step["seconds"] < disk + compute
    assert sum(step["stall_seconds"].values()) + step["compute_seconds"] == pytest.approx(
        step["seconds"]
    )
    assert plan["steps"]["sync"]["seconds"] == pytest.approx(disk + compute, rel=0.05)
    least = disk / (compute / 8192)  # tokens that take as long as the disk
    assert least <= plan["tokens_hidden"] <= 1.6 * least
    # The accelerator: two layers at work and two ahead (a page for each pair), the gradients of a
    # whole step; recomputed, the inputs of 32 layers and all of one (2 bytes of the inputs and
    # outputs of its seven products); 10 bytes of each logit.
    gpu = plan["gpu"]
    inside = 2 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert gpu["classes"] == {
        "weights": 4 * 2 * layer + 2 * 4096,
        "gradients": 2 * parameters,
        "activations": 8192 * (2 * 4096 * 32 + inside),
        "logits": 8192 * 10 * 32000,
    }
    assert (
        gpu["recompute"]
        and gpu["problem"] is None
        and 20e9 < gpu["peak_bytes"] == sum(gpu["classes"].values()) < 24 * GIB
        and plan["fits"]
    )
    assert plan["disk_space"]["needed"] == pytest.approx(2 * 12 * parameters * 1.025, rel=0.01)
    assert plan["wear"]["bytes_per_1000_steps"] == 12_000 * parameters and plan["wear"][
        "steps_to_endurance"
    ] == int(1200e12 / (12 * parameters))
    modes = plan["byte_modes"]
    assert modes["exact"]["bytes_per_parameter"] == pytest.approx(22 - kept / parameters, rel=1e-3)
    assert (
        modes["8bit"]["seconds"]
        < modes["bf16"]["seconds"]
        < modes["exact"]["seconds"]
        == step["seconds"]
    )


def test_13b_on_a_24_gib_gpu_by_hand(tmp_path, capsys):
    model = llama_config(tmp_path / "llama", 5120, 40, 13824)
    plan = planned(capsys, model, "--dram", "32GiB", "--gpu", "24GiB", "--cores", "16", *DISK)
    layer = 4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120
    parameters = 2 * 32000 * 5120 + 40 * layer + 5120
    assert plan["parameters"] == parameters == 13_015_864_320
    elements = parameters + 1024  # the norm's 5120 become 6144: three planes of 4 KiB
    assert plan["dram"]["gradients"] == 2 * elements and plan["dram"]["retained_units"] == 0
    step = plan["step"]
    assert sum(step["written_bytes"].values()) == 12 * elements
    assert {name: step["read_bytes"][name] for name in "mv"} == {
        "m": 4 * elements,
        "v": 4 * elements,
    }
    # Weights are used twice (embedding and norm apart), and what is in memory at the turn need not
    # be read again.
    room = plan["dram"]["weights"]
    assert 7e9 < room < 8e9
    assert (
        2 * (2 * elements - room) - 2 * 2 * 32000 * 5120
        <= step["read_bytes"]["weights"]
        <= 2 * 2 * elements
    )
    disk = sum(step["read_bytes"].values()) / 7e9 + 12 * elements / 5e9
    assert plan["resource_seconds"]["disk"] == pytest.approx(disk) and 50 < disk < 58
    assert disk < step["seconds"] < 1.1 * disk
    assert plan["steps"]["sync"]["seconds"] > step["seconds"]
    # 26 GB of gradients, which stay on the accelerator until step(), are more than 24 GiB. What
    # would do: 36.1 GB.
    gradients, weights = 2 * elements, 4 * 2 * layer + 2 * 4096
    moving = 8192 * (2 * 5120 * 40 + 2 * (4 * 2 * 5120 + 3 * (5120 + 13824)) + 10 * 32000)
    assert not plan["fits"] and plan["problems"] == [plan["gpu"]["problem"]]
    assert (
        plan["gpu"]["classes"]["gradients"] == gradients > 24 * GIB
        and plan["gpu"]["classes"]["weights"] == weights
    )
    needed = -(-(gradients + weights + moving) // GIB)
    said = plan["problems"][0]
    assert (
        f"do not hold the gradients of a step ({gradients / 1e9:.1f} GB" in said
        and f"({needed} GiB) would" in said
        and "LoRA" in said
        and needed == 34
    )
    # its weights at work do not fit either
    assert "LoRA" not in gpu_memory(describe(model, "bfloat16").blocks, 8192, 2 * GIB)["problem"]
    on = lambda tokens, gib: gpu_memory(describe(model, "bfloat16").blocks, tokens, gib * GIB)[
        "problem"
    ]
    assert on(8192, needed) is None
    tokens = int(on(8192, needed - 1).split("micro-batches of ")[1].split()[0])
    assert tokens == ((needed - 1) * GIB - gradients - weights) // (moving // 8192)
    assert on(tokens, needed - 1) is None and on(tokens + 1, needed - 1) is not None


def test_grouped_queries_on_a_gpu(tmp_path):
    """A recomputed layer's input has the width of the model, not that of the keys and values."""
    model = llama_config(tmp_path / "llama", 4096, 32, 14336, num_key_value_heads=8)
    gpu = gpu_memory(describe(model, "bfloat16").blocks, 8192, 24 * GIB)
    inside = 2 * (2 * 2 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert gpu["recompute"] and gpu["classes"]["activations"] == 8192 * (2 * 4096 * 32 + inside)


def config_of(folder, model_type: str, **more) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **more}))
    return str(folder)


def test_the_logits_are_of_the_head(tmp_path):
    """Tied or not, whatever embeddings and projections there are beside it; and none where there is
    none."""
    logits = lambda model: gpu_memory(describe(model, "bfloat16").blocks, 128, 24 * GIB)["classes"][
        "logits"
    ]
    assert logits(config_of(tmp_path / "gpt2", "gpt2", n_layer=2)) == 128 * 10 * 50257
    opt = dict(
        hidden_size=256,
        word_embed_proj_dim=128,
        ffn_dim=512,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    assert logits(config_of(tmp_path / "opt", "opt", vocab_size=5000, **opt)) == 128 * 10 * 5000
    small = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    assert (
        logits(
            config_of(
                tmp_path / "encoder",
                "clip_text_model",
                vocab_size=5000,
                max_position_embeddings=512,
                **small,
            )
        )
        == 0
    )
    words = {"wte.weight": torch.zeros(1000, 64), "wpe.weight": torch.zeros(512, 64)}
    save_file(
        {**words, "h.0.a.weight": torch.zeros(64, 64), "h.0.b.weight": torch.zeros(64, 64)},
        tmp_path / "tied.safetensors",
    )
    assert logits(str(tmp_path / "tied.safetensors")) == 128 * 10 * 1000  # for all that is known


def test_a_token_goes_through_some_of_the_experts(tmp_path, capsys):
    shape = dict(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        tie_word_embeddings=False,
    )
    model = config_of(
        tmp_path / "mixtral", "mixtral", num_local_experts=8, num_experts_per_tok=2, **shape
    )
    plan = planned(
        capsys, model, "--dram", "1GiB", "--gpu", "24GiB", "--flops", "1T", "--tokens", "512", *DISK
    )
    expert = 3 * 256 * 512
    rest = 4 * 256**2 + 8 * 256 + 2 * 256
    assert plan["parameters"] == 2 * 1024 * 256 + 4 * (rest + 8 * expert) + 256
    through = 1024 * 256 + 4 * (rest + 2 * expert) + 256
    assert (
        plan["compute_alone_seconds"] == pytest.approx(6 * 512 * through / 1e12, rel=5e-3)
        and "2 of 8 experts a token" in plan["model"]
    )
    # Gate and up are one matrix of 256 x 1024.
    assert plan["gpu"]["classes"]["activations"] == 512 * 4 * 2 * (
        4 * 2 * 256 + (256 + 8) + 2 * (256 + 1024) + 2 * (512 + 256)
    )


def test_where_nothing_tells_of_experts_all_are_reckoned_with(tmp_path):
    save_file(
        {f"layers.0.experts.{i}.w.weight": torch.zeros(64, 32) for i in range(4)},
        tmp_path / "model.safetensors",
    )
    described = describe(str(tmp_path), "bfloat16")
    assert described.experts == 1 and "went through all experts" in described.origin
    assert "experts" not in describe("1B", "bfloat16").origin


def test_the_text_says_all_of_it(tmp_path, capsys):
    assert main(["1B", "--dram", "4GiB", "--gpu", "24GiB", "--endurance", "600TB", *DISK]) == 0
    text = capsys.readouterr().out
    for words in (
        "planned",
        "on disk",
        "in memory",
        "a step reads",
        "and writes",
        "takes",
        "sync",
        "speculate",
        "the bottleneck is the disk",
        "tokens a step on",
        "byte mode",
        "bf16 moments",
        "accelerator",
        "assumed to sustain",
        "disk space",
        "wear",
        "steps wear it out",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["1B", "--dram", "64MiB", *DISK], "MiB is the least that works"),
        (["1B", "--dram", "1GiB", "--gpu", "24GiB", *DISK], "the gradients of a step alone take"),
        (["1B", "--dram", "8GiB", "--gpu", "2GiB", *DISK], "do not hold the gradients of a step"),
        (["1B", "--dram", "8GiB", "--gpu", "4GiB", "--tokens", "65536", *DISK], "micro-batches of"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(words, sentence, capsys):
    assert main([*words, "--check"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("stoker plan: it does not fit: ") and sentence in said


def test_what_it_names_as_the_least_works(capsys):
    assert main(["125M", "--dram", "128MiB", *DISK]) == 0, "that it does not fit is an answer"
    least = int(capsys.readouterr().err.split("--dram ")[1].split("MiB")[0])
    assert main(["125M", "--dram", f"{least}MiB", "--check", *DISK]) == 0
    assert main(["125M", "--dram", f"{least - 1}MiB", "--check", *DISK]) == 1


def test_a_full_disk_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        cli.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10 << 30})
    )
    assert (
        main(["1B", "--dram", "4GiB", "--store", str(tmp_path / "not" / "there"), "--check", *DISK])
        == 1
    )
    assert "GB free, and two versions" in capsys.readouterr().err


def test_a_full_disk_is_told_the_byte_mode_that_fits(tmp_path, capsys, monkeypatch):
    words = ["1B", "--dram", "4GiB", *DISK]
    needs = {
        mode: planned(capsys, *words, "--moments", mode)["disk_space"]["needed"]
        for mode in ("exact", "bf16", "8bit")
    }

    def problem(free: int) -> str:
        monkeypatch.setattr(
            cli.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free})
        )
        return planned(capsys, *words, "--store", str(tmp_path))["problems"][0]

    assert f"--moments bf16, with which {needs['bf16'] / 1e9:.1f} GB are enough" in problem(
        needs["bf16"]
    )
    assert "--moments 8bit, with which" in problem(needs["8bit"]) and "--moments 8bit" in problem(
        needs["bf16"] - 1
    )
    assert "--moments" not in problem(needs["8bit"] - 1)


def test_what_the_store_has_already_is_free_for_it(tmp_path, capsys, monkeypatch):
    """The plan of the very run that goes on there."""
    store = str(tmp_path / "store")
    words = ["layer=1M*2", "--dram", "256MiB", "--store", store, *DISK]
    needed = planned(capsys, *words)["disk_space"]["needed"]
    _core.Runtime(threads=1).open_store(
        store, create=True, capacity_bytes=needed, holder="test"
    ).close()
    monkeypatch.setattr(
        cli.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 16 << 20})
    )
    space = planned(capsys, *words)["disk_space"]
    assert (
        space["free"] - (16 << 20)
        == space["held"]
        == os.stat(tmp_path / "store" / "stoker.volume").st_blocks * 512
        >= needed
    )
    assert main(words) == 0
    assert (
        f"are free ({space['held'] / 1e6:.1f} MB of it in the store that is there)"
        in capsys.readouterr().out
    )
    assert planned(capsys, *words[:-3], str(tmp_path / "other"), *DISK)["problems"]


def test_two_folders_of_one_disk_have_its_room_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        cli.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 20 << 30})
    )
    assert (
        main(["1B", "--dram", "4GiB", "--store", f"{tmp_path}/a,{tmp_path}/b", "--check", *DISK])
        == 1
    )
    assert "21.5 GB free" in capsys.readouterr().err


def test_two_folders_of_one_disk_have_its_rates_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure, "disk_rates", lambda directory, seconds: {"read": 7e9, "write": 5e9, "mixed": 6e9}
    )
    monkeypatch.setattr(measure, "disk_share", lambda directory, machine: 1.0)
    (tmp_path / "a").mkdir()
    machine = measure.measure_machine([str(tmp_path), str(tmp_path / "a")], 1.0, 1 << 22)
    assert (machine.read, machine.write, machine.mixed) == (7e9, 5e9, 6e9)
    other = next(
        each for each in ("/dev/shm", "/proc") if os.stat(each).st_dev != os.stat(tmp_path).st_dev
    )
    assert measure.measure_machine([str(tmp_path), other], 1.0, 1 << 22).read == 14e9


@pytest.mark.parametrize(
    ("store", "where"),
    [("local:{0}/a", "{0}"), ("~/a", "{0}"), ("{0}/b,~/c", "{0}"), ("local:{0}/none/b", "{0}")],
)
def test_the_disk_is_that_of_the_store(store, where, tmp_path, capsys, monkeypatch):
    """Not that of the folder in which the plan is made."""
    asked = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        cli.shutil,
        "disk_usage",
        lambda folder: asked.append(folder) or type("Usage", (), {"free": 100 << 30}),
    )
    planned(capsys, "125M", "--dram", "4GiB", "--store", store.format(tmp_path), *DISK)
    assert asked == [where.format(tmp_path)]


def test_snapshots_take_room(capsys):
    """Each all that a step changes, here every byte, and a megabyte."""
    space = lambda *more: planned(capsys, "1B", "--dram", "4GiB", *more, *DISK)["disk_space"]
    assert (
        space("--snapshots", "2")["needed"]
        == space()["needed"] + 2 * (space()["one_version"] + (1 << 20))
        > 1.9 * space()["needed"]
    )
    assert main(["1B", "--dram", "4GiB", "--snapshots", "1", *DISK]) == 0
    assert ", 1 snapshot and room" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["7B", "--dram", "32GiB"],
        ["7B", "--dram", "32GiB", "--store", "coded(2+1, /a, /b, /c)", *DISK],
        ["7B", "--dram", "32GiB", "--store", "memory:", *DISK],
        ["7B", "--dram", "none", *DISK],
        ["7B", "--dram", "32GiB", "--disk", "read=7GB/s"],
        ["layer=", "--dram", "32GiB", *DISK],
        ["0B", "--dram", "32GiB", *DISK],
        ["7B", "--dram", "32GiB", "--tokens", "0", *DISK],
        ["7B", "--dram", "32GiB", "--snapshots", "-1", *DISK],
    ],
)
def test_a_wrong_command_line_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("stoker plan: ")


def test_a_model_that_is_not_there_is_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none"), "--dram", "1GiB", *DISK]) == 1
    assert main([str(tmp_path), "--dram", "1GiB", *DISK]) == 1


def header(content: str) -> bytes:
    return len(content).to_bytes(8, "little") + content.encode()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("model.safetensors", b"\xff" * 64, "is not a safetensors file"),
        # cut off
        (
            "model.safetensors",
            header('{"a": {"dtype": "BF16", "shape": [2, 2]}}')[:-3],
            "is not a safetensors file",
        ),
        ("model.safetensors", header('{"a": {"dtype": "BF16"}}'), "is not a safetensors file"),
        (
            "model.safetensors",
            header('{"a": {"dtype": "BF16", "shape": ["x"]}}'),
            "is not a safetensors file",
        ),
        ("model.safetensors", header("[1]"), "is not a safetensors file"),
        ("model.safetensors", header("{}"), "holds no tensors"),
        ("model.safetensors", header('{"a": {"dtype": "F64", "shape": [2, 2]}}'), "is of type F64"),
        (
            "model.safetensors",
            header('{"a": {"dtype": "I64", "shape": [2, 2]}}'),
            "holds no weights, only integers",
        ),
        ("config.json", b'{"model_type": "lla', "is not a config"),
        ("config.json", b'{"model_type": "no such model"}', "is not a config"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}', "is not a config"),
        (
            "config.json",
            b'{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}',
            "is not a config",
        ),
    ],
)
def test_a_damaged_model_is_a_failure_and_no_wrong_command_line(
    name, content, sentence, tmp_path, capsys
):
    """The command line is right, whatever there is on the disk: status 1, with the file's name."""
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path), "--dram", "1GiB", *DISK]) == 1
    said = capsys.readouterr()
    assert (
        said.err.startswith("stoker plan: ")
        and str(tmp_path / name) in said.err
        and sentence in said.err
        and not said.out
    )


def test_buffers_of_integers_are_no_weights(tmp_path):
    """As encoders carry the numbers of their positions."""
    save_file(
        {
            "embeddings.weight": torch.zeros(64, 32),
            "embeddings.position_ids": torch.arange(64)[None],
            "mask": torch.ones(8, dtype=torch.bool),
        },
        tmp_path / "model.safetensors",
    )
    [block] = describe(str(tmp_path), "float32").blocks
    assert [(param.name, param.size) for param in block.params] == [("embeddings.weight", (64, 32))]


def test_each_byte_mode_is_planned_with_its_own_kernel(monkeypatch, capsys):
    words = ["layer=50M*4", "--dram", "4GiB", "--cores", "1", "--flops", "1T", *DISK]
    before = planned(capsys, *words)["byte_modes"]
    monkeypatch.setattr(
        cli, "kernel_seconds", lambda moments: {"bf16": 1e-9, "8bit": 1e-6}[moments]
    )
    after = planned(capsys, *words)["byte_modes"]
    assert after["exact"] == before["exact"] and after["bf16"] == before["bf16"]
    # 200 M elements, a microsecond each
    assert after["8bit"]["seconds"] > 200 > before["8bit"]["seconds"]


def test_all_ways_to_name_a_model_agree(tmp_path):
    """A config, a safetensors folder and counts come to the same blocks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "config"
    llama_config(folder, 256, 12, 512, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    stored = tmp_path / "stored"
    stored.mkdir()
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()},
        stored / "model.safetensors",
    )
    sizes = lambda described: [(block.name, block.slot_bytes) for block in described.blocks]
    by_config, by_files = describe(str(folder), "bfloat16"), describe(str(stored), "bfloat16")
    assert sizes(by_config) == sizes(by_files) and len(by_config.blocks) == 15
    assert [block.name for block in by_files.blocks][:3] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
    ]
    layer = 4 * 256 * 256 + 3 * 256 * 512 + 512
    by_counts = describe(
        f"embed={32000 * 256},layer={layer}*12,norm=256,head={32000 * 256}", "bfloat16"
    )
    assert [b.slot_bytes for b in by_counts.blocks] == pytest.approx(
        [b.slot_bytes for b in by_config.blocks], rel=0.01, abs=4096
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7GB/s", 7e9),
        ("20GiB", 20 * GIB),
        ("70T", 70e12),
        ("1.5 PB", 1.5e15),
        ("4096", 4096),
        ("2KiB", 2048),
    ],
)
def test_amounts(text, value):
    assert quantity(text) == value


def test_a_tie_total_time_and_activations(capsys):
    """What is asked for and what the cap does not hold; and the amounts as they were written."""
    plan = planned(capsys, "125M", "--dram", "2GiB", "--tokens", "1000", "--total", "2G", *DISK)
    assert plan["total_seconds"] == pytest.approx(2e6 * plan["step"]["seconds"])
    assert plan["dram"]["weights"] <= plan["classes"]["weights"]
    assert plan["dram"]["activations"] > 1000 * 2 * 10 * 12 * 768  # ten widths a layer, at least
    assert (
        plan["whole_in_memory"]
        == plan["state_bytes"] + plan["classes"]["gradients"] + plan["dram"]["activations"]
    )
    steps = {
        name: {"policy": name, "seconds": seconds}
        for name, seconds in (("sync", 0.99), ("speculate", 1.0), ("lazy", 1.5))
    }
    assert planner._choice(steps, True) == {
        "policy": "speculate",
        "reason": "1.00 s a step, against sync 0.99 s, lazy 1.50 s; a difference below 2% is none",
    }
    steps["sync"]["seconds"] = 0.9
    assert planner._choice(steps, True)["policy"] == "sync"


def test_a_model_that_fits_in_memory_is_told_so(capsys, monkeypatch):
    words = ["125M", "--dram", "1.5GiB", "--tokens", "500", *DISK]
    for memory, told in ((64 * GIB, True), (GIB, False)):
        monkeypatch.setattr(cli, "memory_bytes", lambda memory=memory: memory)
        assert main(words) == 0
        text = capsys.readouterr().out
        assert ("train without Stoker" in text) == told and "the memory cap of 1.5GiB" in text


@pytest.mark.parametrize("model, dram", [("70B", "64GiB")])
def test_a_plan_rehearses_few_steps_of_few_tiles(capsys, monkeypatch, model, dram):
    """So that it is there in seconds, whatever the model."""
    tiles, rehearsals, init, advance = [0], [0], CountedSession.__init__, CountedSession._advance
    monkeypatch.setattr(
        CountedSession,
        "_advance",
        lambda *args: tiles.__setitem__(0, tiles[0] + 1) or advance(*args),
    )
    monkeypatch.setattr(
        CountedSession,
        "__init__",
        lambda *args: rehearsals.__setitem__(0, rehearsals[0] + 1) or init(*args),
    )
    assert main([model, "--dram", dram, "--tokens", "4096", *DISK]) == 0
    assert rehearsals[0] <= 9 and tiles[0] <= rehearsals[0] * 8 * 2000


def test_changes_of_the_policy_are_told_once_each_and_summed_up():
    events, change = (
        PolicyEvents(),
        lambda policy: {
            "what": "policy",
            "policy": policy,
            "reason": "why",
        },
    )
    other = {"what": "lost", "problem": "a disk"}
    shown = [
        events.fewer([change(policy), other])
        for policy in ("lazy", "speculate", "lazy", "speculate", "lazy")
    ]
    assert shown == [
        [change("lazy"), other],
        [change("speculate"), other],
        [other],
        [other],
        [other],
    ]
    assert (
        events.summary()
        == "policy       changed 2 times to lazy, 1 times to speculate more (ledger.jsonl has when,"
        " and why)"
    )
    assert PolicyEvents().summary() == ""
