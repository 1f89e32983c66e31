"""Checkpoints to be damaged."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.assets import shipped_model


def edit_json(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    value = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: each for name, each in value.items() if each is not None}))


@pytest.fixture(scope="session")
def refused() -> Callable[[str], AbstractContextManager[Any]]:
    """`with refused(message):` expects a ValueError of exactly this message."""
    return lambda message: pytest.raises(ValueError, match=rf"\A{re.escape(message)}\Z")


@pytest.fixture
def shipped_copy(tmp_path: Path) -> Callable[..., Path]:
    """`shipped_copy(file, **fields)` is a folder of the shipped model with fields of one JSON file replaced."""

    def make(name: str = "config.json", **fields: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(shipped_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "model.safetensors").symlink_to(shipped_model() / "model.safetensors")
        edit_json(folder / name, **fields)
        return folder

    return make
