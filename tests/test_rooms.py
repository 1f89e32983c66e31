"""Import rules: packages and the rooms of `runner` are in one order, and there are no import cycles."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): path
    for src in sorted(ROOT.glob("packages/*/src"))
    for path in sorted(src.rglob("*.py"))
}

PACKAGES = {
    "metadata": set(),
    "cudagraph": set(),
    "mamba": {"metadata"},
    "eagle": {"metadata", "cudagraph"},
    "runner": {"metadata", "cudagraph", "mamba", "eagle"},
}
"""The packages that each package may import."""

ROOMS = (
    *("assets", "utils", "errors", "outputs", "stats", "structured_outputs", "sampling_params"),
    *(
        "distributed",
        "models",
        "text",
        "structured",
        "config",
        "quantization",
        "checkpoint",
        "lora",
        "requests",
        "cache",
        "offload",
        "scheduling",
        "model_runner",
        "sampling",
    ),
    *(
        "spec_decode",
        "engine",
        "workers",
        "llm",
        "engine_thread",
        "async_llm",
        "serve",
        "replicas",
        "diagnose",
        "bench",
        "cli",
        "__main__",
    ),
)
"""Rooms of `runner`: a room imports those before it, never those after it."""


def imported(name: str) -> Iterator[str]:
    """The project's modules that a module imports, also under `TYPE_CHECKING` and in functions."""
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("bateleur."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bateleur"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in SOURCES else str(node.module)


def test_packages_import_only_what_the_table_allows() -> None:
    for name in SOURCES:
        package = name.split(".")[1]
        others = {module.split(".")[1] for module in imported(name)} - {package}
        assert others <= PACKAGES[package], name


def test_every_room_is_in_the_order() -> None:
    rooms = {name.split(".")[2] for name in SOURCES if name.startswith("bateleur.runner.")}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for name in SOURCES:
        if name.split(".")[1:3] == ["runner", room]:
            parts = [module.split(".") for module in imported(name)]
            taken = {part[2] for part in parts if part[1] == "runner" and len(part) > 2}
            assert taken <= allowed, f"{name} imports {sorted(taken - allowed)}"


def test_no_serving_code_imports_a_conformance_kit() -> None:
    """Conformance kits are for tests of custom backends, builders, recurrences and drafters.

    `errors` exports `ConformanceError`; the module with it is tiny and imported at the first use of the name.
    """
    allowed = "bateleur.metadata.conformance.errors"
    for name in SOURCES:
        if ".conformance" not in name:
            kits = {each for each in imported(name) if ".conformance" in each} - {allowed}
            assert not kits, name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_in_a_circle(package: str) -> None:
    """Checks modules one by one. A package's `__init__` may import its own modules."""
    graph = {}
    for name in SOURCES:
        if name.split(".")[1] == package:
            inits = {".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)}
            graph[name] = set(imported(name)) - inits - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
