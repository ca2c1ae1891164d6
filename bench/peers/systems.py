"""What is compared: sizes of the model, amounts of compute a step, and the systems with their
settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A bf16 decoder (stoker.bench.model). `dram`: our budget, at most a third of what the peer's
    tuned setting holds resident."""

    layers: int
    width: int
    vocabulary: int
    dram: int

    @property
    def parameters(self) -> int:
        return (
            self.layers * (12 * self.width**2 + 13 * self.width)
            + 2 * self.width
            + 2 * self.width * self.vocabulary
        )


MIB = 1 << 20
SIZES = {
    "tiny": Size(2, 128, 1024, 64 * MIB),
    "60M": Size(10, 640, 8192, 280 * MIB),
    "220M": Size(16, 1024, 8192, 1200 * MIB),
}
# tokens a step: the disk decides; the disk and the processors take about as long as each other
COMPUTE = {"io": 64, "balanced": 512}

# What every optimizer is given: the defaults of torch's AdamW but for the rate.
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 0.5  # fires in every step of these models


@dataclass(frozen=True)
class System:
    """`kind`: the module NAME_system.py that runs it. `beside`: the system whose losses are its
    un-offloaded ones."""

    kind: str
    says: str
    settings: dict[str, Any] = field(default_factory=dict)
    beside: str = ""

    @property
    def memory_of(self) -> str:
        """The system whose peak memory is this one's budget; "" for none."""
        return self.settings.get("memory_of", "")


def ours(says: str, **settings: Any) -> System:
    return System("stoker", says, {"moments": "exact", **settings}, "control")


SYSTEMS = {
    "deepspeed-tuned": System(
        "deepspeed",
        "ZeRO-3, parameters and optimizer on NVMe, tuned",
        {"offload": "nvme", "tuned": True},
        "deepspeed-none",
    ),
    "deepspeed-default": System(
        "deepspeed",
        "the same, default settings",
        {"offload": "nvme", "tuned": False},
        "deepspeed-none",
    ),
    "deepspeed-cpu": System(
        "deepspeed",
        "ZeRO-3, parameters and optimizer in CPU memory",
        {"offload": "cpu", "tuned": False},
        "deepspeed-none",
    ),
    "stoker-sync": ours("exact, sync", policy="sync"),
    "stoker-speculate": ours("exact, speculate", policy="speculate"),
    "stoker-lazy": ours("exact, lazy", policy="lazy"),
    "stoker-bf16": ours("bf16 moments, speculate", policy="speculate", moments="bf16"),
    "stoker-equal": ours(
        "exact, speculate, the memory of deepspeed-tuned",
        policy="speculate",
        memory_of="deepspeed-tuned",
    ),
    "stoker-equal-cpu": ours(
        "exact, speculate, the memory of deepspeed-cpu",
        policy="speculate",
        memory_of="deepspeed-cpu",
    ),
    "deepspeed-none": System(
        "deepspeed", "ZeRO-3, no offload", {"offload": "none", "tuned": False}
    ),
    "torch": System(
        "torch", "float32 masters, fused AdamW, no offload", {"masters": True, "rounding": "torch"}
    ),
    "torch-bf16": System(
        "torch", "bf16 throughout, fused AdamW, no offload", {"masters": False, "rounding": "torch"}
    ),
    "control": System(
        "torch",
        "as torch, weights rounded as ours (halfway toward zero), for the losses",
        {"masters": True, "rounding": "planes"},
    ),
}
# Python, torch and the activations of one of our processes, with something to spare
MEMORY_BESIDE_DRAM = 448 * MIB


def configuration(settings: dict[str, Any], sizes: list[int], folder: str) -> dict[str, Any]:
    """What DeepSpeed is given for a model with parameters of these sizes.

    `offload_param: nvme` moves nothing at these sizes unless max_in_cpu is 0, and that needs
    buffers for the largest parameter and limits on what stays gathered. Left alone, sub_group_size
    makes one group, so that nothing can be pipelined: "tuned" makes nine.
    """
    zero: dict[str, Any] = {"stage": 3}
    result = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "steps_per_print": 1 << 30,
        "zero_optimization": zero,
    }
    largest = max(sizes)
    if settings["offload"] == "cpu":
        zero.update(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    if settings["offload"] == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": folder,
            "max_in_cpu": 0,
            "buffer_count": 16,
            "buffer_size": int(1.2 * largest),
        }
        zero.update(
            stage3_max_live_parameters=int(2.4 * largest),
            stage3_max_reuse_distance=0,
            stage3_prefetch_bucket_size=int(0.95 * largest),
        )
    if settings["tuned"]:
        zero["sub_group_size"] = max(sum(sizes) // 9, largest)
        zero["offload_optimizer"].update(pipeline_read=True, pipeline_write=True, buffer_count=16)
        result["aio"] = {
            "block_size": MIB,
            "queue_depth": 32,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        }
    return result


# Loading and storing tensors: one of each of these sizes, and many of mixed size.
TENSOR_BYTES = {"1 MiB": MIB, "16 MiB": 16 * MIB, "256 MiB": 256 * MIB, "1 GiB": 1024 * MIB}
MANY_BYTES = 1024 * MIB
MANY = "many"
TENSOR_SYSTEMS = {
    "stoker": {},
    "deepnvme-default": {
        "block_size": MIB,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
    },
    "deepnvme-tuned": {
        "block_size": MIB,
        "queue_depth": 32,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 2,
    },
    "deepnvme-8MiB": {
        "block_size": 8 * MIB,
        "queue_depth": 32,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 2,
    },
}
