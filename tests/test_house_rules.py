"""The rules of CONTRIBUTING.md that a machine can hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py")) + sorted(ROOT.glob("tools/**/*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_thought(path: Path) -> None:
    text = path.read_text()
    assert text.isascii(), "sources are ASCII"
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("name", ["metadata", "cudagraph", "mamba", "eagle", "runner"])
def test_public_namespace_is_flat_and_sorted(name: str) -> None:
    package = __import__(f"bateleur.{name}", fromlist=["__all__"])
    names = list(package.__all__)
    assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) or names == sorted(
        names
    )
    for public in names:
        assert hasattr(package, public)


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("metadata", ("bateleur.cudagraph", "bateleur.mamba", "bateleur.eagle", "bateleur.runner", "triton")),
        ("cudagraph", ("bateleur.metadata", "bateleur.mamba", "bateleur.eagle", "bateleur.runner", "triton")),
        ("mamba", ("bateleur.cudagraph", "bateleur.eagle", "bateleur.runner", "triton")),
        ("eagle", ("bateleur.mamba", "bateleur.runner", "triton")),
        ("runner", ("transformers", "triton")),
    ],
)
def test_import_loads_only_what_the_design_allows(name: str, forbidden: tuple[str, ...]) -> None:
    code = (
        f"import sys, torch\nbefore = set(sys.modules)\nfrom bateleur.{name} import *\n"
        f"new = set(sys.modules) - before\nprint([m for m in new if m.startswith({forbidden!r})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_environment_variable_is_an_interface() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert "environ" not in text, path
        assert "getenv" not in text, path
