"""python/stoker/_core.pyi against the compiled module: the same names, with the same parameters and
defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from stoker import _core

STUB = ast.parse((Path(__file__).parents[2] / "python" / "stoker" / "_core.pyi").read_text())
# what every class of nanobind has; __init__ where it cannot be called
UNTYPED = {"__new__", "__module__", "__doc__", "__init__"}


def parameters(function: ast.FunctionDef, defaults: tuple = ()) -> list[tuple[str, Any]]:
    """(name, default) of each but self and **; a default of the module is a place in `defaults`."""
    args = function.args
    names = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    values = (
        [None] * (len(names) - len(args.defaults) - len(args.kw_defaults))
        + args.defaults
        + args.kw_defaults
    )

    def value(node: ast.expr | None) -> Any:
        if node is None:
            return "required"
        given = eval(compile(ast.Expression(node), "stub", "eval"))  # 1 << 20
        return defaults[given.place] if isinstance(given, Place) else given

    return [
        (arg.arg, value(default))
        for arg, default in zip(names, values, strict=True)
        if arg.arg != "self"
    ]


class Place:
    def __init__(self, place: int) -> None:
        self.place = place


def of_module(function: Any) -> list[tuple[str, Any]]:
    ((signature, _, defaults),) = function.__nb_signature__  # no overloads
    # what stands in [] is no Python
    arrays_named = re.sub(r"ndarray\[[^]]*\]", "ndarray", signature)
    text = re.sub(r"\\(\d+)", r"Place(\1)", arrays_named) + ": ..."
    return parameters(ast.parse(text).body[0], defaults or ())


def names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    named = {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return named | {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}


def test_the_stub_has_the_modules_names():
    private = {"__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
    assert names(STUB.body).keys() == set(dir(_core)) - private


@pytest.mark.parametrize(
    "node",
    [node for node in STUB.body if isinstance(node, ast.FunctionDef)],
    ids=lambda node: node.name,
)
def test_a_function_has_its_parameters(node):
    assert parameters(node) == of_module(getattr(_core, node.name))


@pytest.mark.parametrize(
    "node",
    [node for node in STUB.body if isinstance(node, ast.ClassDef)],
    ids=lambda node: node.name,
)
def test_a_class_has_its_members(node):
    members, known = vars(getattr(_core, node.name)), names(node.body)
    # __buffer__ is a slot of the type
    assert known.keys() - {"__init__", "__buffer__"} == members.keys() - UNTYPED
    for name, member in known.items():
        if name == "__buffer__":
            continue
        if any(
            isinstance(decorator, ast.Name) and decorator.id == "property"
            for decorator in member.decorator_list
        ):
            assert isinstance(members[name], property), name
        else:
            assert parameters(member) == of_module(members[name]), name
