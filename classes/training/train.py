"""`.venv/bin/python classes/training/train.py TRACE...`: fits the decision trees that tell the
classes of objects, and writes them as JSON. docs/curm.md has the traces of those that ship.

There are two: one over the counters of an object's requests (`nodes`), one over what is known of it
when it is made (`created`). The rows they learn from come from `stoker curm samples`, so features
and truth are computed where the trees are used, by the same code. scikit-learn is needed here and
nowhere else: the trees that come out are data.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

from stoker.command import Parser, fail, named, writable_folder

NAME = "train.py"
DEPTH_MAX = 6
# What is learnt: its name in the file, the option of `stoker curm samples` that gives its rows, how
# many of these a leaf has at least.
PARTS = {"counters": ("nodes", [], 100), "made": ("created", ["--made"], 30)}
TRAINED_ON = {"nodes": "trained_on", "created": "created_trained_on"}
Rows = tuple[list[str], list[list[float]], list[str]]  # trace, features, class


def samples(traces: list[str], lenient: bool, part: str) -> tuple[list[str], Rows]:
    """Names of the features, and the rows of all traces."""
    options = [*PARTS[part][1], *(["--lenient"] if lenient else [])]
    command = [str(Path(sys.executable).parent / "stoker"), "curm", "samples", *traces, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(
            f"{command[0]} cannot be run ({error.strerror}); install stoker into this Python"
        ) from error
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise ValueError("the traces could not be read; see above")
    names, *rows = csv.reader(done.stdout.splitlines())
    features = names[1:-2]
    return features, (
        [row[0] for row in rows],
        [[float(value) for value in row[1:-2]] for row in rows],
        [row[-2] for row in rows],
    )


def as_json(tree, features: list[str]) -> list[dict]:
    """The fitted tree as `class_tree.json` holds it: nodes in depth-first order, children behind
    their parent."""
    inner = tree.tree_
    nodes = []
    for node in range(inner.node_count):
        left, right = int(inner.children_left[node]), int(inner.children_right[node])
        if left < 0:
            nodes.append({"class": str(tree.classes_[int(inner.value[node][0].argmax())])})
        else:
            # Features are float32 where the tree is used.
            nodes.append(
                {
                    "feature": features[int(inner.feature[node])],
                    "threshold": float(inner.threshold[node]),
                    "left": left,
                    "right": right,
                }
            )
    return nodes


def fit(x: list[list[float]], y: list[str], depth: int, leaf: int):
    from sklearn.tree import DecisionTreeClassifier

    return DecisionTreeClassifier(max_depth=depth, min_samples_leaf=leaf, random_state=0).fit(x, y)


def accuracy(tree, x: list[list[float]], y: list[str]) -> float:
    return sum(said == was for said, was in zip(tree.predict(x), y, strict=True)) / len(y)


def majority(y: list[str], of: list[str]) -> float:
    """How often always saying the most frequent class of `y` is right about `of`."""
    frequent = max(sorted(set(y)), key=y.count)
    return of.count(frequent) / len(of)


def held_out(rows: Rows, depth: int, leaf: int) -> None:
    """Prints, for each trace, how right a tree is that has not seen it."""
    names, x, y = rows
    for name in sorted(set(names)):
        inside = [i for i, each in enumerate(names) if each != name]
        outside = [i for i, each in enumerate(names) if each == name]
        if not inside:
            print(
                f"{name}: there is no other trace to learn from, so how right the tree is is not"
                " known"
            )
            continue
        tree = fit([x[i] for i in inside], [y[i] for i in inside], depth, leaf)
        truth = [y[i] for i in outside]
        right, frequent = (
            accuracy(tree, [x[i] for i in outside], truth),
            majority([y[i] for i in inside], truth),
        )
        print(
            f"{name}: learnt from the others, right {right:.1%} of {len(outside)}; always their"
            f" majority class {frequent:.1%}"
        )


def learn(part: str, arguments: argparse.Namespace) -> dict:
    """What goes into the file for this part; nothing, where the traces tell nothing of it."""
    key, _, leaf = PARTS[part]
    features, rows = samples(arguments.traces, arguments.lenient, part)
    names, x, y = rows
    if not y:
        return {}
    print(f"{part}:")
    held_out(rows, arguments.depth, leaf)
    tree = fit(x, y, arguments.depth, leaf)
    print(
        f"all together: {len(y)} samples, depth {tree.get_depth()}, {tree.tree_.node_count} nodes,"
        f" right {accuracy(tree, x, y):.1%} of what it learnt"
    )
    if arguments.test:
        _, (tested, others, truth) = samples(arguments.test, arguments.lenient, part)
        for name in sorted(set(tested)):
            mine = [i for i, each in enumerate(tested) if each == name]
            was = [truth[i] for i in mine]
            print(
                f"{name}: not learnt from, right"
                f" {accuracy(tree, [others[i] for i in mine], was):.1%} of {len(mine)}; its own"
                f" majority class {majority(was, was):.1%}"
            )
    return {TRAINED_ON[key]: sorted(set(names)), key: as_json(tree, features)}


def main(words: list[str]) -> int:
    parser = Parser(NAME, "Fit the class trees on traces, and write them as JSON.")
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help=(
            "trace files, as `stoker curm replay` takes them; only NFS records tell of files being"
            " made"
        ),
    )
    parser.add_argument(
        "--out",
        type=named,
        default="class_tree.json",
        metavar="FILE",
        help="where the trees go (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="learn this one of the trees; the other one stays as it is in FILE",
    )
    parser.add_argument(
        "--test",
        action="append",
        default=[],
        metavar="TRACE",
        help="tell how right the trees are on this trace, which they do not learn from",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=DEPTH_MAX,
        choices=range(1, DEPTH_MAX + 1),
        help="of a tree, at most (default: %(default)s)",
    )
    parser.add_argument("--lenient", action="store_true", help="skip malformed lines")
    arguments = parser.parse_args(words)
    try:
        writable_folder(str(Path(arguments.out).parent))
    except OSError as error:
        return fail(NAME, error)
    try:
        import sklearn  # noqa: F401
    except ImportError:
        print(
            f"{NAME}: scikit-learn is missing; install it into this Python with `pip install"
            " scikit-learn`",
            file=sys.stderr,
        )
        return 1
    try:
        target = Path(arguments.out)
        out = json.loads(target.read_text()) if arguments.only and target.exists() else {}
        for part in [arguments.only] if arguments.only else PARTS:
            learnt = learn(part, arguments)
            if not learnt and (arguments.only or part == "counters"):
                missing = (
                    "no file is made in them"
                    if part == "made"
                    else "no object was seen in two windows of requests; give longer ones"
                )
                raise ValueError(f"the traces are too short: {missing}")
            out |= learnt
        if "nodes" not in out:
            raise ValueError(
                f"{target} has no tree over counters, which there must be: train without --only, or"
                " --only counters first"
            )
        target.write_text(json.dumps(out, indent=1) + "\n")
    except (ValueError, OSError) as error:
        return fail(NAME, error)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
