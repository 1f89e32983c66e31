"""`docs/fields.md` is generated from the field table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from bateleur.metadata import FIELDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")


def test_the_committed_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "fields_page.py"), run_name="__main__")
    assert capsys.readouterr().out == PAGE, "run python tools/fields_page.py > docs/fields.md"


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_field_has_its_line(name: str) -> None:
    field = FIELDS[name]
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == 7
    assert all(cells)
    assert str(field.dtype).endswith(cells[2])
    assert cells[3].startswith("host" if field.on_host else "device")
    assert cells[5:] == [field.doc, field.used_by]
