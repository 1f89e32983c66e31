"""Prefixes in safetensors files, verified when read.

The header of a file depends only on its layout, its tokens and its checksum. A reader builds the header again and
compares both, so a file of another engine is refused with the reason. The checksum detects damage, not forgery: anyone
who can write files that an engine reads can change what it computes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.layout import Layout
from bateleur.runner.offload.rows import cut, join
from bateleur.runner.offload.whole_file import Opened, opened_file, write_whole
from bateleur.runner.utils.arguments import shown

FORMAT, VERSION = "bateleur-prefix", "1"
MAX_HEADER = 1 << 20
"""Maximum header size in bytes; a thousand layers need less."""
_TOKENS = "token_ids"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
}
_FOREIGN_TENSORS = "its tensors are not laid out as this engine's"


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV blocks of a prefix after its first `start` tokens, and the state at its end, on the host."""

    start: int
    """Tokens before the first block."""
    key: bytes
    """Prefix-cache key of all tokens up to the end."""
    token_ids: NDArray[np.int32]
    """Tokens of the blocks, and the one after them if blocks depend on it."""
    blocks: NDArray[np.uint8]
    """(n, block_bytes); n = 0 without attention, or if there is only a state."""
    page: NDArray[np.uint8] | None
    """(page_bytes,) the state after the last token; None if there is none."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Name, dtype and shape of one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_prefix(path: Path, layout: Layout, prefix: Prefix) -> int:
    """Write a file atomically by `write_whole`, and return its size in bytes."""
    named = {_TOKENS: np.ascontiguousarray(prefix.token_ids, "<i4").view(np.uint8)}
    if len(prefix.blocks):
        names = (each.name for each in layout.block_parts)
        named |= zip(names, cut(prefix.blocks, layout.block_parts), strict=True)
    if prefix.page is not None:
        names = (each.name for each in layout.page_parts)
        named |= zip(names, cut(prefix.page[None], layout.page_parts), strict=True)
    tensors = _tensors(layout, prefix)
    data = [named[each.name] for each in tensors]
    header = _header(layout, prefix, tensors, _checksum(data))
    return write_whole(path, [memoryview(header), *(each.data for each in data)])


def prefix_bytes(layout: Layout, prefix: Prefix) -> int:
    """Return the size of the file that `write_prefix` would write."""
    tensors = _tensors(layout, prefix)
    header = _header(layout, prefix, tensors, _checksum([]))  # checksums have equal length
    return len(header) + sum(each.num_bytes for each in tensors)


def read_prefix(path: Path, layout: Layout, *, follow: bool = False) -> Prefix:
    """Read a file that `write_prefix` wrote for this layout.

    follow: whether to accept a symbolic link. Raises PrefixRefused with the reason for any other file.
    """
    with opened_file(path, follow=follow) as opened:
        return _read(opened, layout)


def _read(opened: Opened, layout: Layout) -> Prefix:
    path = opened.path
    length = int.from_bytes(opened.read(8).tobytes(), "little")
    if length > min(MAX_HEADER, opened.size - 8):
        raise PrefixRefused("truncated", f"{path}: is no complete safetensors file")
    header = opened.read(length).tobytes()
    stored = _metadata(path, header)
    _compare(path, stored, layout)
    prefix = _allocate(opened, stored, layout)
    tensors, checksum = _tensors(layout, prefix), stored.get("checksum", "")
    if _header(layout, prefix, tensors, checksum)[8:] != header:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}")
    if opened.size != 8 + length + sum(each.num_bytes for each in tensors):
        raise PrefixRefused("truncated", f"{path}: has {opened.size} bytes, not as many as its header says")
    data = {each.name: opened.read(each.num_bytes) for each in tensors}
    if _checksum(list(data.values())) != checksum:
        raise PrefixRefused("corrupt", f"{path}: its checksum is wrong")
    prefix.token_ids[:] = data[_TOKENS].view("<i4")
    if len(prefix.blocks):
        join([data[each.name] for each in layout.block_parts], layout.block_parts, prefix.blocks)
    if prefix.page is not None:
        join([data[each.name] for each in layout.page_parts], layout.page_parts, prefix.page[None])
    return prefix


def _metadata(path: Path, header: bytes) -> dict[str, str]:
    try:
        stored = json.loads(header)["__metadata__"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise PrefixRefused("foreign", f"{path}: its header names no format") from error
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("version")) != (FORMAT, VERSION):
        raise PrefixRefused("foreign", f"{path}: is not of the format {FORMAT} {VERSION}")
    return {name: value for name, value in stored.items() if isinstance(value, str)}


def _compare(path: Path, stored: dict[str, str], layout: Layout) -> None:
    """Raise PrefixRefused if the stored layout differs, naming the first field that differs."""
    for name, ours in layout.fields.items():
        if (theirs := stored.get(f"layout.{name}")) != ours:
            differs = f"its {name} is {shown(theirs)}, and this engine's is {shown(ours)}"
            raise PrefixRefused("foreign", f"{path}: {differs}")
    if stored.get("layout") != layout.digest:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}")


def _allocate(opened: Opened, stored: dict[str, str], layout: Layout) -> Prefix:
    """Return an uninitialised prefix of the size that the header states, at most that of the file."""

    def refuse() -> NoReturn:
        raise PrefixRefused("foreign", f"{opened.path}: its header does not say which tokens it is of")

    try:
        start, end, key = int(stored["start"]), int(stored["end"]), bytes.fromhex(stored["key"])
    except (LookupError, ValueError):
        refuse()
    if not 0 <= start <= end < 1 << 31 or not end:
        refuse()
    if start % layout.block_size or end % layout.block_size:
        refuse()
    blocks = (end - start) // layout.block_size if layout.block_parts else 0
    has_page = stored.get("state") == "1" and bool(layout.page_parts)
    if 4 * (end - start) + blocks * layout.block_bytes + has_page * layout.page_bytes > opened.size:
        raise PrefixRefused("truncated", f"{opened.path}: has {opened.size} bytes, fewer than its header says")
    return Prefix(
        start,
        key,
        np.empty(end - start + layout.ahead, np.int32),
        np.empty((blocks, layout.block_bytes), np.uint8),
        np.empty(layout.page_bytes, np.uint8) if has_page else None,
    )


def _tensors(layout: Layout, prefix: Prefix) -> list[_Tensor]:
    """Return the tensors of a file, wide dtypes first, so that each tensor is aligned."""
    found = [_Tensor(_TOKENS, torch.int32, prefix.token_ids.shape)]
    if count := len(prefix.blocks):
        found += [_Tensor(each.name, each.dtype, (count, *each.shape)) for each in layout.block_parts]
    if prefix.page is not None:
        found += [_Tensor(each.name, each.dtype, each.shape) for each in layout.page_parts]
    return sorted(found, key=lambda each: -each.dtype.itemsize)


def _header(layout: Layout, prefix: Prefix, tensors: list[_Tensor], checksum: str) -> bytes:
    """Return the bytes before the data of a file."""
    end = prefix.start + len(prefix.token_ids) - layout.ahead
    metadata = {"format": FORMAT, "version": VERSION, "layout": layout.digest}
    metadata |= {f"layout.{name}": value for name, value in layout.fields.items()}
    metadata |= {"key": prefix.key.hex(), "start": str(prefix.start), "end": str(end)}
    metadata |= {"state": str(int(prefix.page is not None)), "checksum": checksum}
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for each in tensors:
        stop = start + each.num_bytes
        entries[each.name] = {"dtype": _NAMES[each.dtype], "shape": each.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checksum(data: list[NDArray[np.uint8]]) -> str:
    digest = blake2b(digest_size=16)
    for each in data:
        digest.update(each.data)
    return digest.hexdigest()
