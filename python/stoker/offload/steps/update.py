"""The update of one segment, on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.offload.gradients.segment import Segment
from stoker.offload.model.blocks import Unit
from stoker.offload.paging.slot import Slot


@dataclass(eq=False)
class Update:
    """A unit's update under way. Holds the memory that C++ reads and writes until `job` is done
    with it."""

    unit: Unit
    segments: list[Segment]
    job: Any
    weights: Slot | None  # the old weights it reads
    staged: Slot | None  # where the new ones go
    # that tell these gradients' bytes from others (Gradients.mark)
    marks: list = field(default_factory=list)
    computed: bool = False

    def wait_computed(self) -> None:
        if not self.computed:
            self.job.wait()
            self.computed = True
            self.weights = None
