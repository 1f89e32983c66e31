"""Writes LoRA adapters as PEFT does, and the checkpoints that they are merged into."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def modules_of(checkpoint: Path) -> list[str]:
    """Linear layers of a checkpoint that an adapter may change, by the names of their modules."""
    tensors = load_file(checkpoint / "model.safetensors")
    refused = ("embed", "lm_head", "experts", "gate.weight", "mtp.", "router")
    names = [name for name, each in tensors.items() if each.ndim == 2 and name.endswith(".weight")]
    return [name.removesuffix(".weight") for name in names if not any(word in name for word in refused)]


def write_adapter(
    folder: Path, checkpoint: Path, modules: Iterable[str], *, rank: int = 3, seed: int = 0, **config: Any
) -> Path:
    """Write a random adapter for `modules` of a checkpoint."""
    tensors, found = load_file(checkpoint / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(seed)
    for module in modules:
        rows, columns = tensors[f"{module}.weight"].shape
        stem = f"base_model.model.{module}"
        found[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
        found[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 2
    folder.mkdir(parents=True)
    save_file(found, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merge(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint with the adapter added to its weights."""
    shutil.copytree(checkpoint, folder)
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((adapter / "adapter_config.json").read_text()),
    )
    low = load_file(adapter / "adapter_model.safetensors")
    for name, a in low.items():
        if ".lora_A." in name:
            b = low[name.replace(".lora_A.", ".lora_B.")]
            weight = tensors[name.removeprefix("base_model.model.").replace(".lora_A", "")]
            weight += config["lora_alpha"] / len(a) * (b @ a)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
