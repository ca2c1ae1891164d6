"""On a real GPU: the same bits as the same kernels without offload, whatever the policy; saved and
restored; batches in pinned memory. Skipped where torch finds no GPU (test_offload_device.py and
test_slots.py have stand-ins)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from models import Tiny, batch, loss_of
from stoker.data import Loader, Rows
from test_checkpoint import assert_same, checkpoints, copied
from test_loader import npy, put
from test_offload_equality import (
    CASES,
    SMALL,
    control,
    make,
    no_clip,
    offloaded,
    poison,
    same,
    torch_clip,
    train,
)  # noqa: F401

HERE = Path(__file__).parent
STEPS = 12
DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """What tests make lies on the GPU, and torch's own kernels give the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device(DEVICE)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", ["sync", "speculate", "auto", "lazy"])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal(tmp_path, case, policy):
    seen, state, plain = control(steps=STEPS, **CASES[case])
    assert all(param.is_cuda for param in plain.parameters())
    ours, model, opt = offloaded(f"{tmp_path}/s", policy, steps=STEPS, **CASES[case])
    assert ours == seen
    same(model, opt, state, "sgd" if case == "sgd" else "adamw")
    opt.close()


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_lossy_moments(tmp_path, moments):
    how = dict(dtype=torch.bfloat16, clip=torch_clip, steps=STEPS, moments=moments)
    seen, state, _ = control(**how)
    ours, model, opt = offloaded(f"{tmp_path}/s", "speculate", **how)
    assert ours == seen
    same(model, opt, state)
    opt.close()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments(tmp_path, reentrant):
    how = dict(dtype=torch.bfloat16, clip=no_clip, segments=2, reentrant=reentrant, steps=STEPS)
    seen, state, _ = control(**how)
    ours, model, opt = offloaded(f"{tmp_path}/s", "speculate", **how)
    assert ours == seen
    same(model, opt, state)
    opt.close()


def large() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """25 MiB of weights: copies take long enough to run beside others."""
    return make(torch.bfloat16, width=512, layers=4)


def losses(model, opt, steps) -> list[float]:
    seen = []
    for step in steps:
        loss = loss_of(model, batch(step, size=16))
        loss.backward()
        seen.append(loss.item())
        opt.step()
        opt.zero_grad()
    return seen


@pytest.mark.parametrize("device_memory", [None, "14MiB", "1GiB"])
def test_policies_and_caps_give_the_same_bits(tmp_path, device_memory):
    seen = []
    for policy in ("sync", "speculate", "lazy"):
        model, opt = stoker.offload(
            *large(),
            store=f"{tmp_path}/{policy}",
            dram="160MiB",
            policy=policy,
            device_memory=device_memory,
        )
        seen.append(losses(model, opt, range(STEPS)))
        opt.close()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    ("activations", "form"),
    [
        ("disk", "exact"),
        ("disk", "sparse"),
        ("dram", "exact"),
        ("dram", "sparse"),
        ("recompute", "exact"),
        ("auto", "exact"),
    ],
)
def test_activations(tmp_path, monkeypatch, activations, form):
    monkeypatch.setattr(sys.modules["stoker.offload.activations.activations"], "LEAST_BYTES", 1024)
    seen = {}
    for mode, how in (("keep", "exact"), (activations, form)):
        model, opt = stoker.offload(
            *large(),
            store=f"{tmp_path}/{mode}",
            dram="192MiB",
            activations=mode,
            activations_form=how,
        )
        seen[mode] = losses(model, opt, range(6))
        if mode in ("disk", "dram"):
            assert sum(opt._session.activations.saved_bytes.values()) > 0
        opt.close()
    assert seen[activations] == seen["keep"]


def test_a_model_that_was_made_on_the_cpu_moves(tmp_path):
    torch.set_default_device("cpu")
    model, original = make(torch.bfloat16)
    model, opt = stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL, device="cuda")
    torch.set_default_device(DEVICE)
    seen = losses(model, opt, range(4))
    assert model.seen.is_cuda and all(param.is_cuda for param in model.parameters())
    opt.close()
    model, opt = stoker.offload(*make(torch.bfloat16), store=f"{tmp_path}/t", dram=SMALL)
    assert losses(model, opt, range(4))[0] == pytest.approx(seen[0], rel=0.02)  # other draws
    opt.close()


def test_memory_of_the_gpu_stays_under_what_was_asked(tmp_path):
    torch.ones(8, 8) @ torch.ones(8, 8)  # for its first product cuBLAS takes 32 MiB of its own
    gc.collect()
    torch.cuda.empty_cache()
    model, original = make(torch.bfloat16, width=1024, layers=12)
    weights = sum(param.nbytes for param in model.parameters())
    model, opt = stoker.offload(
        model, original, store=f"{tmp_path}/s", dram="1GiB", device_memory="80MiB"
    )
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    assert before < weights / 4
    torch.cuda.reset_peak_memory_stats()
    model.eval()
    with torch.no_grad():
        for step in range(3):
            loss_of(model, batch(step))
    # what the model computes is small here
    assert torch.cuda.max_memory_allocated() - before < (80 << 20) + (8 << 20) < weights
    opt.close()


def test_another_stream_computes(tmp_path):
    seen = {}
    for name in ("default", "own"):
        model, opt = stoker.offload(*large(), store=f"{tmp_path}/{name}", dram="160MiB")
        stream = torch.cuda.Stream() if name == "own" else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            seen[name] = losses(model, opt, range(6))
        opt.close()
    assert seen["own"] == seen["default"]


def test_a_scaler_of_float16(tmp_path):
    seen, weights = [], []
    for offload in (False, True):
        model, original = make(torch.float32)
        if offload:
            model, opt = stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL)
        else:
            import reference

            opt = reference.ReferenceOptimizer(original)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=4)
        mine = []
        for step in range(STEPS):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(model, batch(step))
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            mine.append((loss.item(), scaler.get_scale()))
        seen.append(mine)
        weights.append(copied(model))
        if offload:
            opt.close()
    assert seen[0] == seen[1]
    assert min(scale for _, scale in seen[0]) < 2.0**24  # steps were skipped
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name].to(value.device)), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_transformers(tmp_path, kind, dtype):
    transformers = pytest.importorskip("transformers")
    import reference

    def made():
        torch.manual_seed(0)
        if kind == "gpt2":
            shape = dict(n_embd=96, n_layer=3, n_head=4, vocab_size=96, n_positions=64)
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
        else:
            shape = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=3)
            heads = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=96)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
        model.to(dtype).train()
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)

    def run(model, opt):
        seen = []
        for step in range(STEPS):
            torch.manual_seed(step)  # dropout
            tokens = batch(step)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch_clip(model, opt)
            opt.step()
            opt.zero_grad()
            seen.append(loss.item())
        model.eval()
        said = model.generate(batch(0)[:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
        return seen, said.tolist()

    plain, original = made()
    expected = run(plain, reference.ReferenceOptimizer(original))
    model, opt = stoker.offload(*made(), store=f"{tmp_path}/s", dram="24MiB")
    assert run(model, opt) == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value.to(DEVICE), plain.state_dict()[name]), name
    opt.close()


def test_compiled_layers(tmp_path):
    seen = {}
    for place in ("plain", "offloaded"):
        import reference

        model, original = make(torch.float32, layers=3)
        for layer in model.layers:
            layer.compile()
        if place == "plain":
            opt = reference.ReferenceOptimizer(original)
        else:
            model, opt = stoker.offload(model, original, store=f"{tmp_path}/s", dram=SMALL)
        seen[place] = losses(model, opt, range(4))
        if place == "offloaded":
            opt.close()
    assert seen["offloaded"] == seen["plain"]


# -- saved and restored ----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_in_memory_is_saved_and_restored(tmp_path, fused):
    def made():
        torch.manual_seed(0)
        model = Tiny(width=256)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)

    model, opt = made()
    losses(model, opt, range(3))
    with checkpoints(f"dir:{tmp_path}/c") as ckpt:
        ckpt.save(3, model=model, optimizer=opt)
        whole = losses(model, opt, range(3, 8))  # while it is written
        other, other_opt = made()
        assert ckpt.restore(model=other, optimizer=other_opt).step == 3
    assert all(param.is_cuda for param in other.parameters())
    assert losses(other, other_opt, range(3, 8)) == whole
    assert_same(other, copied(model))


def test_an_offloaded_run_is_saved_and_goes_on_elsewhere(tmp_path):
    with checkpoints(f"dir:{tmp_path}/c") as ckpt:
        model, opt = stoker.offload(
            *large(), store=f"{tmp_path}/a", dram="160MiB", checkpoints=ckpt
        )
        losses(model, opt, range(3))
        handle = ckpt.save(3, model=model, optimizer=opt)
        whole = losses(model, opt, range(3, 8))
        handle.wait(f"dir:{tmp_path}/c")
        opt.close()
    with checkpoints(f"dir:{tmp_path}/c") as ckpt:
        model, opt = stoker.offload(*large(), store=f"{tmp_path}/b", dram="160MiB", restore=ckpt)
        assert opt.step_count == 3
        assert losses(model, opt, range(3, 8)) == whole
        opt.close()


@pytest.mark.parametrize("policy", ["sync", "speculate"])
def test_a_model_of_fsdp2_with_nccl(tmp_path, policy):
    """One rank, as there is one GPU."""

    def run(how):
        command = [sys.executable, HERE / "gpu_run.py", "fsdp", str(tmp_path / how), how]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    expected = run("plain")
    assert len(expected.splitlines()) == 12
    assert run(policy) == expected


def test_a_killed_run_goes_on(tmp_path):
    def run(store, until=None):
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        process = subprocess.Popen(
            [sys.executable, HERE / "gpu_run.py", "killed", str(store), "12"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        lines = []
        for line in process.stdout:
            lines.append(line.split())
            if until is not None and lines[-1][:2] == ["step", str(until)]:
                process.send_signal(signal.SIGKILL)
        return process.wait(), lines

    status, whole = run(tmp_path / "whole")
    assert status == 0
    assert run(tmp_path / "killed", until=5)[0] == -signal.SIGKILL
    status, rest = run(tmp_path / "killed")
    assert status == 0 and 4 <= int(rest[0][1]) <= 6
    assert rest[-1] == whole[-1]  # the digest
    expected = {line[1]: line[2] for line in whole if line[0] == "step"}
    assert all(expected[line[1]] == line[2] for line in rest if line[0] == "step")


# -- data ------------------------------------------------------------------------------------------


def test_batches_go_to_the_gpu_from_pinned_memory(tmp_path):
    values = np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)
    with stoker.open_store(f"dir:{tmp_path}/data", create=True, dram="128MiB") as store:
        put(store, "r.npy", npy(values))
        loader = Loader(Rows(store, "r.npy"), batch=64, shuffle=False, pin=True)
        there, pinned = [], 0
        for rows in loader:
            assert not rows.is_cuda
            pinned += rows.is_pinned()  # not where the copies of earlier ones are late
            there.append(rows.to("cuda", non_blocking=True))
            del rows  # its memory may be used again once the copy is over, and not before
        assert len(there) == 64 and pinned >= 7
        assert torch.equal(torch.cat(there).cpu(), torch.from_numpy(values))
        loader.close()
        del loader
        gc.collect()
