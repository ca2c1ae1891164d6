"""From finished blocks to the result: rows, ratios beside the goals, the check of its form, the
table and the page for docs/numbers.md."""

from __future__ import annotations

import statistics
from typing import Any

from systems import COMPUTE, MANY, MIB, SIZES, SYSTEMS, TENSOR_BYTES, TENSOR_SYSTEMS

GIB = 1 << 30
median = statistics.median
EXACT = ["stoker-sync", "stoker-speculate", "stoker-lazy"]
DEEPNVME = [name for name in TENSOR_SYSTEMS if name != "stoker"]

# -- rows ------------------------------------------------------------------------------------------


def document(blocks: list[dict[str, Any]], machine: dict[str, Any]) -> dict[str, Any]:
    """The whole result. `blocks`: what compare.py keeps of every block, probe and calibration."""
    offload = [block for block in blocks if block["part"] == "offload" and "error" not in block]
    tensors = [block for block in blocks if block["part"] == "tensors" and "error" not in block]
    fio = [block for block in blocks if block["part"] == "fio"]
    settings = sorted(
        {(block["size"], block["compute"]) for block in offload},
        key=lambda at: (list(SIZES).index(at[0]), list(COMPUTE).index(at[1])),
    )
    costs = next((block for block in blocks if block["part"] == "kernels"), None)
    compute = {
        (block["size"], block["compute"]): block["core_seconds"]
        for block in blocks
        if block["part"] == "plain"
    }
    rows = [
        row(
            system,
            [
                block
                for block in offload
                if (block["system"], block["size"], block["compute"]) == (system, *at)
            ],
            costs,
            compute.get(at),
        )
        for at in settings
        for system in SYSTEMS
        if any(
            (block["system"], block["size"], block["compute"]) == (system, *at) for block in offload
        )
    ]
    compare_losses(rows)
    versions = {
        name: block[name]
        for block in offload + tensors
        for name in ("torch", "deepspeed", "stoker")
        if name in block
    }
    probes = [block["disk"][side] for block in offload for side in ("before", "after")]
    result = {
        "machine": machine,
        "versions": versions,
        "disk_ceiling": {
            **{
                f"{kind}_gbps": median(probe[kind] for probe in probes) / 1e9
                for kind in ("read", "write")
                if probes
            },
            **{
                f"{kind}_gbps_range": [
                    min(probe[kind] for probe in probes) / 1e9,
                    max(probe[kind] for probe in probes) / 1e9,
                ]
                for kind in ("read", "write")
                if probes
            },
            **{
                f"fio_{kind}_gbps": median(block[kind] for block in fio) / 1e9
                for kind in ("read", "write")
                if fio
            },
        },
        "rows": rows,
        "tensors": tensor_rows(tensors),
        "failed": [
            {name: block[name] for name in ("system", "error")}
            for block in blocks
            if "error" in block
        ],
    }
    return {
        **result,
        "ratios": [
            *(each for at in settings for each in offload_ratios(rows, *at)),
            *tensor_ratios(result),
        ],
    }


def row(
    system: str, blocks: list[dict[str, Any]], costs: dict[str, Any] | None, compute: float | None
) -> dict[str, Any]:
    blocks = sorted(blocks, key=lambda block: block["repetition"])
    size, tokens = SIZES[blocks[0]["size"]], COMPUTE[blocks[0]["compute"]]
    by_repetition = {
        block["repetition"]: median(step["seconds"] for step in block["steps"]) for block in blocks
    }
    steps = [step for block in blocks for step in block["steps"]]
    floors = [floor_seconds(block, size.parameters, costs, compute) for block in blocks]
    per = lambda name: median(
        block[name] / len(block["steps"]) / size.parameters for block in blocks
    )
    seconds = median(step["seconds"] for step in steps)
    clipped = next((block["clipped_losses"] for block in blocks if block["clipped_losses"]), [])
    return {
        "system": system,
        "setting": {
            "size": blocks[0]["size"],
            "compute": blocks[0]["compute"],
            "tokens": tokens,
            **blocks[0]["settings"],
        },
        "parameters": size.parameters,
        "seconds": seconds,
        "seconds_range": [
            min(step["seconds"] for step in steps),
            max(step["seconds"] for step in steps),
        ],
        "repetitions": by_repetition,
        "core_seconds": median(block["core_seconds"] for block in blocks),
        "phases": {
            phase: median(step[phase] for step in steps)
            for phase in ("forward", "backward", "step")
        },
        "read_b_per_p": per("read_bytes"),
        "written_b_per_p": per("written_bytes"),
        "rss_bytes": max(block["peak_bytes"] for block in blocks),
        "vm_rss_bytes": max(block["rss_bytes"] for block in blocks),
        "floor_seconds": median(floors) if None not in floors else None,
        "floor_ratio": (
            median(
                by_repetition[block["repetition"]] / floor for block, floor in zip(blocks, floors)
            )
            if None not in floors
            else None
        ),
        "losses": blocks[0]["losses"],
        "losses_repeat": len({tuple(block["losses"]) for block in blocks}) == 1,
        "clipped_losses": clipped,
    }


def floor_seconds(
    block: dict[str, Any], parameters: int, costs: dict[str, Any] | None, compute: float | None
) -> float | None:
    """What a step of this block takes at least: its bytes at the disk's rates, its arithmetic on
    all cores."""
    if costs is None or compute is None:
        return None
    moved = {kind: block[f"{kind}_bytes"] / len(block["steps"]) for kind in ("read", "written")}
    rate = {
        kind: (block["disk"]["before"][kind] + block["disk"]["after"][kind]) / 2
        for kind in ("read", "write")
    }
    arithmetic = (
        compute + costs["kernel_seconds"][block["settings"].get("moments", "exact")] * parameters
    )
    if SYSTEMS[block["system"]].kind == "stoker":
        arithmetic += costs["checksum_seconds"] * sum(moved.values())
    return max(
        moved["read"] / rate["read"] + moved["written"] / rate["write"], arithmetic / costs["cores"]
    )


def compare_losses(rows: list[dict[str, Any]]) -> None:
    """Beside each row how far its losses are from those of its un-offloaded run."""
    for each in rows:
        beside = find(
            rows,
            SYSTEMS[each["system"]].beside,
            each["setting"]["size"],
            each["setting"]["compute"],
        )
        if beside is None:
            continue
        apart = lambda name: max(
            (abs(a - b) for a, b in zip(each[name], beside[name])), default=None
        )
        each["losses_apart"] = {
            "beside": beside["system"],
            "unclipped": apart("losses"),
            "clipped": apart("clipped_losses"),
        }


def find(rows: list[dict[str, Any]], system: str, size: str, compute: str) -> dict[str, Any] | None:
    return next(
        (
            row
            for row in rows
            if (row["system"], row["setting"]["size"], row["setting"]["compute"])
            == (system, size, compute)
        ),
        None,
    )


def tensor_rows(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gigabytes a second of each system, operation and case: the median of each block's median."""
    rows = []
    for system in TENSOR_SYSTEMS:
        mine = sorted(
            (block for block in blocks if block["system"] == system),
            key=lambda block: block["repetition"],
        )
        for case in [*TENSOR_BYTES, MANY]:
            for operation in ("load", "store", "store durable"):
                rates = {
                    b["repetition"]: (
                        sum(b["sizes"][case]) / median(b["cases"][case][operation]) / 1e9
                    )
                    for b in mine
                    if operation in b["cases"].get(case, {})
                }
                if rates:
                    sizes = mine[0]["sizes"][case]
                    rows.append(
                        {
                            "system": system,
                            "operation": operation,
                            "case": case,
                            "tensors": len(sizes),
                            "bytes": sum(sizes),
                            "gbps": median(rates.values()),
                            "repetitions": rates,
                        }
                    )
    return rows


# -- ratios ----------------------------------------------------------------------------------------


def paired(over: dict[int, float], under: dict[int, float]) -> list[float]:
    """The quotient in each round that both have: the disk was the same for both then."""
    return [over[number] / under[number] for number in over if number in under]


def ratio(
    what: str, quotients: list[float], goal: float | None, at_least: bool = True
) -> list[dict[str, Any]]:
    """[] where nothing is to be compared."""
    if not quotients:
        return []
    value = median(quotients)
    met = None if goal is None else bool(value >= goal if at_least else value <= goal)
    return [
        {
            "what": what,
            "value": value,
            "range": [min(quotients), max(quotients)],
            "rounds": len(quotients),
            "goal": goal,
            "at_least": at_least,
            "met": met,
        }
    ]


def offload_ratios(rows: list[dict[str, Any]], size: str, compute: str) -> list[dict[str, Any]]:
    """The goals are stated for the large model; the smaller one's ratios stand beside them
    without."""
    at = lambda system: find(rows, system, size, compute)
    goal = lambda value, where=("io",): value if size == "220M" and compute in where else None
    place = f"{size}, {COMPUTE[compute]} tokens"
    tuned, found = at("deepspeed-tuned"), []
    exact = min(
        (each for name in EXACT if (each := at(name))),
        key=lambda each: each["seconds"],
        default=None,
    )
    faster = lambda what, other, mine, least: (
        ratio(f"{place}: {what}", paired(other["repetitions"], mine["repetitions"]), least)
        if other and mine
        else []
    )
    if exact:
        found += faster(
            f"tuned DeepSpeed's seconds over ours, exact ({exact['setting']['policy']})",
            tuned,
            exact,
            goal(2.0),
        )
        if tuned:
            found += ratio(
                f"{place}: our resident memory there, of its",
                [exact["rss_bytes"] / tuned["rss_bytes"]],
                goal(1 / 3),
                at_least=False,
            )
        if exact["floor_ratio"] is not None:
            limit = goal(1.15) or goal(1.25, ("balanced",))
            found += ratio(
                f"{place}: our seconds over the floor, exact ({exact['setting']['policy']})",
                [exact["floor_ratio"]],
                limit,
                at_least=False,
            )
    found += faster(
        "tuned DeepSpeed's seconds over ours, bf16 moments", tuned, at("stoker-bf16"), goal(3.0)
    )
    found += faster(
        "tuned DeepSpeed's seconds over ours, at most its memory",
        tuned,
        at("stoker-equal"),
        goal(4.0),
    )
    found += faster(
        "DeepSpeed CPU offload's seconds over ours, at most its memory",
        at("deepspeed-cpu"),
        at("stoker-equal-cpu") or at("stoker-equal"),
        goal(1.0, ("io", "balanced")),
    )
    found += faster(
        "default DeepSpeed's seconds over ours, exact", at("deepspeed-default"), exact, None
    )
    return found


def tensor_ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    rates = {(row["system"], row["operation"], row["case"]): row for row in result["tensors"]}
    for operation, kind in (("load", "read"), ("store", "write")):
        for case in [*TENSOR_BYTES, MANY]:
            mine = rates.get(("stoker", operation, case))
            peer = max(
                (rates[key] for name in DEEPNVME if (key := (name, operation, case)) in rates),
                key=lambda each: each["gbps"],
                default=None,
            )
            large = case in (MANY, list(TENSOR_BYTES)[-1])
            if mine and peer:
                found += ratio(
                    f"{operation}, {case}: our rate over DeepNVMe's best ({peer['system']})",
                    paired(mine["repetitions"], peer["repetitions"]),
                    1.33 if large else None,
                )
            fio = result["disk_ceiling"].get(f"fio_{kind}_gbps")
            if mine and fio and large:
                found += ratio(
                    f"{operation}, {case}: our rate over fio's", [mine["gbps"] / fio], 0.95
                )
    return found


# -- the form --------------------------------------------------------------------------------------

FORM = {
    "machine": dict,
    "versions": dict,
    "disk_ceiling": dict,
    "rows": list,
    "tensors": list,
    "failed": list,
    "ratios": list,
}
ROW_FORM = {
    "system": str,
    "setting": dict,
    "parameters": int,
    "seconds": float,
    "read_b_per_p": float,
    "written_b_per_p": float,
    "rss_bytes": int,
    "floor_ratio": (float, type(None)),
    "losses": list,
}
RATIO_FORM = {
    "what": str,
    "value": float,
    "range": list,
    "goal": (float, type(None)),
    "met": (bool, type(None)),
}


def check(result: dict[str, Any]) -> None:
    """ValueError with a sentence unless `result` has the form that bench/results/peers*.json are
    read by."""
    parts = [
        ("the result", result, FORM),
        *(("a row", row, ROW_FORM) for row in result.get("rows", [])),
        *(("a ratio", row, RATIO_FORM) for row in result.get("ratios", [])),
    ]
    for what, found, form in parts:
        for name, kind in form.items():
            if name not in found:
                raise ValueError(f"{what} lacks {name!r}")
            if not isinstance(found[name], kind):
                raise ValueError(f"{what} has {found[name]!r} for {name!r}")
    for row in result["rows"]:
        if not row["seconds"] > 0 or not row["losses"]:
            raise ValueError(
                f"the row of {row['system']} was not measured: {row['seconds']} s,"
                f" {len(row['losses'])} losses"
            )


# -- for people ------------------------------------------------------------------------------------


def lines_of(row: dict[str, Any]) -> list[str]:
    """The cells of a row: seconds, phases, processor time, bytes, memory, floor, losses."""
    phases = " / ".join(f"{row['phases'][phase]:.2f}" for phase in ("forward", "backward", "step"))
    low, high = row["seconds_range"]
    apart = row.get("losses_apart")
    unclipped, clipped = ((apart[name] if apart else None) for name in ("unclipped", "clipped"))
    told = lambda value: "-" if value is None else "equal" if value == 0 else f"{value:.1e}"
    return [
        f"{row['seconds']:.2f} ({low:.2f} to {high:.2f})",
        phases,
        f"{row['core_seconds']:.2f}",
        f"{row['read_b_per_p']:.1f} / {row['written_b_per_p']:.1f}",
        f"{row['rss_bytes'] / GIB:.2f}",
        "-" if row["floor_ratio"] is None else f"{row['floor_ratio']:.2f}",
        told(unclipped),
        told(clipped),
    ]


HEAD = [
    "system",
    "seconds a step (range)",
    "forward / backward / step",
    "core-seconds",
    "B read / written a parameter",
    "GiB",
    "of the floor",
    "losses",
    "clipped",
]


def offload_tables(result: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows of cells) for each setting."""
    places = list(
        dict.fromkeys((row["setting"]["size"], row["setting"]["compute"]) for row in result["rows"])
    )
    tables = []
    for size, compute in places:
        rows = [
            row
            for row in result["rows"]
            if (row["setting"]["size"], row["setting"]["compute"]) == (size, compute)
        ]
        title = (
            f"{rows[0]['parameters'] / 1e6:.1f} M parameters, {rows[0]['setting']['tokens']} tokens"
            " a step"
        )
        tables.append((title, [HEAD, *([row["system"], *lines_of(row)] for row in rows)]))
    return tables


def tensor_table(result: dict[str, Any]) -> list[list[str]]:
    cases = [
        case
        for case in [*TENSOR_BYTES, MANY]
        if any(row["case"] == case for row in result["tensors"])
    ]
    rates = {
        (row["system"], row["operation"], row["case"]): row["gbps"] for row in result["tensors"]
    }
    lines = [["GB/s", *cases]]
    for operation in ("load", "store", "store durable"):
        for system in TENSOR_SYSTEMS:
            if any((system, operation, case) in rates for case in cases):
                lines.append(
                    [
                        f"{operation}: {system}",
                        *(
                            (
                                f"{rates[key]:.2f}"
                                if (key := (system, operation, case)) in rates
                                else "-"
                            )
                            for case in cases
                        ),
                    ]
                )
    return lines


def ratio_table(result: dict[str, Any]) -> list[list[str]]:
    told = lambda each: (
        ""
        if each["goal"] is None
        else f"{'at least' if each['at_least'] else 'at most'} {each['goal']:.2f}"
    )
    lines = [["ratio", "median (range)", "rounds", "goal", "met"]]
    for each in result["ratios"]:
        met = {None: "", True: "yes", False: "NO"}[each["met"]]
        lines.append(
            [
                each["what"],
                f"{each['value']:.3f} ({each['range'][0]:.2f} to {each['range'][1]:.2f})",
                str(each["rounds"]),
                told(each),
                met,
            ]
        )
    return lines


def plain(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def piped(lines: list[list[str]]) -> str:
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def terminal(result: dict[str, Any]) -> str:
    parts = [f"{title}\n{plain(lines)}" for title, lines in offload_tables(result)]
    parts += [
        plain(lines) for lines in (tensor_table(result), ratio_table(result)) if len(lines) > 1
    ]
    parts += [f"failed: {each['system']}: {each['error']}" for each in result["failed"]]
    return "\n\n".join(parts)


def title(name: str) -> str:
    return f"## Beside DeepSpeed (`make bench-peers`, bench/results/{name})"


def markdown(result: dict[str, Any], name: str) -> str:
    """The section of docs/numbers.md for the result in bench/results/`name`; tests hold that it is
    this one."""
    versions, disk, machine = result["versions"], result["disk_ceiling"], result["machine"]
    rounds = {len(row["repetitions"]) for row in result["rows"]}
    sides = ", ".join(
        f"{kind} {disk[f'{kind}_gbps']:.2f} ({disk[f'{kind}_gbps_range'][0]:.2f} to"
        f" {disk[f'{kind}_gbps_range'][1]:.2f})"
        for kind in ("read", "write")
        if f"{kind}_gbps" in disk
    )
    said = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    parts = [title(name)]
    if result["rows"]:
        parts.append(
            f"{said}; {machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB. All runs"
            " have the same model, data, AdamW and malloc settings, and bf16 weights with float32"
            " masters.\nEach system runs in a process of its own, in turn. Rounds:"
            f" {' or '.join(map(str, sorted(rounds)))}. Medians are over all timed steps. Bytes by"
            " /proc/self/io; GiB: the peak of\nRssAnon + RssShmem + HugetlbPages. The disk (2 MiB"
            f" pages, GB/s): {sides}, probed between the rounds. Losses: the largest distance"
            " from\nthe same system's run without offload, then with clipping that fires in every"
            " step. Ours is compared with torch's fused AdamW over float32 masters, DeepSpeed's"
            " with its own run."
        )
        parts += [f"{setting}:\n\n{piped(lines)}" for setting, lines in offload_tables(result)]
        parts.append(
            "\n".join(
                f"- {name}: {SYSTEMS[name].says}."
                for name in SYSTEMS
                if any(row["system"] == name for row in result["rows"])
            )
        )
    if result["tensors"]:
        many = next((row for row in result["tensors"] if row["case"] == MANY), None)
        mixed = (
            f" Many: {many['tensors']} tensors of mixed size, {many['bytes'] / MIB:.0f} MiB."
            if many
            else ""
        )
        beside = ", ".join(
            f"{kind} {disk[f'fio_{kind}_gbps']:.2f}"
            for kind in ("read", "write")
            if f"fio_{kind}_gbps" in disk
        )
        parts.append(
            f"Tensors through `stoker._core` and through DeepNVMe's aio handle.{mixed} fio with 2"
            f" MiB pages, GB/s: {beside or 'not run'}.\nOurs verifies what it loads; its stores"
            " commit, `durable` with a flush; DeepNVMe does neither."
        )
        parts.append(piped(tensor_table(result)))
    if result["ratios"]:
        within = (
            "Ratios are taken within each round, and the median is shown. Those of memory are of"
            " the peaks of all rounds, those over fio of the medians of all rounds:"
        )
        parts.append(f"{within}\n\n{piped(ratio_table(result))}")
    parts += [f"{each['system']} failed: {each['error']}" for each in result["failed"]]
    return "\n\n".join(parts) + "\n"
