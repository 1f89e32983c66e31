"""The rules of CONTRIBUTING.md that can be checked automatically."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for where in ("packages/*/src", "packages/mamba/tests/oracle", "tools")
    for path in sorted(ROOT.glob(f"{where}/**/*.py"))
]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 140
"""Limit for functions compiled by Triton: they keep state in registers and cannot be split by calls."""
MAX_ARGUMENTS = 7
MAX_ATTRIBUTES = 20
OTHERS_INTERFACES = {"SamplingParams": "its fields are vLLM's"}
"""Classes whose attributes are given by an interface that is not ours, and the reason."""


CALLED = [
    path
    for package in ("eagle", "runner")
    for path in sorted(ROOT.glob(f"packages/{package}/src/**/*.py"))
    if path.parent.name != "kernels"
]


@cache
def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.walk(ast.parse(path.read_text()))
    return [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_a_file_is_one_thought() -> None:
    """One test for all files: a test per file would take longer to collect than to run."""
    for path in SOURCES:
        text = path.read_text()
        assert text.isascii(), f"{path}: sources are ASCII"
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for node in _functions(path):
            length = (node.end_lineno or 0) - node.lineno + 1
            kernel = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
            most = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
            assert length <= most, f"{path}: {node.name} has {length} lines"


def test_a_call_can_be_read() -> None:
    """At most seven arguments, and no tuple that is only made to be unpacked into one call.

    Operators have more arguments, as kernels do; so has `SamplingParams`, whose fields are vLLM's.
    """
    for path in CALLED:
        for function in _functions(path):
            every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            names = [each.arg for each in every if each.arg not in ("self", "cls")]
            what = f"{path}: {function.name}"
            assert len(names) <= MAX_ARGUMENTS or path.stem == "sampling_params", what
            assert not _packed_for_one_call(function), what


def test_a_class_has_few_attributes() -> None:
    """Fields of a dataclass and what methods assign to `self`; inherited ones count for the base class."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in OTHERS_INTERFACES:
                found = _attributes(node)
                assert len(found) <= MAX_ATTRIBUTES, f"{path}: {node.name} has {len(found)} attributes"


def _attributes(definition: ast.ClassDef) -> set[str]:
    """Names of the attributes that a class declares or assigns."""
    fields = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if not ast.unparse(node.annotation).startswith("ClassVar")
    }
    return fields | {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _packed_for_one_call(function: ast.AST) -> set[str]:
    """Names of tuples that are packed to be unpacked once."""
    packed, unpacked = set(), []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            packed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for each in node.args if isinstance(node, ast.Call) else ():
            if isinstance(each, ast.Starred):
                assert not isinstance(each.value, ast.Tuple), ast.unparse(node)
                unpacked += [each.value.id] if isinstance(each.value, ast.Name) else []
    return {name for name in packed if unpacked.count(name) == 1}


@pytest.mark.parametrize("name", ["metadata", "cudagraph", "mamba", "eagle", "runner"])
def test_public_namespace_is_flat_and_sorted(name: str) -> None:
    package = __import__(f"bateleur.{name}", fromlist=["__all__"])
    names = list(package.__all__)
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) or names == sorted(names)
    for public in names:
        assert hasattr(package, public)


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("metadata", ("bateleur.cudagraph", "bateleur.mamba", "bateleur.eagle", "bateleur.runner", "triton")),
        ("cudagraph", ("bateleur.metadata", "bateleur.mamba", "bateleur.eagle", "bateleur.runner", "triton")),
        ("mamba", ("bateleur.cudagraph", "bateleur.eagle", "bateleur.runner", "triton")),
        ("eagle", ("bateleur.mamba", "bateleur.runner", "triton")),
        ("runner", ("transformers", "triton", "llguidance")),
    ],
)
def test_import_loads_only_what_the_design_allows(
    modules_of: Callable[..., list[str]], name: str, forbidden: tuple[str, ...]
) -> None:
    assert not [module for module in modules_of(name, names=True) if module.startswith(forbidden)]


def test_no_environment_variable_is_an_interface() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"\benviron\b", text), path
        assert "getenv" not in text, path


UNASKED = """
import sys
from bateleur.runner.cli import main
from bateleur.runner import *
assert "transformers" not in sys.modules, "by importing the package"
assert main(["generate", "import os", "--max-tokens", "2", "--device", "cpu"]) == 0
found = {name.partition(".")[0] for name in sys.modules}
print(sorted(found & {"transformers", "huggingface_hub", "jinja2", "triton", "sympy"} - before))
"""


def test_the_shipped_model_is_opened_without_transformers(fresh: Callable[[str], str]) -> None:
    """Importing transformers takes a third of torch's import time and is not needed here; see
    `bateleur.runner.checkpoint`.
    """
    before = "import sys; before = {name.partition('.')[0] for name in sys.modules}"
    assert fresh(before + UNASKED).splitlines()[-1] == "[]"
