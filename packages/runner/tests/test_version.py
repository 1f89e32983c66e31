"""The version of the package, installed or not."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from bateleur.runner.utils import version as module

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_an_installed_package_and_a_source_tree_have_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    expected = tomllib.loads(PROJECT.read_text())["project"]["version"]
    monkeypatch.setattr(module, "version", lambda name: f"installed {name}")
    assert module.package_version.__wrapped__() == "installed bateleur-runner"
    monkeypatch.setattr(module, "version", missing)
    assert module.package_version.__wrapped__() == expected
