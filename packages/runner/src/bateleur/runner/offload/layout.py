"""The identity of prefix files. Only engines with equal layouts give the same meaning to their keys and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from bateleur.runner.offload.rows import Part


@dataclass(frozen=True)
class Layout:
    """Everything that keys, values and states depend on besides tokens, and their order in a file."""

    fields: Mapping[str, str]
    """Weights, dtype, device, kernels, ranks and versions, by name."""
    block_size: int
    """Tokens of a block; without attention, distance of two states in tokens."""
    granularity: int
    """Tokens between two possible ends of a prefix."""
    ahead: int
    """Tokens after a prefix that its last block depends on: 1 if a draft head stores keys, else 0."""
    block_parts: tuple[Part, ...]
    """Parts of a KV block; empty without attention."""
    page_parts: tuple[Part, ...]
    """Parts of a state; empty without recurrent layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self.block_parts[-1].end if self.block_parts else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a recurrent state of all layers."""
        return self.page_parts[-1].end if self.page_parts else 0

    @cached_property
    def digest(self) -> str:
        """Hash of the whole layout, 32 hexadecimal digits."""
        parts = [[each.name, str(each.dtype), each.shape] for each in (*self.block_parts, *self.page_parts)]
        sizes = [self.block_size, self.granularity, self.ahead]
        text = json.dumps([dict(sorted(self.fields.items())), sizes, parts])
        return blake2b(text.encode(), digest_size=16).hexdigest()
