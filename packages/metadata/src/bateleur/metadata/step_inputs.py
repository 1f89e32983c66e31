"""What a scheduler hands to the stager: sizes that hold for life, and the rows of one step."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bateleur.metadata.seq_len_bound import BoolArray, I32Array


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Largest batch that buffers are made for: rows, tokens in one step, tokens of one request."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        for name in ("max_num_reqs", "max_num_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """One KV-cache group: layers that share a block table.

    Attributes:
        block_size: tokens per block.
        max_blocks: width of the block table.
        has_slots: whether tokens are stored in slots of blocks. A group without slots (recurrent states) has
            its block table copied as given and all slots -1.
        lookahead_tokens: tokens beyond this step whose blocks stay in the table (draft steps write there).
            Entries behind them are zeroed.
    """

    block_size: int
    max_blocks: int
    has_slots: bool = True
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        for name, least in (("block_size", 1), ("max_blocks", 1), ("lookahead_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least {least}")


KVGroup = KVCacheGroup  # the former name, for one release


@dataclass(frozen=True, slots=True)
class StepRows:
    """The real rows of one step, on the host. Row order: decode rows first, then prefill rows.

    Attributes:
        query_lens: (R,) int32, tokens each row computes in this step, at least 1.
        num_computed: (R,) int32, tokens before this step (an upper bound where ``exact`` is False).
        is_prefilling: (R,) bool, the row is still consuming its prompt.
        token_ids: (T,) int32, ids of all rows, one row after the other.
        block_tables: one (R, max_blocks) int32 array for each KV-cache group; none where ``table_rows`` names rows.
        exact: (R,) bool, or None where every ``num_computed`` is the true count.
        sampled: (n,) device ids that replace the first n of ``token_ids``: what the last step sampled for the
            leading decode rows, which the host has not seen.
        table_rows: (R,) int64, distinct rows of the tables that the buffers were made with, in place of tables.
        computed: (R,) device counts, any integer dtype, that device fields are made of: ``num_computed`` then is what
            the host knows of them, and no smaller.
        origin: what all rows have in common that :meth:`repeat` made of the same ones.
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
        """The same rows in a later step, where nobody has written to any array of this one, and all counts are true. In
        tables that live long blocks may have come behind the others of a row.

        Whoever stages them right behind these looks at nothing but what is new.
        """
        rows = StepRows(
            self.query_lens,
            num_computed_tokens,
            self.is_prefilling,
            self.token_ids,
            self.block_tables,
            None,
            sampled_token_ids,
            self.block_table_rows,
            None,
        )
        object.__setattr__(rows, "batch_id", self.batch_id)  # not an argument, so that no other rows have it
        return rows

    def check_repeat(self, num_reqs: int, num_tokens: int) -> None:
        """What :meth:`check_arrays` checks, but for what is that of rows which it has seen."""
        _expect("num_computed_tokens", self.num_computed_tokens, (num_reqs,), _I32)
        self._check_sampled(num_tokens)

    def check_arrays(
        self, num_reqs: int, num_tokens: int, groups: tuple[KVCacheGroup, ...], table_rows: int
    ) -> None:
        """Check lengths and dtypes against the sizes of the step, and rows against tables of ``table_rows`` rows, 0 if
        there are none; host only, and cheap enough for every step.

        Raises:
            ValueError: names the field, what it has and what it must have.
        """
        rows = (num_reqs,)
        _expect("query_lens", self.query_lens, rows, _I32)
        _expect("num_computed_tokens", self.num_computed_tokens, rows, _I32)
        _expect("is_prefilling", self.is_prefilling, rows, _BOOL)
        _expect("token_ids", self.token_ids, (num_tokens,), _I32)
        if self.num_computed_is_exact is not None:
            _expect("num_computed_is_exact", self.num_computed_is_exact, rows, _BOOL)
        self._check_tables(num_reqs, groups, table_rows)
        if self.num_computed_tokens_device is not None and self.num_computed_tokens_device.shape != rows:
            raise ValueError(
                f"num_computed_tokens_device: has shape {tuple(self.num_computed_tokens_device.shape)}, must be {rows}"
            )
        self._check_sampled(num_tokens)

    def _check_sampled(self, num_tokens: int) -> None:
        if self.sampled_token_ids is not None and (
            self.sampled_token_ids.dim() != 1 or self.sampled_token_ids.shape[0] > num_tokens
        ):
            raise ValueError(
                f"sampled_token_ids: has shape {tuple(self.sampled_token_ids.shape)}, "
                f"must be (n,) with n <= {num_tokens}"
            )

    def _check_tables(self, num_reqs: int, groups: tuple[KVCacheGroup, ...], table_rows: int) -> None:
        if self.block_table_rows is not None:
            if not table_rows:
                raise ValueError("block_table_rows: names rows, but the buffers were made without tables")
            _expect("block_table_rows", self.block_table_rows, (num_reqs,), _I64)
            if num_reqs and (self.block_table_rows.view(np.uint64).max() >= table_rows):
                raise ValueError(
                    f"block_table_rows: {self.block_table_rows} must be rows of tables of {table_rows} rows"
                )
            return
        if len(self.block_tables) != len(groups):
            raise ValueError(
                f"block_tables: has {len(self.block_tables)} tables for {len(groups)} KV-cache groups"
            )
        for table, group in zip(self.block_tables, groups, strict=True):
            _expect("block_tables", table, (num_reqs, group.max_blocks), _I32)


_I32 = np.dtype(np.int32)
_I64 = np.dtype(np.int64)
_BOOL = np.dtype(np.bool_)


def _expect(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: has shape {array.shape}, must be {shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name}: has dtype {array.dtype}, must be {dtype}")
