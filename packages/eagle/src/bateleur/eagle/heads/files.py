"""Tensors of a checkpoint folder by name, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

_SAFETENSORS = "model.safetensors"
_PICKLE = "pytorch_model.bin"


class TensorFiles(Mapping[str, Tensor]):
    """Maps names to tensors on the CPU; a tensor is read when it is accessed."""

    def __init__(self, read: Mapping[str, Callable[[], Tensor]]) -> None:
        self._read = dict(read)

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def rename(self, rename: Callable[[str], str]) -> TensorFiles:
        """Return the same tensors under the names `rename(name)`. Raises `ValueError` if two get the same name."""
        read: dict[str, Callable[[], Tensor]] = {}
        origin: dict[str, str] = {}
        for name, reader in self._read.items():
            if (new := rename(name)) in read:
                raise ValueError(f"{origin[new]} and {name} are the same weight, {new}")
            read[new], origin[new] = reader, name
        return TensorFiles(read)


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


def open_tensors(folder: Path) -> TensorFiles:
    """Return all tensors of a folder's `model.safetensors`, single or sharded.

    Raises:
        ValueError: no file, a missing shard, or a damaged file. A pickle is refused by name, because reading one may
            run code.
    """
    if (folder / _SAFETENSORS).is_file():
        return TensorFiles(_open_safetensors(folder / _SAFETENSORS))
    index = folder / f"{_SAFETENSORS}.index.json"
    if index.is_file():
        read: dict[str, Callable[[], Tensor]] = {}
        for file in _shards(index):
            opened = _open_safetensors(file)
            if twice := sorted(read.keys() & opened.keys()):
                raise ValueError(f"{file}: {twice[0]} is in another shard, too")
            read |= opened
        return TensorFiles(read)
    for name in (_PICKLE, f"{_PICKLE}.index.json"):
        if (folder / name).is_file():
            raise ValueError(f"{folder / name}: a pickle, which is never read; weights are read from {_SAFETENSORS}")
    raise ValueError(f"{folder}: holds no {_SAFETENSORS}, single or sharded")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    names, there = sorted(set(weight_map.values())), {file.name for file in index.parent.iterdir()}
    for name in names:
        if name not in there:
            raise ValueError(f"{index}: {name!r} is not a file in this folder")
    return [index.parent / name for name in names]


def _open_safetensors(file: Path) -> dict[str, Callable[[], Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ValueError(
            f"{file}: reading it needs the package safetensors (pip install 'bateleur-eagle[checkpoints]')"
        ) from error
    try:
        tensors: Any = safe_open(file, framework="pt")
        names = list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: is no complete safetensors file") from error

    def read(name: str) -> Tensor:
        try:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise ValueError(f"{file}: {name} cannot be read: {error}") from error

    return {name: partial(read, name) for name in names}
