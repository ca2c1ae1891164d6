"""load_state_dict() of an offloaded model."""

from __future__ import annotations

import torch
from torch import nn

from stoker.errors import InvalidArgument
from stoker.offload.model.blocks import Param
from stoker.offload.paging.pager import Pager
from stoker.offload.run.replacing import Replacing, WeightWriting
from stoker.offload.run.weights import Weights


def check_assign(metadata: dict) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise InvalidArgument(
            "load_state_dict(assign=True) would take the parameters away from the optimizer and the"
            " store; leave assign off"
        )


class Loading:
    """load_state_dict() as one commit: each module's weights are staged when it has taken them, and
    leave memory again.

    torch tells nobody when a call as a whole begins or ends. But all modules of one call see the
    same list of missing keys, and the first that begins is the last that ends. A call that broke
    off in the middle is given up when anything else begins.
    """

    def __init__(
        self,
        by_tensor: dict[torch.Tensor, Param],
        pager: Pager,
        weights: Weights,
        replacing: Replacing,
    ) -> None:
        self._by_tensor, self._pager = by_tensor, pager
        self._weights, self._replacing = weights, replacing
        self._call: list | None = None  # the missing keys of the call under way
        self._first: nn.Module | None = None
        self._writing: WeightWriting | None = None
        self._paged: set = set()  # parameters that hold their weights for it

    def give_up(self) -> None:
        """Forgets the call under way, if there is one: the store keeps the weights it had."""
        if self._call is not None:
            self._call = self._first = self._writing = None
            self._weights.restore([*self._paged])
            self._paged.clear()

    def enter(
        self,
        module: nn.Module,
        state: dict,
        prefix: str,
        metadata: dict,
        _strict: bool,
        missing: list,
        *_others,
    ) -> None:
        check_assign(metadata)
        if missing is not self._call:
            self.give_up()
            self._writing = self._replacing.writing_weights()
            self._call, self._first = missing, module
        for name, tensor in module._parameters.items():
            param = self._by_tensor.get(tensor)
            if param is None or param in self._pager.held:
                continue
            if (
                prefix + name in state
                or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
            ):
                self._pager.hold(param, self._weights.current(param).to(self._pager.device))
                self._paged.add(param)

    def leave(self, module: nn.Module, keys) -> None:
        if keys.missing_keys is not self._call:
            return
        try:
            ours = [
                self._by_tensor[param]
                for param in module._parameters.values()
                if self._by_tensor.get(param) in self._pager.held
            ]
            self._writing.stage({param: param.tensor.data for param in ours})
            self._weights.restore([param for param in ours if param in self._paged])
            self._paged.difference_update(ours)
            if module is self._first:
                self._writing.commit()
                self.give_up()
        except BaseException:
            self.give_up()
            raise
