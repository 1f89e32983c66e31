"""Files and weights that are larger than memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bateleur.runner import LLM
from bateleur.runner.checkpoint.open import load_model, open_checkpoint


@pytest.fixture
def folder(tiny_checkpoint: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama")[0], tmp_path / "llama"))


def test_a_file_larger_than_memory_is_read_tensor_by_tensor(folder: Path) -> None:
    """torch's memory mapping would need memory for the whole file, unused tensors included."""
    file = folder / "model.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(file).items()}  # of a file that is written to
    old = file.read_bytes()
    size = int.from_bytes(old[:8], "little")
    header, data, huge = json.loads(old[8 : 8 + size]), old[8 + size :], 2**43
    end = len(data)
    header["mtp.unused"] = {"dtype": "U8", "shape": [huge], "data_offsets": [end, end + huge]}
    new = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(new).to_bytes(8, "little") + new + data)
        opened.truncate(opened.tell() + huge)
    checkpoint = open_checkpoint(folder)
    assert [*checkpoint.unused] == ["mtp.unused"]
    loaded = load_model(checkpoint, torch.float32, "cpu").weights()
    assert torch.equal(loaded["embedding"], before["model.embed_tokens.weight"])
    assert torch.equal(loaded["lm_head"], before["lm_head.weight"])


def test_weights_that_do_not_fit_are_refused_before_any_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)
    stored = sum(each.nbytes for each in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr("bateleur.runner.checkpoint.open.free_main_memory", lambda: stored - 1)
    monkeypatch.setattr("bateleur.runner.checkpoint.open.fill_weights", None)
    said = f"{folder}: its weights are {stored} bytes in files, and in torch.float32 take {stored}; {stored - 1} bytes"
    with pytest.raises(ValueError, match=said + " of memory are free"):
        LLM(folder, device="cpu", skip_tokenizer_init=True)
    monkeypatch.undo()
    monkeypatch.setattr("bateleur.runner.checkpoint.open.free_main_memory", lambda: stored // 2)
    assert load_model(checkpoint, torch.bfloat16, "cpu").dtype == torch.bfloat16


def test_a_file_that_becomes_shorter_is_told(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"model\.safetensors: ends within model\.\S+$"):
        load_model(checkpoint, torch.float32, "cpu")
