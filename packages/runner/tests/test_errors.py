"""The tree of exceptions in the documentation is that of the classes."""

import ast
import re
from pathlib import Path

from bateleur.runner import errors

ROOT = Path(__file__).parents[3]


def drawn() -> dict[str, str]:
    """Return each name of the drawn tree, and its parent."""
    parents, path = {}, []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"( *)([A-Z][A-Za-z]+)(  .*)?$", line)
        if match and (match[1] or match[2].endswith("Error")):
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            parents[match[2]] = path[-2] if depth else ""
    return parents


def test_the_tree_is_the_one_that_is_drawn() -> None:
    parents = drawn()
    assert len(parents) > 15
    for name, parent in parents.items():
        if parent:
            assert parent in {base.__name__ for base in getattr(errors, name).__bases__}, name
    assert {name for name, parent in parents.items() if parent} == set(errors.__all__)


def test_every_exception_of_the_packages_is_in_it() -> None:
    parents, found = drawn(), set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if any(base in parents or base.endswith(("Error", "Exception")) for base in bases):
                    found.add(node.name)
    assert found == set(errors.__all__)


def test_other_names_of_their_modules_are_not_in_it() -> None:
    for name in ("BatchLimits", ""):
        assert not hasattr(errors, name)
    found: dict[str, type] = {}
    exec("from bateleur.runner.errors import *", found)
    assert found.keys() - {"__builtins__"} == set(errors.__all__)
