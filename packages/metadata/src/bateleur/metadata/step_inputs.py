"""Inputs of :class:`InputBuffers`: batch limits, KV-cache groups, and the requests of one step."""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bateleur.metadata.seq_len_bound import BoolArray, I32Array


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch: requests, tokens in one step, and tokens of one request."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_reqs", "max_num_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV-cache group: layers that share a block table.

    Attributes:
        block_size, max_blocks: tokens per block, and width of the block table.
        has_slots: tokens have slots in blocks. Else (recurrent states) the table is copied unchanged, all slots are -1.
        lookahead_tokens: tokens after this step whose blocks stay in the table, for draft steps. Later columns become
            the null block.
    """

    block_size: int
    max_blocks: int
    has_slots: bool = True
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("max_blocks", 1), ("lookahead_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")


KVGroup = KVCacheGroup  # the former name, for one release


@dataclass(frozen=True, slots=True)
class StepRows:
    """The R rows (requests) of one step, on the host. Decodes come first, then prefills.

    Attributes:
        query_lens: (R,) int32, tokens of each row in this step, at least 1.
        num_computed_tokens: (R,) int32, tokens before this step; an upper bound if not exact.
        is_prefilling: (R,) bool, the request is still processing its prompt.
        token_ids: (T,) int32, concatenated ids of all rows.
        block_tables: one (R, max_blocks) int32 array for each KV-cache group; empty if ``block_table_rows`` is given.
        num_computed_is_exact: (R,) bool; None: all counts are exact.
        sampled_token_ids: (n,) device ids that replace the first n of ``token_ids``: tokens sampled by the last step,
            which the host has not read yet.
        block_table_rows: (R,) int64, distinct rows of the :class:`BlockTable` objects of the buffers.
        num_computed_tokens_device: (R,) integer device counts. If given, device fields use them, and
            ``num_computed_tokens`` are upper bounds.
        batch_id: identity of the batch, shared by all steps that :meth:`next_step` derives from one another.
    """

    query_lens: I32Array
    num_computed_tokens: I32Array
    is_prefilling: BoolArray
    token_ids: I32Array
    block_tables: tuple[I32Array, ...] = ()
    num_computed_is_exact: BoolArray | None = None
    sampled_token_ids: Tensor | None = None
    block_table_rows: npt.NDArray[np.int64] | None = None
    num_computed_tokens_device: Tensor | None = None
    batch_id: object = field(default_factory=object, init=False, repr=False, compare=False)

    def next_step(self, num_computed_tokens: I32Array, sampled_token_ids: Tensor | None) -> "StepRows":
        """Return the same requests for the next step, with exact counts and new sampled ids."""
        rows = replace(
            self,
            num_computed_tokens=num_computed_tokens,
            sampled_token_ids=sampled_token_ids,
            num_computed_is_exact=None,
            num_computed_tokens_device=None,
        )
        object.__setattr__(rows, "batch_id", self.batch_id)  # set here, so that only derived rows share it
        return rows
