"""Ours: a model that lies in a store, under a memory budget."""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch

import stoker
from systems import ADAMW


class StokerSystem:
    def __init__(self, make, settings: dict[str, Any], directory: str) -> None:
        store = os.path.join(directory, "store")
        model = stoker.build(make, seed=0, store=store, dram=settings["dram"])
        opt = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.model, self.opt = stoker.offload(
            model,
            opt,
            store=store,
            dram=settings["dram"],
            policy=settings["policy"],
            moments=settings["moments"],
        )
        self.limit = 0.0
        self.rows: list[dict[str, Any]] = []

    def clip(self, limit: float) -> None:
        """Clips the gradients of each step from here on, by torch's own function."""
        self.limit = limit

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.limit:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.opt.step()
        self.opt.zero_grad()
        self.rows.append(self.opt.ledger.last)

    def finish(self) -> dict[str, Any]:
        self.opt.close()
        stalls = {
            cause: statistics.median(row["stall_seconds"][cause] for row in self.rows)
            for cause in self.rows[0]["stall_seconds"]
        }
        return {"stall_seconds": stalls, "stoker": stoker.__version__}
