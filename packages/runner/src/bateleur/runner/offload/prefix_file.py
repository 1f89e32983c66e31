"""Prefixes in safetensors files, verified when read.

The metadata of a file name its layout and its tokens, so a file of another engine is refused with the reason. The
checksum detects damage, not forgery: anyone who can write files that an engine reads can change what it computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.rows import RowLayout, RowPart
from bateleur.runner.offload.whole_file import OpenFile, opened_file, write_whole
from bateleur.runner.utils.arguments import shown

FORMAT, VERSION = "bateleur-prefix", "2"
MAX_HEADER = 1 << 20
"""Maximum header size in bytes; a thousand layers need less."""
_TOKENS = "token_ids"
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


def encode_prefix(layout: RowLayout, prefix: Prefix) -> bytes:
    """Return the bytes of a safetensors file with this prefix."""
    tensors = {_TOKENS: torch.tensor(prefix.token_ids, dtype=torch.int32)}
    if len(prefix.blocks):
        tensors |= _cut(prefix.blocks, layout.block_parts)
    if prefix.page is not None:
        tensors |= {name: each[0] for name, each in _cut(prefix.page[None], layout.page_parts).items()}
    contents: bytes = save(tensors, _metadata(layout, prefix, tensors))
    return contents


def write_prefix(path: Path, layout: RowLayout, prefix: Prefix) -> int:
    """Write a prefix to a file atomically with `write_whole`; return the size of the file in bytes."""
    return write_whole(path, encode_prefix(layout, prefix))


def read_prefix(path: Path, layout: RowLayout, *, follow_symlinks: bool = False) -> Prefix:
    """Read a file that `write_prefix` wrote for this layout.

    follow_symlinks: whether to accept a symbolic link. Raises PrefixRefused with the reason for any other file.
    """
    with opened_file(path, follow_symlinks=follow_symlinks) as opened:
        return _read(opened, layout)


def _read(opened: OpenFile, layout: RowLayout) -> Prefix:
    path, begin = opened.path, opened.read(8)
    length = int.from_bytes(begin, "little")
    if length > min(MAX_HEADER, opened.size - 8):
        raise PrefixRefused("truncated", f"{path}: is no complete safetensors file")
    header = opened.read(length)
    stored = _stored_metadata(path, header)
    _compare(path, stored, layout)
    try:
        start, end, key = int(stored["start"]), int(stored["end"]), bytes.fromhex(stored["key"])
        if not 0 <= start <= end < 1 << 31 or not end or start % layout.block_size or end % layout.block_size:
            raise ValueError
    except (LookupError, ValueError) as error:
        raise PrefixRefused("foreign", f"{path}: its header does not say which tokens it is of") from error
    count = (end - start) // layout.block_size if layout.block_parts else 0
    has_page = stored.get("state") == "1" and bool(layout.page_parts)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        _TOKENS: (torch.int32, (end - start + layout.num_lookahead_tokens,))
    }
    expected |= {each.name: (each.dtype, (count, *each.shape)) for each in layout.block_parts if count}
    expected |= {each.name: (each.dtype, each.shape) for each in layout.page_parts if has_page}
    size = 4 * (end - start + layout.num_lookahead_tokens) + count * layout.block_bytes + has_page * layout.page_bytes
    if opened.size != 8 + length + size:
        raise PrefixRefused("truncated", f"{path}: has {opened.size} bytes, not as many as its header says")
    try:
        tensors = load(begin + header + opened.read(size))
    except SafetensorError as error:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}") from error
    if {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} != expected:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}")
    blocks = np.empty((0, layout.block_bytes), np.uint8)
    if count:
        blocks = _join(tensors, layout.block_parts, count)
    page = _join(tensors, layout.page_parts, 1)[0] if has_page else None
    prefix = Prefix(start, key, tensors[_TOKENS].numpy(), blocks, page)
    if stored != _metadata(layout, prefix, tensors):
        raise PrefixRefused("corrupt", f"{path}: its checksum is wrong")
    return prefix


def _cut(rows: NDArray[np.uint8], parts: Sequence[RowPart]) -> dict[str, Tensor]:
    """Split rows (n, num_bytes) into the tensors (n, *shape) of each part."""
    pieces = {each: torch.from_numpy(rows[:, each.start : each.end].copy()) for each in parts}
    return {each.name: piece.view(each.dtype).view(len(rows), *each.shape) for each, piece in pieces.items()}


def _join(tensors: Mapping[str, Tensor], parts: Sequence[RowPart], count: int) -> NDArray[np.uint8]:
    """Return `count` rows of the tensors that `_cut` made."""
    pieces = [tensors[each.name].reshape(count, -1).view(torch.uint8) for each in parts]
    rows: NDArray[np.uint8] = torch.cat(pieces, 1).numpy()
    return rows


def _stored_metadata(path: Path, header: bytes) -> dict[str, str]:
    try:
        stored = json.loads(header)["__metadata__"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise PrefixRefused("foreign", f"{path}: its header names no format") from error
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("version")) != (FORMAT, VERSION):
        raise PrefixRefused("foreign", f"{path}: is not of the format {FORMAT} {VERSION}")
    return {name: value for name, value in stored.items() if isinstance(value, str)}


def _compare(path: Path, stored: dict[str, str], layout: RowLayout) -> None:
    """Raise PrefixRefused if the stored layout differs, naming the first field that differs."""
    for name, ours in layout.fields.items():
        if (theirs := stored.get(f"layout.{name}")) != ours:
            differs = f"its {name} is {shown(theirs)}, and this engine's is {shown(ours)}"
            raise PrefixRefused("foreign", f"{path}: {differs}")
    if stored.get("layout") != layout.digest:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}")


def _metadata(layout: RowLayout, prefix: Prefix, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata of a file, with a checksum of all other metadata and of the tensors."""
    end = prefix.start + len(prefix.token_ids) - layout.num_lookahead_tokens
    metadata = {"format": FORMAT, "version": VERSION, "layout": layout.digest}
    metadata |= {f"layout.{name}": value for name, value in layout.fields.items()}
    metadata |= {"key": prefix.key.hex(), "start": str(prefix.start), "end": str(end)}
    metadata["state"] = str(int(prefix.page is not None))
    digest = blake2b(json.dumps(metadata).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return metadata | {"checksum": digest.hexdigest()}
