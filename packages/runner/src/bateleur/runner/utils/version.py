"""The version of this package."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def package_version() -> str:
    """Return the version of `bateleur-runner`: of the installed package, else of the source tree's `pyproject.toml`."""
    try:
        return version("bateleur-runner")
    except PackageNotFoundError:
        import tomllib

        project = Path(__file__).parents[4] / "pyproject.toml"
        return str(tomllib.loads(project.read_text())["project"]["version"])
