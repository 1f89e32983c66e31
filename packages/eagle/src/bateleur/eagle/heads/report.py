"""What loading a head found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Layout = Literal["eagle", "eagle-wrapper", "speculators", "nemotron_h"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Where each weight of a head came from, by the names that the checkpoint uses."""

    path: Path
    layout: Layout
    kind: str
    own: tuple[str, ...]
    """Taken from the checkpoint."""
    shared: tuple[str, ...]
    """Taken from the target: `embed_tokens`, `lm_head`."""
    unused: tuple[str, ...]
    """In the checkpoint and known to be needless, such as the mask `t2d`."""
    notes: tuple[str, ...] = ()
    """Facts worth knowing, such as the boundaries that a default stands for."""
    num_parameters: int = 0
    """Entries of `own`, without what turned out to be the target's."""
    num_bytes: int = 0
    """Of these, in the dtype of the head."""

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.path}: {self.kind} head in the {self.layout} layout",
            f"  {len(self.own)} own tensors",
            f"  shared with the target: {', '.join(self.shared) or 'nothing'}",
            f"  unused: {', '.join(self.unused) or 'nothing'}",
        ]
        return "\n".join(lines + [f"  {note}" for note in self.notes])
