"""Plans as text: what lives where, what a step moves, how long it takes; and a plan beside what was
measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..offload.division.machine import CAUSES, Machine
from ..train.settings import human_bytes

# the shares of the cap in a plan's "dram"
IN_MEMORY = ("gradients", "pinned", "tiles", "state", "weights")
WAITING = {
    "weights": "weights",
    "state": "state",
    "gradients": "gradients",
    "writing": "writing behind",
    "commit": "commit",
    # what the training thread waits for
    "checkpoint": "checkpoint",
    "data": "data",
    "activations": "activations",
}


def plan_text(plan: dict[str, Any], dram: str, store: str) -> str:
    """`plan` as opt.plan() gives it; `dram` as it was written."""
    parameters, state = plan["parameters"], plan["state_bytes"]
    stays = {k: v for k, v in plan["classes"].items() if k != "gradients"}
    lines = [
        (
            f"model        {parameters / 1e6:.1f} M parameters, states {human_bytes(state)}"
            f" ({state / parameters:.1f} B a parameter) = {state / plan['dram']['cap']:.1f} x the"
            f" memory cap of {dram}"
        ),
        f"on disk      {classes_text(stays)}{', in ' if store else ''}{store}",
        f"in memory    {classes_text({k: plan['dram'][k] for k in IN_MEMORY})}{_pages(plan)}",
        *moves(plan["step"], parameters),
    ]
    if activations := plan.get("activations"):
        lines.append(f"activations  {_activations(activations)}")
    if spilled := plan.get("spilled_gradients"):
        lines.insert(
            3, f"spilled      gradients of {human_bytes(spilled['bytes'])}: {spilled['reason']}"
        )
    if "seconds" in plan["step"]:
        lines.append(
            f"takes        {seconds_text(plan['step'])}, policy {plan['policy']} ({plan['reason']})"
        )
    return "\n".join(lines)


def moves(row: dict[str, Any], parameters: int) -> list[str]:
    """What a step of this row reads and writes, as lines."""
    lines = []
    for way, label in (("read_bytes", "a step reads "), ("written_bytes", "  and writes ")):
        total = sum(row[way].values())
        lines.append(
            f"{label}{human_bytes(total)} ({total / parameters:.1f} B a parameter):"
            f" {classes_text(row[way])}"
        )
    return lines


def rates_text(machine: Machine) -> str:
    both = f", {machine.mixed / 1e9:.2f} both" if machine.mixed else ""
    share = f", {machine.share:.0%} of it beside updates" if machine.share < 1 else ""
    return (
        f"disk {machine.read / 1e9:.2f} GB/s reading, {machine.write / 1e9:.2f}"
        f" writing{both}{share};"
        f" {machine.cores} cores, {1e9 * machine.update_seconds:.2f} ns an update, checksums"
        f" {1e-9 / max(machine.byte_seconds, 1e-15):.1f} GB/s, each a core"
    )


def seconds_text(row: dict[str, Any]) -> str:
    waits = [
        f"{WAITING[cause]} {row['stall_seconds'].get(cause, 0.0):.3g} s"
        for cause in CAUSES
        if row["stall_seconds"].get(cause, 0.0) >= 0.001
    ]
    return f"{row['seconds']:.3g} s a step: {row['compute_seconds']:.3g} s computing" + (
        f", waiting for {', '.join(waits)}" if waits else ""
    )


def comparison_text(compared: dict[str, dict[str, Any]]) -> str:
    """planner.compare() as a table."""
    lines = ["             planned   measured"]
    for name, item in compared.items():
        show = (
            (lambda value: f"{value:9.3f} s")
            if not name.endswith("bytes")
            else (lambda value: human_bytes(value).rjust(11))
        )
        planned = show(item["planned"]) if item["planned"] is not None else "          –"
        if item["measured"] or item["planned"]:
            miss = (
                f"  {item['miss']:+.0%}"
                if item["miss"] is not None and name in ("seconds", "read_bytes", "written_bytes")
                else ""
            )
            lines.append(f"{_LABELS.get(name, name):11}{planned}{show(item['measured'])}{miss}")
    return "\n".join(lines)


_LABELS = {
    "seconds": "a step",
    "compute_seconds": "computing",
    "read_bytes": "read",
    "written_bytes": "written",
    **{cause: f"  {cause}" for cause in CAUSES},
}


def _activations(told: dict[str, Any]) -> str:
    again = f"{told['again']} layers are computed again in backward" if told["again"] else ""
    if told["mode"] == "recompute":
        return again or "nothing is computed again: no layer repeats"
    kept = {
        "disk": "to the disk",
        "dram": "to memory of the cap, and beyond that to the disk",
        "auto": "to the disk for two steps; then each layer's are chosen by what was measured",
    }
    return "; ".join(
        filter(
            None,
            (
                kept[told["mode"]] if not told["choices"] else "as chosen by what was measured",
                again,
            ),
        )
    )


def event_text(events: list[dict[str, Any]]) -> list[str]:
    """The events of a ledger row, a line for each that a user should read; layers' choices as
    one."""
    lines = []
    chosen = [each for each in events if each["what"] == "activations" and "choice" in each]
    if chosen:
        again = [each for each in chosen if each["choice"] == "recompute"]
        first = (again or chosen)[0]
        lines.append(
            f"activations  {len(again)} of {len(chosen)} layers are computed again from here on,"
            f" the others go to the disk; {first['block']}: {first['reason']}"
        )
    for each in events:
        if each["what"] == "policy":
            lines.append(f"policy       {each['policy']} from here on: {each['reason']}")
        elif each["what"] == "volumes":
            lines.append(f"volumes      {each['reason']}")
        elif each["what"] == "gradient outside dram":
            lines.append(
                f"gradients    that of {each['parameter']} ({human_bytes(each['bytes'])}), and"
                " others like it, lie in memory that dram does not count: an earlier one is kept"
                " alive"
            )
        elif "problem" in each:
            lines.append(f"{each['what']:<13}{each['problem']}")
    return lines


class PolicyEvents:
    """Changes of the policy: nobody can act on them, and a loop that clips has many. The first of
    each policy is told when it comes."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._more: Counter[str] = Counter()

    def fewer(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The events of a row without those that are summed up."""
        kept = []
        for each in events:
            if each["what"] == "policy" and each["policy"] in self._told:
                self._more[each["policy"]] += 1
                continue
            if each["what"] == "policy":
                self._told.add(each["policy"])
            kept.append(each)
        return kept

    def summary(self) -> str:
        """What was left out, as a line; empty if nothing was."""
        if not self._more:
            return ""
        changes = ", ".join(f"{count} times to {policy}" for policy, count in self._more.items())
        return f"policy       changed {changes} more (ledger.jsonl has when, and why)"


def _pages(plan: dict[str, Any]) -> str:
    pages = plan["dram"].get("pages")
    return (
        f", pages {pages['kind']} ({human_bytes(pages['large_bytes'])} of"
        f" {human_bytes(pages['total_bytes'])} in large pages)"
        if pages
        else ""
    )


def classes_text(amounts: dict[str, Any]) -> str:
    shown = [
        f"{name.replace('_', ' ')} {human_bytes(value)}" for name, value in amounts.items() if value
    ]
    return ", ".join(shown) or "nothing"
