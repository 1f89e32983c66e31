"""`docs/api_fields.md` is generated from the tables that the server uses."""

# ruff: noqa: E402

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

for name in ("openai", "fastapi"):
    pytest.importorskip(name, reason=f"needs the package {name}")
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from bateleur.runner.serve.openai.fields import IGNORED, REFUSED, sampling_names
from bateleur.runner.serve.openai.requests import CHAT_FIELDS, COMPLETION_FIELDS
from bateleur.runner.serve.responses.body import ResponsesBody
from bateleur.runner.utils.vllm_names import SAMPLING

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api_fields.md").read_text(encoding="utf-8")
EVERYWHERE = {*IGNORED, *REFUSED, *SAMPLING, *sampling_names()}


def test_the_committed_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "api_fields_page.py"), run_name="__main__")
    assert capsys.readouterr().out == PAGE, "run python tools/api_fields_page.py > docs/api_fields.md"


def test_every_field_of_the_openai_client_has_a_line() -> None:
    chat = chat_params.CompletionCreateParamsBase.__annotations__
    assert {*chat} - EVERYWHERE - CHAT_FIELDS.keys() == set()
    assert {*CompletionCreateParamsBase.__annotations__} - EVERYWHERE - COMPLETION_FIELDS.keys() == set()
    assert {*ResponseCreateParamsBase.__annotations__} - EVERYWHERE - ResponsesBody.model_fields.keys() == set()


@pytest.mark.parametrize("name", sorted({*EVERYWHERE, *CHAT_FIELDS, *COMPLETION_FIELDS} - {"output_kind"}))
def test_every_field_has_a_line(name: str) -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert lines
    assert all(len(cell.strip()) > 3 for line in lines for cell in line.strip("|").split("|")[1:2])
