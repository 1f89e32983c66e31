"""Every Python block of every README runs as printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{index}")
    for path in READMES
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    if "print(" in block:
        assert capsys.readouterr().out


def test_every_readme_has_an_example() -> None:
    assert len(READMES) == 6
    for path in READMES:
        assert "```python\n" in path.read_text(), path


@pytest.mark.parametrize("name", ["metadata", "cudagraph"])
def test_the_first_example_is_read_at_a_glance(name: str) -> None:
    text = (ROOT / "packages" / name / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    assert len(example[1].splitlines()) <= 30


def test_links_lead_somewhere() -> None:
    for path in [*READMES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
