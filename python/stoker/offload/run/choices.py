"""What a user chose for a session."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import InvalidArgument
from stoker.offload.activations.activations import MODES
from stoker.offload.activations.forms import FORMS
from stoker.offload.gradients.finiteness import MODES as ON_NAN
from stoker.offload.paging.link import Link
from stoker.offload.ranks.agreement import Agreement

POLICIES = ("auto", "sync", "speculate", "lazy")


@dataclass(frozen=True)
class Choices:
    """What the caller of stoker.offload() chose, beyond model, optimizer and store. InvalidArgument
    for what is no choice."""

    policy: str
    accumulate: int | None = None  # backwards a step, if known
    snapshots: int = 0  # how many earlier steps may be kept
    # the way to the device on which the model computes, if that is not the CPU
    link: Link | None = None
    device_memory: int | None = None  # cap on weights there, bytes
    activations: str = "keep"  # where what autograd saves goes (activations.py)
    activations_form: str = "exact"  # and how (forms.py)
    agreement: Agreement | None = None  # with the other processes that have shards of the model
    on_nan: str = "warn"  # or "raise": what becomes of a step whose gradients are not finite

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidArgument(f"policy {self.policy!r} is not one of {', '.join(POLICIES)}")
        if self.on_nan not in ON_NAN:
            raise InvalidArgument(f"on_nan {self.on_nan!r} is not one of {', '.join(ON_NAN)}")
        if self.activations not in MODES:
            raise InvalidArgument(
                f"activations {self.activations!r} is not one of {', '.join(MODES)}"
            )
        if self.activations_form not in FORMS:
            raise InvalidArgument(
                f"activations_form {self.activations_form!r} is not one of {', '.join(FORMS)}"
            )
        if self.activations_form != "exact" and self.activations in ("keep", "recompute"):
            raise InvalidArgument(
                f"activations_form={self.activations_form!r} says how to store activations, but "
                f"activations={self.activations!r} stores none; choose disk, dram or auto"
            )
        if self.device_memory is not None and self.link is None:
            raise InvalidArgument(
                "device_memory= caps the weights on an accelerator, but this model computes on "
                "the CPU. Leave it out: dram= is the cap here"
            )
