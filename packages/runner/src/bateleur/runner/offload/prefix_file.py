"""Prefixes in safetensors files, verified when read.

The metadata of each file states its layout and its tokens, so a file of another engine is refused with the reason. The
checksum detects damage, not forgery: anyone who can write files that an engine reads can change what it computes.
"""

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
from bateleur.runner.offload.whole_file import opened_file
from bateleur.runner.utils.arguments import shown

FORMAT, VERSION = "bateleur-prefix", "2"
MAX_HEADER = 1 << 20  # maximum header size in bytes; a thousand layers need less
_TOKENS = "token_ids"
_FOREIGN_TENSORS = "its tensors are not laid out as this engine's"


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV blocks of a prefix after its first `start` tokens, and the state (page) at its end, on the host.

    key: prefix-cache key of all tokens up to the end. token_ids: tokens after `start`, and the next one if the blocks
    include a draft head's keys and values, which depend on it. blocks: (n, block_bytes). page: (page_bytes,) or None.
    """

    start: int
    key: bytes
    token_ids: NDArray[np.int32]
    blocks: NDArray[np.uint8]  # (n, block_bytes); n = 0 without attention, or if there is only a state
    page: NDArray[np.uint8] | None  # (page_bytes,) the state after the last token; None if there is none


def encode_prefix(layout: RowLayout, prefix: Prefix) -> bytes:
    """Return the bytes of a safetensors file with this prefix."""
    tensors = {_TOKENS: torch.tensor(prefix.token_ids, dtype=torch.int32)}
    if len(prefix.blocks):
        tensors |= _cut(prefix.blocks, layout.block_parts)
    if prefix.page is not None:
        tensors |= {name: each[0] for name, each in _cut(prefix.page[None], layout.page_parts).items()}
    contents: bytes = save(tensors, _metadata(layout, prefix, tensors))
    return contents


def read_prefix(path: Path, layout: RowLayout, *, follow_symlinks: bool = False) -> Prefix:
    """Read a file with the bytes of `encode_prefix` for this layout. Raises PrefixRefused for any other file.

    follow_symlinks: whether to accept a symbolic link.
    """
    with opened_file(path, follow_symlinks=follow_symlinks) as (file, size):
        begin = file.read(8)
        length = int.from_bytes(begin, "little")
        if length > min(MAX_HEADER, size - 8):
            raise PrefixRefused("truncated", f"{path}: is no complete safetensors file")
        header = file.read(length)
        stored = _stored_metadata(path, header, layout)
        expected, num_bytes = _expected(path, stored, layout)
        if size != 8 + length + num_bytes:
            raise PrefixRefused("truncated", f"{path}: has {size} bytes, not as many as its header says")
        contents = begin + header + file.read(num_bytes)
    try:
        tensors = load(contents)
        if {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} != expected:
            raise SafetensorError
    except SafetensorError as error:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}") from error
    start, key = int(stored["start"]), bytes.fromhex(stored["key"])
    blocks, page = np.empty((0, layout.block_bytes), np.uint8), None
    if layout.block_parts and (parts := layout.block_parts)[0].name in tensors:
        blocks = _join(tensors, parts, len(tensors[parts[0].name]))
    if layout.page_parts and layout.page_parts[0].name in tensors:
        page = _join(tensors, layout.page_parts, 1)[0]
    prefix = Prefix(start, key, tensors[_TOKENS].numpy(), blocks, page)
    if stored != _metadata(layout, prefix, tensors):
        raise PrefixRefused("corrupt", f"{path}: its checksum is wrong")
    return prefix


def _expected(
    path: Path, stored: dict[str, str], layout: RowLayout
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], int]:
    """Return dtype and shape of a file's tensors, by name, and the bytes of all. stored: metadata of its header."""
    try:
        start, end = int(stored["start"]), int(stored["end"])
        bytes.fromhex(stored["key"])
        if not 0 <= start <= end < 1 << 31 or not end or start % layout.block_size or end % layout.block_size:
            raise ValueError
    except (LookupError, ValueError) as error:
        raise PrefixRefused("foreign", f"{path}: its header does not say which tokens it is of") from error
    count = (end - start) // layout.block_size if layout.block_parts else 0
    has_page, num_ids = stored.get("state") == "1", end - start + layout.num_lookahead_tokens
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {_TOKENS: (torch.int32, (num_ids,))}
    expected |= {each.name: (each.dtype, (count, *each.shape)) for each in layout.block_parts if count}
    expected |= {each.name: (each.dtype, each.shape) for each in layout.page_parts if has_page}
    return expected, 4 * num_ids + count * layout.block_bytes + has_page * layout.page_bytes


def _cut(rows: NDArray[np.uint8], parts: Sequence[RowPart]) -> dict[str, Tensor]:
    """Split rows (n, num_bytes) into the tensors (n, *shape) of each part."""
    pieces = {each: torch.from_numpy(rows[:, each.start : each.end].copy()) for each in parts}
    return {each.name: piece.view(each.dtype).view(len(rows), *each.shape) for each, piece in pieces.items()}


def _join(tensors: Mapping[str, Tensor], parts: Sequence[RowPart], count: int) -> NDArray[np.uint8]:
    """Return `count` rows of the tensors that `_cut` made."""
    pieces = [tensors[each.name].reshape(count, -1).view(torch.uint8) for each in parts]
    rows: NDArray[np.uint8] = torch.cat(pieces, 1).numpy()
    return rows


def _stored_metadata(path: Path, header: bytes, layout: RowLayout) -> dict[str, str]:
    """Return the metadata of a header. Raises PrefixRefused with the first field in which its layout differs."""
    try:
        stored = json.loads(header)["__metadata__"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise PrefixRefused("foreign", f"{path}: its header names no format") from error
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("version")) != (FORMAT, VERSION):
        raise PrefixRefused("foreign", f"{path}: is not of the format {FORMAT} {VERSION}")
    stored = {name: value for name, value in stored.items() if isinstance(value, str)}
    for name, ours in layout.fields.items():
        if (theirs := stored.get(f"layout.{name}")) != ours:
            differs = f"its {name} is {shown(theirs)}, and this engine's is {shown(ours)}"
            raise PrefixRefused("foreign", f"{path}: {differs}")
    if stored.get("layout") != layout.digest:
        raise PrefixRefused("foreign", f"{path}: {_FOREIGN_TENSORS}")
    return stored


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
