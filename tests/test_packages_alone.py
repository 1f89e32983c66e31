"""Each lower package is installed from its wheel and used alone, without the workspace."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[[str, Path], tuple[int, str]]
ROOT = Path(__file__).parents[1]
NEEDS = {
    "metadata": (),
    "cudagraph": (),
    "mamba": ("metadata",),
    "eagle": ("metadata", "cudagraph"),
    "runner": ("metadata", "cudagraph", "mamba", "eagle"),
}


def find_uv() -> str:
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv is not None, "uv is what runs these tests"
    return uv


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One wheel of each package, built as for a release."""
    out = tmp_path_factory.mktemp("wheels")
    for name in NEEDS:
        command = [find_uv(), "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-q"]
        command += ["--out-dir", str(out), str(ROOT / "packages" / name)]
        subprocess.run(command, check=True, cwd=ROOT)
    return {name: next(out.glob(f"bateleur_{name}-*.whl")) for name in NEEDS}


def readme_example(name: str) -> str:
    """The first Python block of a package's README."""
    text = (ROOT / "packages" / name / "README.md").read_text()
    return text.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_wheel_alone_runs_its_readme_example(
    name: str, wheels: dict[str, Path], fresh_without_workspace: Run, tmp_path: Path
) -> None:
    for needed in (name, *NEEDS[name]):
        shutil.unpack_archive(wheels[needed], tmp_path, "zip")
    status, found = fresh_without_workspace(f"import bateleur.{name} as p; print(p.__file__)", tmp_path)
    assert status == 0, found
    assert found.startswith(str(tmp_path)), "the wheel is what was imported"
    assert (tmp_path / "bateleur" / name / "py.typed").exists()
    assert not (tmp_path / "bateleur" / "__init__.py").exists(), "bateleur is a namespace"
    status, printed = fresh_without_workspace(readme_example(name), tmp_path)
    assert status == 0, printed


def test_wheels_hold_nothing_but_their_package(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name, wheel in wheels.items():
        target = tmp_path / name
        shutil.unpack_archive(wheel, target, "zip")
        assert {p.name for p in (target / "bateleur").iterdir()} == {name}
    assert wheels["runner"].stat().st_size < 16_000_000, "weights at most 16 MB in the wheel"


def test_each_package_needs_only_what_it_declares(
    wheels: dict[str, Path], fresh_without_workspace: Run, tmp_path: Path
) -> None:
    """Without a declared dependency the import fails: the table above allows no more than needed."""
    for name in ("mamba", "runner"):
        target = tmp_path / name
        shutil.unpack_archive(wheels[name], target, "zip")
        _, printed = fresh_without_workspace(f"from bateleur.{name} import *", target)
        assert "No module named 'bateleur." in printed


@pytest.mark.slow
def test_wheels_give_the_command_in_a_clean_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    """All five packages, installed as a user would, with third-party packages only."""
    env = tmp_path / "env"
    uv = [find_uv(), "--quiet", "--offline"]
    subprocess.run([*uv, "venv", "--python", sys.executable, str(env)], check=True)
    python = env / "bin" / "python"
    install = [*uv, "pip", "install", "--no-deps", "--python", str(python), *map(str, wheels.values())]
    subprocess.run(install, check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # Python searches a folder in a .pth file, but does not read that folder's own .pth files (editable installs).
    (Path(site) / "third_party.pth").write_text(sysconfig.get_paths()["purelib"])
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [env / "bin" / "bateleur", "generate", "import os", "--max-tokens", "4", "--device", "cpu"]
    done = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os")
    where = [python, "-c", "import bateleur.runner as p; print(p.__file__)"]
    found = subprocess.run(where, env=clean, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(site)
