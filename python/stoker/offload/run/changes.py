"""Changes that the loop itself makes to parameters: a part of the step, or refused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker.errors import InvalidArgument
from stoker.offload.model.blocks import Param
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.shown import Shown
from stoker.offload.run.replacing import WeightWriting
from stoker.offload.steps.steps import Steps


class Changes:
    """Those of one session. Called under its lock by the thread that runs the loop."""

    def __init__(
        self,
        params: list[Param],
        pager: Pager,
        shown: Shown,
        steps: Steps,
        writing: Callable[..., WeightWriting],
        flush: Callable[[], None],
    ) -> None:
        """`writing` begins to replace weights, in a transaction if one is given; `flush` makes the
        decided step durable."""
        self._pager, self._shown, self._steps = pager, shown, steps
        self._writing, self._flush = writing, flush
        self._requires_grad = {param: param.tensor.requires_grad for param in params}

    def check_in_place(self) -> None:
        if (param := self._pager.changed()) is not None:
            self._refuse(param)

    def check(self, grad: bool) -> None:
        """A root call of the model begins; `grad`: it records gradients."""
        self.check_in_place()
        self._shown.check_given()
        for param, was in self._requires_grad.items():
            if param.tensor.dtype != param.unit.dtype:
                raise InvalidArgument(
                    f"{param.name} was converted to {param.tensor.dtype} after stoker.offload(),"
                    " which changes nothing in the store; convert the model first, then offload it"
                )
            # without gradients nobody asks: adapters are switched off and on that way
            if grad and param.tensor.requires_grad != was:
                raise InvalidArgument(
                    f"requires_grad of {param.name} changed from {was} to {not was} after"
                    " stoker.offload(); freeze or unfreeze parameters before offloading"
                )

    def _refuse(self, param: Param) -> None:
        self._steps.abandon()  # what was speculated may have consumed the change
        advice = (
            "make it before stoker.offload()"
            if self._pager.resident
            else (
                "make it between opt.step() and the next forward, or inside `with"
                " stoker.gather(parameter, write=True):`"
            )
        )
        raise InvalidArgument(
            f"{param.name} was changed in place. The store did not see the change, so it was "
            f"dropped; {advice}"
        )

    def dropped(self, param: Param) -> None:
        """The parameter was changed where the change reaches no weight: InvalidArgument."""
        self._pager.drop_change(param)
        self._refuse(param)

    def edit(self, values: dict[Param, torch.Tensor]) -> None:
        """The loop gave these weights: a part of the decided step, if its record is still to be
        made; else a commit of their own."""
        steps = self._steps
        if steps.decided is None or steps.late.records is not None:
            steps.abandon()  # what was speculated consumed the old weights
            self._flush()
            writing = self._writing()
            writing.stage(values)
            writing.commit()
        else:
            units = {param.unit for param in values}
            try:
                steps.wait_written(units)
                writing = self._writing(steps.decided)
                writing.stage(values)
            except BaseException:
                steps.lose()
                raise
            steps.edit(units)
            writing.forget_state()
        for param, value in values.items():
            self._pager.rewrite(param, value)
