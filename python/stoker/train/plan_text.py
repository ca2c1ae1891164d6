"""The plan as a text: what lives where, and what a step will move."""

from __future__ import annotations

from typing import Any

from .settings import human_bytes

IN_MEMORY = ("gradients", "pinned", "tiles", "weights")  # the shares of the cap in opt.plan()["dram"]


def plan_text(plan: dict[str, Any], dram_bytes: int, store: str, tokens_a_step: int, steps: int) -> str:
    """`plan` as opt.plan() gives it, printed before the first step."""
    parameters, state = plan["parameters"], plan["state_bytes"]
    lines = [
        f"model        {parameters / 1e6:.1f} M parameters, states {human_bytes(state)} "
        f"({state / parameters:.1f} B a parameter) = {state / dram_bytes:.1f} x the memory cap of {human_bytes(dram_bytes)}",
        f"on disk      {_classes({k: v for k, v in plan['classes'].items() if k != 'gradients'})}, in {store}",
        f"in memory    {_classes({k: v for k, v in plan['dram'].items() if k in IN_MEMORY})}, pages {_pages(plan)}",
        f"a step       {tokens_a_step} tokens, {steps} steps in all",
    ]
    predicted = plan["predicted_bytes_per_step"]
    for way, label in (("read", "  reads      "), ("written", "  writes     ")):
        total = sum(predicted[way].values())
        lines.append(f"{label}{human_bytes(total)} ({total / parameters:.1f} B a parameter): {_classes(predicted[way])}")
    return "\n".join(lines)


def _pages(plan: dict[str, Any]) -> str:
    pages = plan["dram"]["pages"]
    return f"{pages['kind']} ({human_bytes(pages['large_bytes'])} of {human_bytes(pages['total_bytes'])} in large pages)"


def _classes(amounts: dict[str, Any]) -> str:
    shown = [f"{name.replace('_', ' ')} {human_bytes(value)}" for name, value in amounts.items()
             if isinstance(value, (int, float)) and value]
    return ", ".join(shown) or "nothing"
