"""`python -m stoker.bench NAME ARGS`: what `stoker bench NAME` runs where NAME needs torch."""

import sys

from stoker.bench import offload, plan

BENCHMARKS = {"offload": offload.main, "plan": plan.main}


def main() -> int | str:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        return f"stoker bench: {name!r} is not one of {', '.join(BENCHMARKS)}"
    return BENCHMARKS[name](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
