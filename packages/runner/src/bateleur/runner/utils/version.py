"""The version of this package."""

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

        return str(tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]["version"])
