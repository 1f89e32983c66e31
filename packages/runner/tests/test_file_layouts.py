"""Layouts of files that trainers and other tools write: those that transformers reads are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import open_checkpoint

Tensors = dict[str, torch.Tensor]
PROMPT = [1, 5, 9, 3, 7, 2]
OUTER = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 16, "num_heads": 2},
}


class Saved:
    """A tiny text model: configuration, tensors, and generated tokens."""

    def __init__(self, home: Path, family: str) -> None:
        model = tiny.make_model(family)
        folder = tiny.save(model, home)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.expected = written(folder)


def written(folder: Path) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=32, max_num_seqs=1)
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


def write(folder: Path, config: dict[str, Any], files: dict[str, Tensors], index: Any = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file({key: each.clone() for key, each in tensors.items()}, folder / name, {"format": "pt"})
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    known: dict[str, Saved] = {}

    def make(family: str) -> Saved:
        if family not in known:
            known[family] = Saved(tmp_path_factory.mktemp("saved") / "model", family)
        return known[family]

    return make


def vision(prefix: str) -> Tensors:
    return {f"{prefix}blocks.0.weight": torch.ones(3, 3), f"{prefix}merger.weight": torch.ones(2)}


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + name.removeprefix(old) if name.startswith(old) else name: each for name, each in tensors.items()}


def as_transformers_reads(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
    return list(ids[0, len(PROMPT) :].tolist())


LAYOUTS: dict[str, Callable[[Saved], tuple[dict[str, Any], Tensors]]] = {
    "vision weights are left over": lambda s: (s.config, s.tensors | vision("model.visual.")),
    "vision weights are left over under their old name": lambda s: (s.config, s.tensors | vision("visual.")),
    "a text model with the larger architecture": lambda s: (
        s.config | {"architectures": ["Qwen3_5ForConditionalGeneration"]},
        s.tensors,
    ),
    "a larger model with the old name of its vision weights": lambda s: (
        OUTER | {"text_config": s.config},
        renamed(s.tensors, "model.", "model.language_model.") | vision("visual."),
    ),
    "a larger model with the architecture of the text": lambda s: (
        OUTER | {"text_config": s.config, "architectures": ["Qwen3_5ForCausalLM"]},
        renamed(s.tensors, "model.", "model.language_model."),
    ),
    "a base model": lambda s: (s.config, renamed(s.tensors, "model.", "")),
    "a base model that says so": lambda s: (
        s.config | {"architectures": ["Qwen3_5TextModel"]},
        renamed(s.tensors, "model.", ""),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_other_tools(saved: Callable[[str], Saved], tmp_path: Path, layout: str) -> None:
    model = saved("qwen3_5_text")
    config, tensors = LAYOUTS[layout](model)
    folder = write(tmp_path / "model", config, {"model.safetensors": tensors})
    assert as_transformers_reads(folder) == model.expected
    assert written(folder) == model.expected


@pytest.mark.parametrize("family", ["llama", "nemotron_h", "qwen3_5_moe_text", "lfm2"])
def test_a_base_model_of_any_family(saved: Callable[[str], Saved], tmp_path: Path, family: str) -> None:
    model = saved(family)
    prefix = next(iter(name for name in model.tensors if "embed" in name)).partition(".")[0] + "."
    folder = write(tmp_path / "model", model.config, {"model.safetensors": renamed(model.tensors, prefix, "")})
    assert written(folder) == model.expected


@pytest.fixture
def shards(saved: Callable[[str], Saved]) -> tuple[Saved, dict[str, Tensors], dict[str, str]]:
    """A model, its two shards, and their index."""
    model = saved("llama")
    names = list(model.tensors)
    files: dict[str, Tensors] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for i, name in enumerate(names):
        files[f"model-{1 + i % 2}.safetensors"][name] = model.tensors[name]
    return model, files, {name: file for file, tensors in files.items() for name in tensors}


@pytest.mark.parametrize("overlay", ["a.safetensors", "z.safetensors", "model-2.safetensors"])
def test_the_index_says_which_copy_counts(
    shards: tuple[Saved, dict[str, Tensors], dict[str, str]], tmp_path: Path, overlay: str
) -> None:
    model, files, index = shards
    name = next(iter(files["model-1.safetensors"]))
    files.setdefault(overlay, {})[name] = model.tensors[name]
    files["model-1.safetensors"][name] = torch.zeros_like(model.tensors[name])
    assert written(write(tmp_path / "model", model.config, files, index | {name: overlay})) == model.expected


def test_what_the_index_does_not_name(shards: tuple[Saved, dict[str, Tensors], dict[str, str]], tmp_path: Path) -> None:
    """Such a tensor is read if the model needs it."""
    model, files, index = shards
    files["model-2.safetensors"]["something.else"] = torch.ones(2)
    needed = next(iter(files["model-1.safetensors"]))
    del index[needed]
    folder = write(tmp_path / "model", model.config, files, index)
    assert as_transformers_reads(folder) == model.expected
    assert written(folder) == model.expected
    assert list(open_checkpoint(folder).unused) == ["something.else"]


def test_what_no_reader_knows_is_refused(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    model = saved("qwen3_5_text")
    for names in (
        model.tensors | {"something.else": torch.ones(2)},
        renamed(model.tensors, "model.", "language_model.model."),
    ):
        folder = write(tmp_path / f"model-{len(names)}", model.config, {"model.safetensors": names})
        with pytest.raises(ValueError, match=r"do not fit Qwen3_5ForCausalLM:\n +(surplus|missing)"):
            open_checkpoint(folder)
    folder = write(tmp_path / "no index", model.config, {"model-1.safetensors": model.tensors})
    with pytest.raises(
        ValueError, match=r"1 other safetensors files are here \(model-1.safetensors, ...\), which need"
    ):
        open_checkpoint(folder)
