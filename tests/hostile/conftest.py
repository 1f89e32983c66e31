"""Checkpoints to be damaged."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

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


TINY = Path(__file__).parents[2] / "packages" / "runner" / "tests" / "tiny.py"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(family)` is a folder of a tiny random model whose tokens are printable characters; not to be edited."""
    spec = importlib.util.spec_from_file_location("bateleur_runner_tests_tiny", TINY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            with torch.random.fork_rng():
                folder = module.save(module.make_model(family), tmp_path_factory.mktemp(family))
            write_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
            made[family] = folder
        return made[family]

    return make


def write_tokenizer(folder: Path, size: int) -> None:
    """One token for each of `size` printable characters, and nothing special about any of them."""
    vocab = {chr(33 + i): i for i in range(size)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
