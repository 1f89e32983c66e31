"""Tensors of a checkpoint folder by name."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

_SAFETENSORS = "model.safetensors"
_PICKLE = "pytorch_model.bin"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError naming the file if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}: cannot be read as JSON{where}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}; it must hold a JSON object")
    return value


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's `model.safetensors`, single or sharded, by name. Files are mapped, not read.

    Raises:
        ValueError: no file, a missing shard, or a damaged file. A pickle is refused by name, because reading one may
            run code.
    """
    if (folder / _SAFETENSORS).is_file():
        return _open_safetensors(folder / _SAFETENSORS)
    index = folder / f"{_SAFETENSORS}.index.json"
    if index.is_file():
        tensors: dict[str, Tensor] = {}
        for file in _shards(index):
            opened = _open_safetensors(file)
            if twice := sorted(tensors.keys() & opened.keys()):
                raise ValueError(f"{file}: {twice[0]} is in another shard, too")
            tensors |= opened
        return tensors
    for name in (_PICKLE, f"{_PICKLE}.index.json"):
        if (folder / name).is_file():
            raise ValueError(f"{folder / name}: a pickle, which is never read; weights are read from {_SAFETENSORS}")
    raise ValueError(f"{folder}: holds no {_SAFETENSORS}, single or sharded")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    names, there = sorted(set(weight_map.values())), {file.name for file in index.parent.iterdir()}
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"{index}: {missing[0]!r} is not a file in this folder")
    return [index.parent / name for name in names]


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ValueError(
            f"{file}: reading it needs the package safetensors (pip install 'bateleur-eagle[checkpoints]')"
        ) from error
    found, name = {}, None
    try:
        tensors: Any = safe_open(file, framework="pt")
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            found[name] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        what = "is no complete safetensors file" if name is None else f"{name} cannot be read: {error}"
        raise ValueError(f"{file}: {what}") from error
    return found
