"""What the backends of this package have in common: how a step attends, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bateleur.metadata import ops
from bateleur.metadata.backends.base import PagedAttentionBuilder, PagedAttentionMetadata


class PagedBackend:
    """An :class:`AttentionBackend` that stores by one operator and attends by another."""

    name: ClassVar[str]
    fuses_rotary: ClassVar[bool] = False
    needs_finite_cache: ClassVar[bool] = False
    kernel: ClassVar[Callable[..., Any]] = staticmethod(ops.paged_attention)
    """Attention over what is stored, with the arguments of :data:`bateleur.metadata.ops.paged_attention`."""

    def builder(self) -> PagedAttentionBuilder:
        """A builder for one KV-cache group or many."""
        return PagedAttentionBuilder()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Store ``k`` and ``v``, then attend; see :class:`AttentionBackend`."""
        if rotary is not None and not self.fuses_rotary:
            raise ValueError(
                f"rotary: the backend {self.name!r} takes queries and keys that are rotated already"
            )
        self.check(kv, meta)
        self.store(q, k, v, kv, meta.slot_mapping, rotary)
        return self.attend_stored(q, kv, meta, scale, sliding_window)

    def check(self, kv: tuple[Tensor, Tensor], meta: PagedAttentionMetadata) -> None:
        """Raise `ValueError` for what the backend can't take, before anything is stored."""

    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Store ``k`` and ``v`` by slot."""
        ops.write_kv(k, v, *kv, slot_mapping)

    def attend_stored(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Attention (T, Hq, D) over what is stored; 0 for tokens of no row."""
        out: Tensor = self.kernel(
            q,
            *kv,
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            meta.num_decodes,
            meta.max_query_len,
            meta.max_seq_len,
            scale,
            sliding_window or 0,
        )
        return out


def dtype_refusal(dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why a kernel for ``dtypes`` can't take ``dtype``, or None."""
    return None if dtype in dtypes else f"dtype {dtype} is not one of {', '.join(map(str, dtypes))}"


def device_refusal(device: torch.device, least: tuple[int, int] = (0, 0)) -> str | None:
    """Why kernels for CUDA devices of capability ``least`` can't run on ``device``, or None."""
    if device.type != "cuda":
        return f"device {device} is not CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(device) if any(least) else least
    return (
        None if capability >= least else "compute capability {}.{} is below {}.{}".format(*capability, *least)
    )
