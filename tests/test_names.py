"""Names in the documents can be imported."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROMISED = sorted(set(re.findall(r"`(bateleur(?:\.\w+)+)`", (ROOT / "docs/vllm.md").read_text())))


def found(name: str) -> Any:
    """A module, or an attribute of a module."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        return getattr(import_module(parent), last)


def test_there_are_names_to_look_for() -> None:
    assert len(PROMISED) > 20


@pytest.mark.parametrize("name", PROMISED)
def test_what_stands_beside_a_name_of_vllm_exists(name: str) -> None:
    assert found(name) is not None
