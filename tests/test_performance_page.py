"""Figures and cost pages are up to date with the committed results."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
PAGES = {"performance_page.py": ROOT / "docs" / "performance.md", "scaling_page.py": ROOT / "docs" / "scaling.md"}


@pytest.fixture(scope="module")
def pictures() -> Any:
    """The script that draws the figures."""
    sys.path.append(str(TOOLS))
    return importlib.import_module("pictures")


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_what_the_command_writes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(TOOLS / name), run_name="__main__")
    page = PAGES[name].read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, f"run python tools/{name} > docs/{PAGES[name].name}"


def test_the_committed_pictures_are_made_of_the_committed_results(pictures: Any) -> None:
    """Compares the data in the figures: how they look depends on the version of matplotlib."""
    for name, picture in pictures.PICTURES.items():
        svg = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert pictures.described(svg) == pictures.plain(picture), f"run python tools/pictures.py ({name})"
        assert len(svg) < 60_000
        assert not re.search(r"<dc:date>|20\d\d-\d\d-\d\dT", svg), "a date would differ from run to run"
    assert {file.stem for file in pictures.FOLDER.iterdir()} == set(pictures.PICTURES)


def test_every_picture_that_is_shown_is_there() -> None:
    for page in PAGES.values():
        shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        assert shown, f"{page.name} shows pictures"
        for path in shown:
            assert (page.parent / path).is_file(), f"{page.name} shows {path}"


def test_a_picture_is_drawn_the_same_twice(pictures: Any, tmp_path: Path) -> None:
    picture = pictures.PICTURES["growth"]
    for name in ("one", "two"):
        pictures.draw(picture, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert pictures.described((tmp_path / "one").read_text()) == pictures.plain(picture)
