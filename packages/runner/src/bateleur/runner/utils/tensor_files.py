"""Lists the tensors of a checkpoint from the headers of its safetensors files, single or sharded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bateleur.runner.utils.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported dtypes of weights, by their names in safetensors."""
_MAPPED = DTYPES | {"F8_E4M3": torch.uint8, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
"""Dtypes of stored tensors, including those of quantised modules, and the dtypes that they are read as."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Name, shape, dtype and position of one tensor in a safetensors file.

    name: name in the file, before `renamed` changes its prefix. dtype: name in safetensors: `F32`, `BF16`, ... start:
    offset in the file in bytes. named: False if the index of the shards does not list the tensor, which is then read
    only if the model needs it. quantized: whether `mapped` computes the values from codes and scales. The loader rounds
    such values to the dtype of the model before any other conversion, except for factors on rows.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int
    named: bool = True
    quantized: ClassVar[bool] = False

    def mapped(self) -> Tensor:
        """Return the tensor as a copy-on-write memory map of its part of the file. float8 is returned as uint8 bits.

        Raises ValueError for an unsupported dtype, or if the file became shorter. The map is numpy's, because torch
        would reserve memory for the whole file.
        """
        if self.dtype not in _MAPPED:
            raise ValueError(f"{self.file}: {self.name} is {self.dtype}; supported are {', '.join(_MAPPED)}")
        if self.file.stat().st_size < self.start + self.num_bytes:
            raise ValueError(f"{self.file}: ends within {self.name}")
        raw = np.memmap(self.file, np.uint8, "c", self.start, (self.num_bytes,))
        return torch.from_numpy(raw).view(_MAPPED[self.dtype]).view(self.shape)


def list_tensors(folder: Path, other_prefixes: Sequence[tuple[str, str]] = ()) -> dict[str, TensorEntry]:
    """Return all tensors of `model.safetensors`, or of the shards in `model.safetensors.index.json`, by name.

    Names are changed by `renamed`. Tensors in a shard other than the one in the index are left out. Raises ValueError
    if there are no weights, a shard is missing, truncated or lacks a listed tensor, or two tensors have one name.
    """
    entries: dict[str, TensorEntry] = {}
    single = folder / SINGLE
    for entry in _headers(single) if single.is_file() else _indexed(folder):
        there = entries.setdefault(renamed(entry.name, other_prefixes), entry)
        if there is not entry and entry.named:
            raise ValueError(f"{entry.file}: {entry.name} is also in {there.file.name} as {there.name}")
    return entries


def renamed(name: str, other_prefixes: Sequence[tuple[str, str]]) -> str:
    """Return a tensor's name with the prefix used here. other_prefixes: pairs (prefix in files, prefix here)."""
    for other, ours in other_prefixes:
        if name.startswith(other):
            name = ours + name.removeprefix(other)
    return name


def _indexed(folder: Path) -> list[TensorEntry]:
    index = folder / INDEX
    if not index.is_file():
        shards = sorted(file.name for file in folder.glob("*.safetensors"))
        rule = "only safetensors weights can be read"
        if shards:
            rule = f"{len(shards)} other safetensors files are here ({shards[0]}, ...), which need this index"
        raise ValueError(f"{folder}: has neither {SINGLE} nor {INDEX}; {rule}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if not name or Path(name).name != name]:
        raise ValueError(f"{index}: {outside[0]!r} is not the name of a file in this folder")
    there = {file.name for file in folder.iterdir() if file.is_file()}
    if absent := [name for name in names if name not in there]:
        raise ValueError(f"{index}: names shards that are missing: {', '.join(absent)}")
    entries = [entry for name in names for entry in _headers(folder / name)]
    if lost := sorted(weight_map.items() - {(entry.name, entry.file.name) for entry in entries}):
        listed = ", ".join(f"{name} in {file}" for name, file in lost)
        raise ValueError(f"{index}: names tensors that are missing: {listed}")
    ours = [entry for entry in entries if weight_map.get(entry.name) == entry.file.name]
    return ours + [replace(entry, named=False) for entry in entries if entry.name not in weight_map]


def _headers(file: Path) -> list[TensorEntry]:
    try:
        with safe_open(file, framework="np"):  # checks the file against its header
            pass
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: is no complete safetensors file") from error
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found.append(TensorEntry(file, name, tuple(entry["shape"]), entry["dtype"], 8 + size + start, end - start))
    return found
