"""What a prefix in a file is of: the numbers mean the same to engines of one layout, and to no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from bateleur.runner.offload.rows import Part


@dataclass(frozen=True)
class Layout:
    """Whose keys, values and states they are, and how they lie in a file."""

    fields: Mapping[str, str]
    """Everything that they depend on beside the tokens, by name: weights, dtype, device, kernels, ranks, versions."""
    block_size: int
    """Tokens of a block; without attention, of what lies between two states."""
    granularity: int
    """Tokens between two places where a prefix may end."""
    ahead: int
    """Tokens behind a prefix that its last block depends on: 1 where a draft head stores keys, else 0."""
    block_parts: tuple[Part, ...]
    """Of a KV block; none without attention."""
    page_parts: tuple[Part, ...]
    """Of a state after a prefix; none without recurrent layers."""

    @property
    def block_bytes(self) -> int:
        """Of a KV block."""
        return self.block_parts[-1].end if self.block_parts else 0

    @property
    def page_bytes(self) -> int:
        """Of a state."""
        return self.page_parts[-1].end if self.page_parts else 0

    @cached_property
    def digest(self) -> str:
        """A name of all of it, 32 hexadecimal digits."""
        parts = [[each.name, str(each.dtype), each.shape] for each in (*self.block_parts, *self.page_parts)]
        sizes = [self.block_size, self.granularity, self.ahead]
        text = json.dumps([dict(sorted(self.fields.items())), sizes, parts])
        return blake2b(text.encode(), digest_size=16).hexdigest()
