"""What branches that are computed in one call are told of a pass, or that it takes operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bateleur.mamba import MambaMetadata, MixerRows, SlotPlan
from bateleur.metadata import AttentionBackend, PagedAttentionMetadata
from bateleur.metadata.backends.native import NativeBackend
from bateleur.metadata.native import missing
from bateleur.runner.models.native.attention_branch import PagedRows
from bateleur.runner.models.native.mamba_branch import RingRows, Slots
from bateleur.runner.models.spec import MambaLayer, ModelSpec

_NUM_KEPT = 16


class RecurrentRows:
    """What recurrent layers are pointed to, by the metadata that it is of: steady steps have theirs again."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[MambaMetadata, Slots | RingRows | None]] = {}

    def of(self, rows: MixerRows) -> Slots | RingRows | None:
        """None where the rows do not all decode, or are of kinds that are not read."""
        meta = rows.decodes
        if meta is None or rows.prompts is not None or rows.step.pieces is not None:
            return None
        found = self._made.get(id(meta))  # it is held, and so is its id
        if found is not None:
            return found[1]
        made = _pointed(meta)
        if len(self._made) == _NUM_KEPT:
            self._made.clear()
        self._made[id(meta)] = meta, made
        return made


def _pointed(meta: MambaMetadata) -> Slots | RingRows | None:
    plan, starts, row = meta.plan, meta.query_start_loc, meta.request_row
    if starts.dtype != torch.int32 or not starts.is_contiguous():
        return None
    if isinstance(plan, SlotPlan):
        return Slots(starts, plan) if Slots.takes(plan) else None
    if row is None or not RingRows.takes(plan, row):
        return None
    return RingRows(starts, plan, row, meta.way)


@dataclass(frozen=True, slots=True)
class InC:
    """That the branches of a pass may be computed here, and what its layers have in common."""

    recurrent: Slots | RingRows | None = None
    """Of recurrent layers, where all rows decode."""
    paged: PagedRows | None = None
    """Of attention layers by the backend in C."""

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        rows: MixerRows | None = None,
        attention: PagedAttentionMetadata | None = None,
        backend: AttentionBackend | None = None,
        *,
        kept: RecurrentRows | None = None,
    ) -> InC | None:
        """For a pass over these tokens, and what its layers are told, if there are such; None where there are no
        kernels, or something records operators. kept: of earlier passes.
        """
        if not tokens.is_cpu or missing() is not None or _get_current_dispatch_mode() is not None:
            return None
        takes = attention is not None and type(backend) is NativeBackend and PagedRows.takes(attention)
        recurrent = None if rows is None else (kept or RecurrentRows()).of(rows)
        return cls(recurrent, PagedRows(attention) if takes and attention is not None else None)


def folds_in_c(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether steps that decode fold on the way, see `bateleur.mamba.OnTheWay`: whether their recurrent layers are one
    call each, where nothing records operators.
    """
    if device.type != "cpu" or dtype is not torch.float32 or missing() is not None or not spec.recurrent:
        return False
    return all(
        isinstance(layer, MambaLayer) and layer.norm != "gate only" and layer.of_groups is None
        for layer in spec.recurrent
    )
