"""Fixtures of the runner's tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SERVED = ("serve", "replicas")
"""Folders of tests that need the packages of the extra `serve`, and `psutil`."""
SERVING = ("fastapi", "httpx", "psutil", "uvicorn")


class Unserved(pytest.Collector):
    """Stands for a folder that is skipped because packages are missing. No `pytest.Dir`, whose conftest is imported."""

    def collect(self) -> Iterator[pytest.Item]:
        missing = ", ".join(name for name in SERVING if find_spec(name) is None)
        pytest.skip(f"{self.name}: needs packages that are not installed: {missing}", allow_module_level=True)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    ours = path.parent == Path(__file__).parent and path.name in SERVED
    if ours and any(find_spec(name) is None for name in SERVING):
        return Unserved.from_parent(parent, name=path.name)
    return None


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """Tiny tensors gain nothing from more threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module that writes tiny checkpoints."""
    return importlib.import_module("tiny")


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """The module that drives a decoder without an engine."""
    return importlib.import_module("driver")


@pytest.fixture(scope="session")
def fake_llm() -> ModuleType:
    """The module with an engine that needs no model."""
    return importlib.import_module("fake_llm")


@pytest.fixture
def files(tmp_path: Path, fake_llm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `cli_files.Files`: `run` the command on a file of lines."""
    made = importlib.import_module("cli_files").Files(tmp_path, fake_llm)
    monkeypatch.setattr("bateleur.runner.cli.generate._open", made.open)
    return made


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Callable[..., tuple[Path, Any]]:
    """`tiny_checkpoint(family, **config)` -> (folder, transformers model); made once per session, not to be edited."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str, **overrides: Any) -> tuple[Path, Any]:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            model = tiny.make_model(family, **overrides)
            made[key] = tiny.save(model, tmp_path_factory.mktemp(family)), model
        return made[key]

    return get
