"""Opening a Hugging Face checkpoint folder: what it is, and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bateleur.runner.arguments import require_paths
from bateleur.runner.checkpoint.families import FAMILIES, Family
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import Names
from bateleur.runner.checkpoint.tensors import TensorEntry, list_tensors
from bateleur.runner.checkpoint.weights import (
    check_weights,
    checkpoint_dtype,
    fill_weights,
    resolve_tied,
    split_unused,
)
from bateleur.runner.config.dtypes import DTYPES
from bateleur.runner.json_file import read_json
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose configuration is supported and whose weights are complete; nothing is loaded yet."""

    path: Path
    spec: ModelSpec
    config: Any
    """The transformers configuration object."""
    dtype: torch.dtype
    """What most weights are stored in."""
    names: Names
    tensors: Mapping[str, TensorEntry]
    """By the names that `names` uses."""
    unused: tuple[str, ...]
    """Known tensors that the model does not need, such as NemotronH's `mtp.*`."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read a folder's `config.json` and the headers of its weights.

    Raises:
        ValueError: the folder is no checkpoint, its architecture is not supported (the supported ones are named), a
            size in its configuration is impossible, a file is damaged, or any weight is missing, surplus or misshapen
            (all of them are listed).
    """
    require_paths(model=path)
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path}: is no folder; a checkpoint is a folder with config.json and safetensors weights"
        )
    family = _family(path)
    config = _read_config(path)
    try:
        spec = family.read_spec(ConfigFields(config))
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    spec = replace(spec, eos_token_ids=_eos_token_ids(path, spec))
    tensors, unused = split_unused(list_tensors(path, family.other_prefixes))
    spec, names = resolve_tied(spec, family.names(spec), tensors)
    try:
        check_weights(spec, names, tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Checkpoint(path, spec, config, checkpoint_dtype(tensors), names, tensors, unused)


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> HybridDecoder:
    """The decoder with its weights, converted to `dtype`, on `device`.

    A, D and dt_bias of Mamba layers are float32 whatever `dtype` is.
    """
    model = HybridDecoder(checkpoint.spec, dtype=dtype, device=device)
    fill_weights(model, checkpoint.names, checkpoint.tensors)
    declared_tied = bool(getattr(checkpoint.config, "tie_word_embeddings", False))
    if declared_tied and model.lm_head is not model.embedding and torch.equal(model.lm_head, model.embedding):
        model.tie_lm_head()
    return model


def resolve_dtype(
    dtype: str | torch.dtype, checkpoint: Checkpoint, device: torch.device | str
) -> torch.dtype:
    """The dtype to compute in: a name, a torch dtype, or "auto" (float32 on CPU, else the checkpoint's own).

    Raises:
        ValueError: the dtype is unknown or not supported.
    """
    if dtype == "auto":
        on_cpu = torch.device(device).type == "cpu"
        return torch.float32 if on_cpu or checkpoint.dtype not in DTYPES.values() else checkpoint.dtype
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; supported are 'auto', {', '.join(map(repr, DTYPES))}")
    return resolved


def _family(path: Path) -> Family:
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: holds no config.json; it is no Hugging Face checkpoint")
    config = read_json(file)
    family = FAMILIES.get(str(config.get("model_type")))
    architectures = config.get("architectures") or ([family.architecture] if family else [])
    if family is None or family.architecture not in architectures:
        found = (
            f"architectures {architectures}" if architectures else f"model_type {config.get('model_type')!r}"
        )
        if config.get("auto_map"):
            found += ", whose own code is never run,"
        supported = ", ".join(sorted(f.architecture for f in FAMILIES.values()))
        raise ValueError(f"{file}: {found} is not supported; supported are {supported}")
    if config.get("quantization_config"):
        raise ValueError(f"{file}: quantization_config is set; quantised weights are not supported")
    return family


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the validators of transformers raise what they like
        file = path / "config.json"
        raise ValueError(f"{file}: transformers refuses it: {type(error).__name__}: {error}") from error


def _eos_token_ids(path: Path, spec: ModelSpec) -> tuple[int, ...]:
    """The ids that end a text, with those that only generation_config.json knows."""
    file = path / "generation_config.json"
    if not file.is_file():
        return spec.eos_token_ids
    value = read_json(file).get("eos_token_id")
    more = value if isinstance(value, list) else [value]
    ids = (*spec.eos_token_ids, *(i for i in more if isinstance(i, int)))
    return tuple(dict.fromkeys(ids))
