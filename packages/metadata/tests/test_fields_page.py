"""The page about the fields is the table, written out."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from bateleur.metadata import FIELDS
from bateleur.metadata.fields_page import fields_page

PAGE = Path(__file__).parents[3] / "docs" / "fields.md"


def test_the_committed_page_is_what_the_command_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bateleur.metadata.fields_page")
    runpy.run_module("bateleur.metadata.fields_page", run_name="__main__")
    written = capsys.readouterr().out
    assert written == fields_page()
    assert PAGE.read_text(encoding="utf-8") == written, (
        "run python -m bateleur.metadata.fields_page > docs/fields.md"
    )


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_field_has_its_line(name: str) -> None:
    field = FIELDS[name]
    (line,) = [line for line in fields_page().splitlines() if line.startswith(f"| `{name}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == 7
    assert all(cells)
    assert str(field.dtype).endswith(cells[2])
    assert cells[3].startswith(field.home.value)
    assert cells[5:] == [field.doc, field.used_by]
