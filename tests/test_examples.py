"""Every example runs as a user would run it, and its assertions hold."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs in this process, which has imported torch. The examples assert what they claim."""
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search("equal|the same", capsys.readouterr().out)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_one_package_alone(path: Path) -> None:
    used = set(re.findall(r"bateleur\.(\w+)", path.read_text()))
    assert used == {path.stem.split("_")[0]}
    assert f"(examples/{path.name})" in (ROOT / "README.md").read_text()
    assert f"(../../examples/{path.name})" in (ROOT / "packages" / used.pop() / "README.md").read_text()
