"""A complete configuration is read without transformers, and equals that of transformers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.checkpoint import open as opening
from bateleur.runner.checkpoint.families import FAMILIES

Tiny = Callable[..., tuple[Path, Any]]
PLAIN = ("nemotron_h", "llama")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders for which transformers is called, from now on."""
    found: list[Path] = []
    ask = opening._ask_transformers

    def told(path: Path, written: Any) -> Any:
        found.append(path)
        return ask(path, written)

    monkeypatch.setattr(opening, "_ask_transformers", told)
    return found


def spec_of(folder: Path) -> Any:
    """Return the spec, whatever the weights."""
    family, fields, _ = opening.read_config(folder)
    return family.read_spec(fields)


def spec_by_transformers(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, family, replace(FAMILIES[family], plain=frozenset()))  # type: ignore[arg-type]
        return spec_of(folder)


@pytest.mark.parametrize("family", [*PLAIN, "nemotron_h-experts"])
def test_what_transformers_writes_is_read_without_it(
    tiny_checkpoint: Tiny, asked: list[Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder, _ = tiny_checkpoint(family)
    alone = spec_of(folder)
    assert asked == [folder] * family.endswith("experts"), "those have a size that is null, which may mean another"
    assert alone == spec_by_transformers(folder, family.partition("-")[0], monkeypatch)


def test_no_other_family_is_plain_until_it_is_compared() -> None:
    assert {name for name, family in FAMILIES.items() if family.plain} == set(PLAIN)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": None, "num_key_value_heads": None, "num_attention_heads": 2}),
    ("llama", {"rope_parameters": None, "rope_theta": 5000.0}),
    ("llama", {"rope_parameters": {"rope_type": "default"}}),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("llama", {"tie_word_embeddings": None, "rms_norm_eps": None, "mlp_bias": None}),
    ("llama", {"something_new": 1}),
    ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp", "attention"]}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-*M-*"}),
    ("nemotron_h", {"conv_kernel": 9, "mamba_d_conv": 4}),
    ("nemotron_h", {"use_conv_bias": None, "mamba_hidden_act": None}),
]


@pytest.mark.parametrize(("family", "fields"), OTHERS, ids=range(len(OTHERS)))
def test_of_what_is_left_out_or_means_something_else_transformers_is_asked(
    tiny_checkpoint: Tiny,
    asked: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    fields: dict[str, Any],
) -> None:
    made, _ = tiny_checkpoint(family)
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    alone = spec_of(folder)
    assert asked == [folder]
    assert alone == spec_by_transformers(folder, family, monkeypatch)
