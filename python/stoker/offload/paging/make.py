"""make_pager: the pager for the place where the model computes."""

from __future__ import annotations

from stoker.offload.model.blocks import Block
from stoker.offload.observe.context import Context
from stoker.offload.paging.device_pager import DevicePager
from stoker.offload.paging.link import Link
from stoker.offload.paging.pager import Pager
from stoker.offload.paging.shard_pager import ShardPager
from stoker.offload.paging.shown import Shown
from stoker.offload.storage.planes import Planes


def make_pager(
    blocks: list[Block],
    planes: Planes,
    context: Context,
    shown: Shown,
    link: Link | None,
    device_memory: int | None,
    sharded: list | None,
) -> Pager:
    """`link`: to the device that computes, None for the CPU. `sharded`: the modules that gather a
    sharded model's weights, None for any other model."""
    if link is None:
        return Pager(blocks, planes, context, shown)
    if sharded is None:
        return DevicePager(blocks, planes, context, shown, link, device_memory)
    # sharded weights stay where torch has them, so nobody looks at copies
    return ShardPager(blocks, planes, context, link, sharded)
