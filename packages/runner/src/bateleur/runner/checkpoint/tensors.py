"""Where each tensor of a checkpoint lies: safetensors files, single or sharded, read by their headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from bateleur.runner.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file."""

    file: Path
    name: str
    """As the file has it, whatever prefix the family prefers."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: `F32`, `BF16`, ..."""


def list_tensors(folder: Path, other_prefixes: Sequence[tuple[str, str]] = ()) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint folder, by name.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names.
        other_prefixes: (other, ours); names that begin with the other prefix are listed under ours.

    Raises:
        ValueError: no weights, a shard that is missing, truncated or lacks a tensor of the index, or a tensor that
            occurs twice.
    """
    entries: dict[str, TensorEntry] = {}
    for file in _files(folder):
        for entry in _headers(file):
            name = entry.name
            for other, ours in other_prefixes:
                if name.startswith(other):
                    name = ours + name.removeprefix(other)
            if name in entries:
                raise ValueError(
                    f"{file}: {entry.name} is also in {entries[name].file.name} as {entries[name].name}"
                )
            entries[name] = entry
    return entries


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; only safetensors weights can be read"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    files = {name: folder / name for name in sorted(set(weight_map.values()))}
    outside = [name for name in files if not name or Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: {outside[0]!r} is not the name of a file in this folder")
    there = {file.name for file in folder.iterdir() if file.is_file()}
    absent = [name for name in files if name not in there]
    if absent:
        raise ValueError(f"{index}: names shards that are missing: {', '.join(absent)}")
    held = {(entry.name, file.name) for file in files.values() for entry in _headers(file)}
    lost = sorted(item for item in weight_map.items() if item not in held)
    if lost:
        listed = ", ".join(f"{name} in {file}" for name, file in lost)
        raise ValueError(f"{index}: names tensors that are missing: {listed}")
    return list(files.values())


def _headers(file: Path) -> list[TensorEntry]:
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
            return [
                TensorEntry(file, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()
            ]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: is no complete safetensors file") from error
