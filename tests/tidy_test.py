"""Hygiene that must not slip, held as tests. Each rule is a function from a tree to a list of
sentences (empty: clean).

Every rule is run on this repository, and on a made-up tree in which it must find exactly what was
put there.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a folder of src/stoker may include, beside itself. Tests (x_test.cc) and testing/ see
# everything.
MAY_INCLUDE = {
    "base": set(),
    "memory": {"base"},
    "io": {"base", "memory"},
    "codec": {"base"},
    "classes": {"base"},
    "optim": {"base"},
    "net": {"base", "memory", "io"},
    "store": {"base", "memory", "io", "net", "classes", "codec"},
    "data": {"base", "memory", "store"},
    "offload": {"base", "memory", "io", "store", "optim"},
    "cli": {"base", "memory", "classes", "codec", "io", "store"},
    "bindings": {"base", "memory", "codec", "io", "store", "data", "optim", "offload"},
}
# The floors of python/stoker/offload, from the ground up: a package imports itself and the floors
# below, type-only imports counted. Packages of one floor do not see each other. The package's face
# and open.py, which constructs, stand above all of them.
FLOORS: list[set[str]] = [
    {"model"},
    {"division"},
    {"storage", "observe"},
    {"paging"},
    {"gradients", "activations"},
    {"steps", "hooks"},
    {"ranks", "planning"},
    {"run"},
]
ABOVE_ALL = {"__init__.py", "open.py"}
# The folders of src/stoker/store/coded, from the ground up: a file includes those of its own folder
# and of the folders below. The facade stands in coded/ itself, above all of them. What all may see
# of it is what the store can be asked for, and the planted bugs.
CODED = "src/stoker/store/coded"
CODED_FLOORS = ["format", "shards", "map", "read", "logs", "rebuild", "fold", "recovery"]
CODED_FLOORS += ["commit", "upkeep", "write"]
CODED_FOR_ALL = {"store", "mutation"}
CODE = {".cc", ".h"}
TEXT = {".cc", ".h", ".py", ".pyi", ".md", ".sh", ".txt", ".cmake", ".toml", ".json", ".yml", ""}


def files(root: Path) -> list[Path]:
    """What belongs to the tree: what git would commit, or every file where there is no git."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        paths = [root / name for name in listed if name]
    else:
        paths = list(root.rglob("*"))
    return sorted(path for path in paths if path.is_file())


def part_of(path: Path, root: Path) -> str:
    """The folder in the dependency order that a C++ file belongs to ("" for none)."""
    words = path.relative_to(root).parts
    if words[:2] == ("src", "stoker"):
        return words[2]
    if words[0] == "cli":
        return "cli"
    return "bindings" if words[:3] == ("python", "stoker", "bindings") else ""


def without_comments(text: str) -> str:
    """C++ with comments and the contents of strings blanked, lines kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((.*?)\)"|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda found: "\n" * found.group().count("\n"), text)


def is_test(path: Path) -> bool:
    return (
        path.stem.endswith("_test")
        or "testing" in path.parts
        or "tests" in path.parts
        or "bench" in path.parts
    )


def upward_includes(root: Path) -> list[str]:
    problems = []
    for path in files(root):
        part = part_of(path, root)
        if path.suffix not in CODE or is_test(path) or part not in MAY_INCLUDE:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            # curm: the lab, above all of it
            found = re.match(r'#include "(?:stoker/(\w+)/|(curm)/)', line)
            if found and (found.group(1) or found.group(2)) not in MAY_INCLUDE[part] | {part}:
                problems.append(
                    f"{path.relative_to(root)}:{number} includes"
                    f" {found.group(1) or found.group(2)}, which stands above {part}"
                )
    return problems


def coded_owners_below(root: Path) -> list[str]:
    """A folder of the coded store includes the folders below it only."""
    floor = {folder: at for at, folder in enumerate(CODED_FLOORS)}
    top = len(CODED_FLOORS)
    problems = []
    for path in files(root):
        if path.suffix not in CODE or is_test(path) or not path.is_relative_to(root / CODED):
            continue
        folder = path.parent.relative_to(root / CODED).as_posix()
        if folder != "." and folder not in floor:
            problems.append(f"{path.relative_to(root)} stands on no floor of CODED_FLOORS")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r'#include "stoker/store/coded/(?:(\w+)/)?(\w+)\.h"', line)
            if not found or (not found.group(1) and found.group(2) in CODED_FOR_ALL):
                continue
            if floor.get(found.group(1), top) > floor.get(folder, top):
                problems.append(
                    f"{path.relative_to(root)}:{number} includes {found.group(2)}.h,"
                    f" which stands above it"
                )
    return problems


def friends(root: Path) -> list[str]:
    """No class of a store lets another one look at its members."""
    return [
        f"{path.relative_to(root)}:{number} has a friend; give it what it needs"
        for path in files(root)
        if path.suffix in CODE and path.is_relative_to(root / "src/stoker/store")
        for number, line in enumerate(without_comments(path.read_text()).splitlines(), 1)
        if re.match(r"\s*friend\b", line)
    ]


def upward_imports(root: Path) -> list[str]:
    """Packages of python/stoker/offload import lower floors only."""
    floor = {package: at for at, packages in enumerate(FLOORS) for package in packages}
    folder = root / "python" / "stoker" / "offload"
    problems = []
    for path in files(root):
        if path.suffix != ".py" or not path.is_relative_to(folder):
            continue
        package, *rest = path.relative_to(folder).parts
        if package in ABOVE_ALL:
            continue
        if not rest or package not in floor:
            problems.append(f"{path.relative_to(root)} stands on no floor of FLOORS")
            continue
        problems += [
            f"{path.relative_to(root)}:{number} imports {other or 'the face of the package'},"
            f" which does not stand below {package}"
            for number, other in offload_imports(path)
            if (above := other.split(".")[0]) != package
            and floor.get(above, len(FLOORS)) >= floor[package]
        ]
    return problems


def offload_imports(path: Path) -> list[tuple[int, str]]:
    """Line and name ("paging.pager") of each module of stoker.offload that the file imports."""
    face, found = "stoker.offload", []
    root = next(parent for parent in path.parents if parent.name == "offload")
    package = [*face.split("."), *path.relative_to(root).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        found += [
            (node.lineno, ".".join(name.split(".")[2:4]))
            for name in names
            if name == face or name.startswith(face + ".")
        ]
    return found


def circles(root: Path) -> list[str]:
    """No module of python/stoker is imported by one that it imports itself, be it by others and be
    it for types only."""
    folder = root / "python"
    modules: dict[str, list[Path]] = {}
    for path in files(root):
        if path.suffix in {".py", ".pyi"} and path.is_relative_to(folder / "stoker"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.setdefault(name, []).append(path)
    seen = {name: sorted(imports(name, modules)) for name in modules}
    problems, done = [], set()

    def follow(name: str, way: list[str]) -> None:
        if name in way:
            problems.append("a circle of imports: " + " -> ".join([*way[way.index(name) :], name]))
        elif name not in done:
            for other in seen[name]:
                follow(other, [*way, name])
            done.add(name)

    for name in sorted(modules):
        follow(name, [])
    return problems


def imports(name: str, modules: dict[str, list[Path]]) -> set[str]:
    """Which of the modules this one imports. Where a package is named for a module in it, that
    module, and not the package's face, which may import all that is in it."""
    found = set()
    for path in modules[name]:
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                inside = [f"{base}.{alias.name}" for alias in node.names]
                found |= {each if each in modules else base for each in inside}
    return (found & set(modules)) - {name}


# Attributes of what torch and Python make.
OF_OTHERS = {"grad", "data", "__class__", "__deepcopy__", "_compiled_call_impl", "_opt_called"}
OF_OTHERS |= {"__cause__", "errno", "restype", "writeable"}
# Of records of another package (a block, a unit, a gradient's home): what only this file finds out.
FOUND_OUT = {
    ("paging/pager.py", "pinned"),
    ("planning/rehearsal.py", "dirty"),
    ("planning/rehearsal.py", "session_id"),
    ("run/build.py", "updated"),
    ("storage/planes.py", "session_id"),
}


def set_from_outside(root: Path) -> list[str]:
    """Parts of python/stoker/offload get what they need when they are made: an attribute is set by
    its own object alone. A record (a class of the same package with declared fields, or of the same
    file) is set by those who keep it. Known by its name, so some pass unseen."""
    folder = root / "python" / "stoker" / "offload"
    problems = []
    for path in files(root):
        if path.suffix != ".py" or not path.is_relative_to(folder):
            continue
        name = str(path.relative_to(folder))
        tree = ast.parse(path.read_text())
        records = annotated(*classes(tree))
        for other in path.parent.glob("*.py"):
            records |= declared_fields(ast.parse(other.read_text()))
        own = records | assigned_to_self(tree)
        problems += [
            f"{path.relative_to(root)}:{node.lineno} sets {ast.unparse(node)} from outside: give it"
            " to the constructor, or call a method"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            and node.attr not in OF_OTHERS
            and node.attr not in (own if isinstance(node.value, ast.Name) else records)
            and not node.attr.startswith("_stoker_")
            and (name, node.attr) not in FOUND_OUT
        ]
    return problems


def assigned_to_self(tree: ast.Module) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def annotated(*of: ast.ClassDef) -> set[str]:
    return {
        each.target.id
        for node in of
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def declared_fields(tree: ast.Module) -> set[str]:
    """Of all dataclasses, and of classes with slots."""
    found: set[str] = set()
    for node in classes(tree):
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            found |= annotated(node)
        for each in node.body:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__slots__":
                found |= set(ast.literal_eval(each.value))
    return found


READ_THE_ENVIRONMENT = {"src/stoker/base/log.cc", "src/stoker/store/s3/credentials.cc"}
# pattern, the files that may, why
BANNED_IN_CPP = [
    (
        r"(?<![\w.>])(?:std::)?(?:_?exit|quick_exit|_Exit)\s*\(",
        set(),
        "a library never ends the process",
    ),
    (
        r"(?<![\w.>])(?:std::)?(?:abort|terminate)\s*\(",
        {"src/stoker/base/check.cc"},
        "only a failed check aborts",
    ),
    (
        r"(?<![\w.>])(?:std::)?(?:f?printf|f?puts|putchar|perror)\s*\(|std::(?:cout|cerr|clog)\b",
        {"src/stoker/base/check.cc"},
        "a library never prints",
    ),
    (
        r"(?<![\w.>])(?:std::)?(?:secure_)?getenv\s*\(",
        READ_THE_ENVIRONMENT,
        "the environment is read in two places",
    ),
    (
        r"std::(?:recursive_|shared_|timed_)?mutex\b|std::condition_variable\b",
        {"src/stoker/base/mutex.h"},
        "Mutex and CondVar of base/mutex.h can say what they guard",
    ),
]
# parts of the command; the offload is a library
PYTHON_MAY_PRINT = {
    "train",
    "data",
    "bench",
    "plan",
    "trace",
    "ckpt",
    "dataset",
    "top",
    "command.py",
}


RUNS_DATA = {"pickle.load", "pickle.loads", "eval", "exec"}
# What comes from a worker's memory was written by the same program, never read from a file.
OWN_PIPE = {("python/stoker/data/workers.py", "pickle.loads")}


def banned_words(root: Path) -> list[str]:
    problems = []
    for path in files(root):
        name = str(path.relative_to(root))
        if path.suffix in CODE and part_of(path, root) and not is_test(path):
            text = without_comments(path.read_text())
            for pattern, allowed, why in BANNED_IN_CPP:
                if name in allowed or (part_of(path, root) == "cli" and "prints" in why):
                    continue
                for found in re.finditer(pattern, text):
                    line = text.count("\n", 0, found.start()) + 1
                    problems.append(f"{name}:{line} uses {found.group().strip(' (')}: {why}")
        elif path.suffix == ".py" and name.startswith("python/stoker/"):
            problems += banned_in_python(path, name)
    return problems


def banned_in_python(path: Path, name: str) -> list[str]:
    problems = []
    part = Path(name).parts[2]
    for node in ast.walk(ast.parse(path.read_text())):
        said = (
            ast.unparse(node.func)
            if isinstance(node, ast.Call)
            else ast.unparse(node)
            if isinstance(node, ast.Attribute)
            else ""
        )
        if said == "print" and part not in PYTHON_MAY_PRINT:
            problems.append(f"{name}:{node.lineno} prints: a library never prints")
        if said in {"os.environ", "os.getenv"}:
            problems.append(f"{name}:{node.lineno} reads the environment: options are arguments")
        if isinstance(node, ast.Call) and said == "sys.exit" and path.name != "__main__.py":
            problems.append(
                f"{name}:{node.lineno} ends the process: raise, and let __main__.py exit"
            )
        if isinstance(node, ast.Call) and said in RUNS_DATA and (name, said) not in OWN_PIPE:
            problems.append(f"{name}:{node.lineno} calls {said}: files are read as data, never run")
    return problems


def unused_files(root: Path) -> list[str]:
    """A .cc that no CMakeLists names, a .h that nobody includes, a Python module that nobody
    imports."""
    every = files(root)
    problems = []
    code = {path: path.read_text() for path in every if path.suffix in CODE}
    lists = {path.parent: path.read_text() for path in every if path.name == "CMakeLists.txt"}
    for path, _ in code.items():
        name = path.relative_to(root)
        if path.suffix == ".cc":
            named = any(
                re.search(rf"(?<![\w/.]){re.escape(spelled)}(?![\w.])", text)
                for folder, text in lists.items()
                if folder in path.parents
                for spelled in (path.relative_to(folder).as_posix(), *call_spelled(path, folder))
            )
            if not named:
                problems.append(f"{name} is built by no CMakeLists.txt")
        elif not any(
            re.search(rf'#include "(?:[\w/]*/)?{re.escape(path.name)}"', text)
            for other, text in code.items()
            if other != path
        ):
            problems.append(f"{name} is included by nobody")
    return problems + unused_modules(root, every)


def call_spelled(path: Path, folder: Path) -> tuple[str, ...]:
    """Fuzzers and benchmarks are named without their ending: stoker_bench(optim ...) builds
    optim_bench.cc."""
    kind = {"fuzz": "fuzz", "micro": "bench"}.get(folder.name)
    return (
        (f"stoker_{kind}({path.stem.removesuffix('_' + kind)}",)
        if kind and folder == path.parent
        else ()
    )


def unused_modules(root: Path, every: list[Path]) -> list[str]:
    python = [path for path in every if path.suffix == ".py"]
    used: dict[str, set[Path]] = {}
    for path in python:
        package = (
            ".".join(path.relative_to(root / "python").parent.parts)
            if (root / "python") in path.parents
            else ""
        )
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, base]).strip(".")
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            for name in names:
                used.setdefault(name, set()).add(path)
    # A helper that tests run as a program of its own is named as a file.
    texts = {path: path.read_text() for path in python}
    problems = []
    for path in python:
        name = path.relative_to(root)
        if path.name in {"__main__.py", "__init__.py", "conftest.py"} or re.match(
            r"test_|.*_test$", path.stem
        ):
            continue
        module = ".".join(
            (path.relative_to(root / "python") if name.parts[0] == "python" else Path(path.name))
            .with_suffix("")
            .parts
        )
        imported = used.get(module, set()) - {path}
        named = name.parts[0] == "tests" and any(
            path.name in text for other, text in texts.items() if other != path
        )
        if not imported and not named and name.parts[0] in {"python", "tests"}:
            problems.append(f"{name} is imported by nobody and is not an entry point")
    return problems


# Split, so that this file does not match itself.
PLACES = re.compile(
    "|".join(
        [
            r"(?<![\w.$}/-])/(?:ro" + r"ot|ho" + r"me|wo" + r"rk|o" + r"pt)/\w",
            r"(?<![\w.$}/-])/t" + r"mp/\w",
            r"pypi\.o"
            + r"rg|pythonho"
            + r"sted|download\.py"
            + r"torch|deb\.deb"
            + r"ian|archive\.ubu"
            + r"ntu|--(?:extra-)?index-u"
            + r"rl",
        ]
    )
)


def machine_places(root: Path) -> list[str]:
    problems = []
    for path in files(root):
        name = path.relative_to(root)
        if (
            path.suffix not in TEXT
            or path.name == "LICENSE"
            or name.parts[:2] == ("bench", "results")
            or "corpus" in name.parts
        ):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = PLACES.search(line)
            if found:
                problems.append(
                    f"{name}:{number} names {found.group()}: a place of one machine, or a package"
                    " host"
                )
    return problems


def undocumented_formats(root: Path) -> list[str]:
    """A file that defines the magic of something on disk names its page in docs/formats; each page
    holds a worked example."""
    problems = []
    pages = {
        path.name: path.read_text()
        for path in files(root)
        if path.parent == root / "docs" / "formats" and path.suffix == ".md"
    }
    for path in files(root):
        if path.suffix not in CODE | {".py"} or is_test(path):
            continue
        text = path.read_text()
        if not re.search(
            r"^(?:inline |static )*constexpr [\w:\[\] ]*\bk\w*Magic\b[\[\]\d]*"
            r" ?[={]|^_?\w*MAGIC\w* = ",
            text,
            re.M,
        ):
            continue
        named = re.findall(r"docs/formats/(\w+\.md)", text)
        if not named:
            problems.append(
                f"{path.relative_to(root)} defines a magic but names no page of docs/formats"
            )
        problems += [
            f"{path.relative_to(root)} names docs/formats/{page}, which does not exist"
            for page in named
            if page not in pages
        ]
    for page, text in pages.items():
        if not re.search(r"(?:^|[\s`|])(?:[0-9a-fA-F]{2} ){7}[0-9a-fA-F]{2}", text):
            problems.append(f"docs/formats/{page} has no worked example in hexadecimal")
    return problems


def unfinished(root: Path) -> list[str]:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    return [
        f"{path.relative_to(root)}:{number} is marked unfinished"
        for path in files(root)
        if path.suffix in CODE | {".py", ".md", ".sh"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]


def dead_links(root: Path) -> list[str]:
    """Files of this repository that its pages link to or name in backticks with a folder exist."""
    problems = []
    for path in files(root):
        if path.suffix != ".md":
            continue
        text = path.read_text()
        targets = {
            target.split("#")[0]
            for target in re.findall(r"\]\(([^)\s]+)\)", text)
            if "://" not in target and not target.startswith("#")
        }
        targets = {(path.parent / target, target) for target in targets}
        targets |= {
            (root / target, target)
            for target in re.findall(
                r"`((?:src|cli|python|tests|docs|tools|bench)/[\w./-]+\.(?:cc|h|py|md|sh|txt))`",
                text,
            )
        }
        problems += [
            f"{path.relative_to(root)} names {target}, which does not exist"
            for place, target in sorted(targets, key=str)
            if not place.exists()
        ]
    return problems


def long_lines(root: Path) -> list[str]:
    """No line of a source has more than 100 columns."""
    return [
        f"{path.relative_to(root)}:{number} has {len(line)} columns; 100 is the most"
        for path in files(root)
        if path.suffix in CODE | {".py", ".pyi", ".c"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]


def long_architecture(root: Path) -> list[str]:
    """The page that a newcomer reads first has at most 150 lines."""
    path = root / "ARCHITECTURE.md"
    lines = len(path.read_text().splitlines()) if path.exists() else 0
    return [f"{path.name} has {lines} lines; 150 are the most"] if lines > 150 else []


RULES: list[Callable[[Path], list[str]]] = [
    upward_includes,
    coded_owners_below,
    friends,
    upward_imports,
    circles,
    set_from_outside,
    banned_words,
    unused_files,
    machine_places,
    undocumented_formats,
    unfinished,
    dead_links,
    long_lines,
    long_architecture,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    problems = rule(ROOT)
    assert not problems, "\n" + "\n".join(problems)


OFFLOAD = "python/stoker/offload/"
SEEN = CODED.removeprefix("src/")
CMAKE = "stoker_library(base SOURCES a.cc)"
# rule, files of a made-up tree, how many problems it must find there
BROKEN = [
    (
        upward_includes,
        {"src/stoker/io/x.cc": '#include "stoker/store/store.h"\n#include "stoker/base/a.h"'},
        1,
    ),
    (upward_includes, {"src/stoker/store/x.h": '#include "stoker/testing/sim.h"'}, 1),
    (upward_includes, {"src/stoker/optim/x.cc": '#include "stoker/memory/arena.h"'}, 1),
    (upward_includes, {"cli/x.cc": '#include "stoker/testing/sim.h"'}, 1),
    (
        upward_includes,
        {"cli/x.cc": '#include "curm/vdl.h"', "lab/curm/y.cc": '#include "curm/vdl.h"'},
        1,
    ),
    (upward_includes, {"src/stoker/io/x_test.cc": '#include "stoker/testing/sim.h"'}, 0),
    (coded_owners_below, {f"{CODED}/fold/fold.cc": f'#include "{SEEN}/commit/committer.h"'}, 1),
    (coded_owners_below, {f"{CODED}/map/map.h": f'#include "{SEEN}/coded_store.h"'}, 1),
    (coded_owners_below, {f"{CODED}/commit/commit.cc": f'#include "{SEEN}/fold/folder.h"'}, 0),
    (coded_owners_below, {f"{CODED}/fold/fold.cc": f'#include "{SEEN}/store.h"'}, 0),
    (coded_owners_below, {f"{CODED}/status.cc": f'#include "{SEEN}/write/writer.h"'}, 0),
    (coded_owners_below, {f"{CODED}/elsewhere/x.h": ""}, 1),
    (coded_owners_below, {f"{CODED}/fold/fold_test.cc": f'#include "{SEEN}/write/writer.h"'}, 0),
    (friends, {"src/stoker/store/local/x.h": "class A {\n  friend class B;\n};"}, 1),
    (friends, {"src/stoker/store/local/x.h": "// a friend\nclass A {\n};"}, 0),
    (upward_imports, {f"{OFFLOAD}paging/order.py": "import stoker.offload.steps.steps"}, 1),
    (upward_imports, {f"{OFFLOAD}paging/order.py": "from stoker.offload.steps import late"}, 1),
    (upward_imports, {f"{OFFLOAD}paging/order.py": "from ..steps.steps import Steps"}, 1),
    (upward_imports, {f"{OFFLOAD}run/state.py": "from stoker.offload import Session"}, 1),
    (
        upward_imports,
        {
            f"{OFFLOAD}model/moments.py": (
                "if TYPE_CHECKING:\n    from stoker.offload.run.session import Session"
            )
        },
        1,
    ),
    (
        upward_imports,
        {f"{OFFLOAD}activations/saved.py": "import stoker.offload.gradients.window"},
        1,
    ),
    (upward_imports, {f"{OFFLOAD}paging/order.py": "from . import pager\nimport torch"}, 0),
    (upward_imports, {f"{OFFLOAD}new.py": ""}, 1),
    (upward_imports, {f"{OFFLOAD}new/part.py": ""}, 1),
    (
        upward_imports,
        {f"{OFFLOAD}steps/steps.py": "from . import late\nimport stoker.offload.paging.order"},
        0,
    ),
    (
        circles,
        {
            f"{OFFLOAD}steps/late.py": "def f():\n    from . import steps",
            f"{OFFLOAD}steps/steps.py": "import stoker.offload.steps.update",
            f"{OFFLOAD}steps/update.py": (
                "if TYPE_CHECKING:\n    from stoker.offload.steps.late import Late"
            ),
        },
        1,
    ),
    (
        circles,
        {
            f"{OFFLOAD}__init__.py": "from .run.access import gather",
            f"{OFFLOAD}run/access.py": "from stoker.offload import open, gather",
            f"{OFFLOAD}open.py": "",
        },
        1,
    ),
    (
        circles,
        {
            "python/stoker/data/__init__.py": "from .order import Order",
            "python/stoker/data/order.py": "from stoker.data import names\nimport torch",
            "python/stoker/data/names.py": "",
        },
        0,
    ),
    (set_from_outside, {f"{OFFLOAD}run/x.py": "session.record.step = 1\nsession.left = True"}, 2),
    (set_from_outside, {f"{OFFLOAD}run/x.py": "before, steps.more = steps.more, True"}, 1),
    (set_from_outside, {f"{OFFLOAD}run/x.py": "for each in layers:\n    each.hooks += 1"}, 1),
    (
        set_from_outside,
        {
            f"{OFFLOAD}run/x.py": "class A:\n    def f(self, b):\n        self.n = b.n = 1",
            f"{OFFLOAD}run/y.py": "class A:\n    def f(self):\n        self.b.n = self.n = 1",
        },
        1,
    ),
    (
        set_from_outside,
        {
            f"{OFFLOAD}run/x.py": "@dataclass\nclass Home:\n    dirty: bool = False",
            f"{OFFLOAD}run/y.py": "home.dirty = True\nparam.tensor.grad = None",
            f"{OFFLOAD}steps/y.py": "home.dirty = True",
        },
        1,
    ),
    (banned_words, {"src/stoker/io/x.cc": "void f() { std::exit(1); }"}, 1),
    (banned_words, {"src/stoker/io/x.cc": "void f() { abort(); std::abort(); }"}, 2),
    (banned_words, {"src/stoker/base/check.cc": "void f() { std::abort(); }"}, 0),
    (
        banned_words,
        {"src/stoker/io/x.cc": 'void f() { printf("a"); std::cout << 1; fprintf(stderr, "b"); }'},
        3,
    ),
    (
        banned_words,
        {"src/stoker/io/x.h": "std::lock_guard<std::mutex> a;\nstd::condition_variable b;"},
        2,
    ),
    (banned_words, {"src/stoker/base/mutex.h": "std::mutex a;"}, 0),
    (banned_words, {"cli/x.cc": 'void f() { printf("a"); std::exit(2); }'}, 1),
    (banned_words, {"src/stoker/io/x.cc": 'char* f() { return std::getenv("A"); }'}, 1),
    (
        banned_words,
        {
            "src/stoker/io/x.cc": (
                'const char* f() { return "exit(1)"; } // getenv("A")\nvoid g() { pool.exit(); }'
            )
        },
        0,
    ),
    (banned_words, {"python/stoker/offload/x.py": "print(1)"}, 1),
    (
        banned_words,
        {"python/stoker/train/x.py": "import os, sys\nprint(1)\nos.environ['A']\nsys.exit(1)"},
        2,
    ),
    (banned_words, {"python/stoker/train/x.py": "import pickle\npickle.load(f)"}, 1),
    (
        unused_files,
        {
            "src/stoker/base/CMakeLists.txt": CMAKE,
            "src/stoker/base/a.cc": "",
            "src/stoker/base/b.cc": "",
            "src/stoker/base/ba.cc": "",
        },
        2,
    ),
    (
        unused_files,
        {"src/stoker/base/a.h": "", "src/stoker/base/b.h": '#include "stoker/base/a.h"'},
        1,
    ),
    (
        unused_files,
        {
            "bench/micro/CMakeLists.txt": "stoker_bench(io)",
            "bench/micro/io_bench.cc": "",
            "bench/micro/io_more_bench.cc": "",
        },
        1,
    ),
    (
        unused_files,
        {
            "python/stoker/x.py": "",
            "python/stoker/y.py": "from stoker import x",
            "python/stoker/__main__.py": "from . import y",
        },
        0,
    ),
    (unused_files, {"python/stoker/x.py": "", "python/stoker/xy.py": "from stoker import z"}, 2),
    (
        machine_places,
        {
            "a.md": "see /ho" + "me/me/stoker",
            "b.py": "p = '/t" + "mp/x'",
            "c.txt": "https://pypi.o" + "rg/simple",
        },
        3,
    ),
    (machine_places, {"a.md": "/nvme0/run, build/work/x, $HOME/work/x, out/tmp/y"}, 0),
    (
        undocumented_formats,
        {
            "src/stoker/io/x.h": "constexpr uint64_t kVolumeMagic = 1;",
            "python/stoker/a.py": "MAGIC = b'x'",
        },
        2,
    ),
    (
        undocumented_formats,
        {"src/stoker/io/x.h": "// docs/formats/no.md\ninline constexpr uint32_t kFrameMagic = 1;"},
        1,
    ),
    (undocumented_formats, {"docs/formats/x.md": "# a format without an example"}, 1),
    (
        undocumented_formats,
        {
            "docs/formats/x.md": "    53 54 4f 4b 45 52 56 31",
            "src/stoker/io/x.h": "// docs/formats/x.md\nconstexpr uint64_t kMagic = 1;",
        },
        0,
    ),
    (unfinished, {"src/stoker/io/x.cc": "// TO" + "DO: later", "README.md": "FIX" + "ME"}, 2),
    (
        dead_links,
        {
            "README.md": "[a](docs/no.md) and `src/stoker/io/no.cc`",
            "docs/x.md": "[up](../README.md)",
        },
        2,
    ),
    (long_architecture, {"ARCHITECTURE.md": 151 * "a\n"}, 1),
    (long_lines, {"src/stoker/io/x.cc": "// " + 98 * "a", "a.py": "# " + 98 * "a"}, 1),
]


@pytest.mark.parametrize(
    ("rule", "tree", "count"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_rule_can_fail(
    tmp_path: Path, rule: Callable[[Path], list[str]], tree: dict[str, str], count: int
) -> None:
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    problems = rule(tmp_path)
    assert len(problems) == count, "\n".join(problems)


def test_every_rule_has_a_tree_in_which_it_fails() -> None:
    assert {rule for rule, _, count in BROKEN if count} == set(RULES)


def test_make_sanitize_leaves_no_test_out_for_good() -> None:
    """`make soak` runs what a sanitizer leaves out, but for tests without threads under tsan."""

    def planned(target: str) -> str:
        words = ["make", "--dry-run", target]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    lab = "curm_test|curm_kill_test|shards_test"
    assert f'"{lab}"' in re.search(r"tools/sanitize.sh asan-ubsan .*", planned("sanitize"))[0]
    assert re.search(r'tools/sanitize.sh tsan \d+ "\w', planned("sanitize"))
    assert re.search(r"tools/sanitize.sh asan-ubsan \d+ none ", planned("soak"))
    soak = re.search(r'tools/sanitize.sh tsan \d+ "([^"]*)"', planned("soak"))
    assert soak and soak[1] == "classes_test|codec_test|optim_test"
