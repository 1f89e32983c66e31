"""Memory of draft passes at constant addresses: input buffers, whose padding is always defined, logits, KV caches.

Legend for shapes: N rows (requests) and M tokens of the largest batch, K drafts, Vd draft vocabulary, Hd hidden size of
the head, n requests of a pass, R rows of the request table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.eagle.heads.spec import HeadSpec
from bateleur.metadata import PAD_SLOT, BatchLimits, KVCacheGroup

NO_TOKEN = -1


class DraftBuffers:
    """Inputs of draft passes. Padding entries are 0, their slots -1, and `query_start_loc` repeats its last entry.

    `bateleur.eagle.geometry` writes:

    input_ids: (M,) int32.
    positions: (M,) int64, below `max_model_len`.
    slot_mapping: (M,) int64; -1 stores nothing.
    query_start_loc: (N + 1,) int32.
    seq_lens, num_computed_tokens: (N,) int32.
    last_index: (N,) int64, for each row the index in `input_ids` of the token from whose output the draft is sampled.
    token_positions: (N,) int64, for each row the index of the sampled draft in its sequence. The random numbers of a
        draft depend on this index, see `Keys`. So it is not clamped to `max_model_len`, as `positions` is: two drafts
        with the same index would get the same random numbers.
    tokens: (N, K) int64, the drafts so far, -1 where there is none.
    step: () int64, number of drafts in each row of `tokens` so far.

    The other buffers:

    hidden: (M, Hd) input of the head: fused features of the target in the first pass, then the head's own output.
    seeds: (N,) int64. temperature: (N,) float32; 0 is greedy. block_table: (N, max_blocks) int32.
    logits: logits of drafts for an acceptance rule that needs them, else None.
    """

    def __init__(
        self,
        limits: BatchLimits,
        num_speculative_tokens: int,
        device: torch.device | str,
        *,
        max_blocks: int = 0,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate buffers for batches within `limits`, filled as for an empty batch.

        limits: sizes of the largest batch of the target. `max_model_len` is that of the draft head, if smaller:
            requests beyond it store nothing and draft nothing.
        num_speculative_tokens: K; `ValueError` below 1.
        max_blocks: columns of `block_table`. hidden_size, dtype: Hd, and the dtype of `hidden`.
        """
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.limits = limits
        self.num_speculative_tokens = num_speculative_tokens
        self.device = torch.device(device)
        rows, tokens = limits.max_num_reqs, max(limits.max_num_tokens, limits.max_num_reqs)

        def new(*shape: int, dtype: torch.dtype = torch.int64, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=self.device)

        self.input_ids = new(tokens, dtype=torch.int32)
        self.positions = new(tokens)
        self.slot_mapping = new(tokens, fill=PAD_SLOT)
        self.query_start_loc = new(rows + 1, dtype=torch.int32)
        self.seq_lens = new(rows, dtype=torch.int32)
        self.num_computed_tokens = new(rows, dtype=torch.int32)
        self.last_index = new(rows)
        self.token_positions = new(rows)
        self.tokens = new(rows, num_speculative_tokens, fill=NO_TOKEN)
        self.step = new()
        self.hidden = new(tokens, hidden_size, dtype=dtype)
        self.seeds = new(rows)
        self.temperature = new(rows, dtype=torch.float32)
        self.block_table = new(rows, max_blocks, dtype=torch.int32)
        self.logits: DraftLogits | None = None
        self._rows = 0  # number of leading rows that may differ from 0 in the buffers of `set_rows`

    def tensors(self) -> dict[str, Tensor]:
        """Return every buffer that is staged for each step, by name: all but the logits of drafts."""
        staged = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return staged if self.logits is None else staged | {"logits.rows": self.logits.rows}

    def addresses(self) -> dict[str, int]:
        """Return the data pointer of every buffer by name, logits included. They never change."""
        kept = {} if self.logits is None else {"logits.lines": self.logits.lines}
        return {name: tensor.data_ptr() for name, tensor in (self.tensors() | kept).items()}

    def poison(self) -> None:
        """Fill every buffer with invalid values; the next staging overwrites all entries that are read."""
        for tensor in self.tensors().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max - 6)
        self._rows = len(self.seeds)

    def set_rows(
        self,
        seeds: Tensor,
        temperature: Tensor,
        block_table: Tensor,
        table_rows: Tensor | None = None,
        *,
        clears: bool = True,
    ) -> None:
        """Write seed, temperature and block table of the batch's first n requests, and 0 for all rows after them.

        table_rows: rows of the request table, as for `DraftLogits.stage`; ignored if no logits are kept.
        clears: whether to set the rows after n to 0. False inside a graph, which writes all rows of its padded batch;
            then call `note_rows` after each replay.
        """
        if self.logits is not None:
            self.logits.stage(table_rows)
        rows = len(seeds)
        for buffer, values in ((self.seeds, seeds), (self.temperature, temperature), (self.block_table, block_table)):
            buffer[:rows] = values[:rows]
            if clears and self._rows > rows:
                buffer[rows : self._rows] = 0
        self._rows = rows if clears else max(rows, self._rows)

    def note_rows(self, rows: int) -> None:
        """Record that a graph wrote the first `rows` rows, so that the next `set_rows` clears them."""
        self._rows = max(self._rows, rows)


class DraftLogits:
    """Logits of every draft that is not verified yet.

    Only the acceptance rules `Rule.RATIO` and `Rule.BLOCK` need these logits, to compare draft and target
    probabilities.

    Drafts are made in one step and tested in a later one. Until then their request may pause or move in the batch.
    So logits are stored by row of the engine's request table.

    lines: (N * K + 1, Vd) float32: K rows of logits for each row of the request table, and a last one for padding.
    rows: (N,) int64, row of the request table for each row of the batch; N in padding.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_tokens: int, vocab_size: int, device: torch.device | str
    ) -> None:
        """Allocate buffers for `max_num_reqs` rows of the request table, and as many requests of a batch."""
        self._shape = (max_num_reqs, num_speculative_tokens, vocab_size)
        num_lines = max_num_reqs * num_speculative_tokens
        self.lines = torch.zeros(num_lines + 1, vocab_size, dtype=torch.float32, device=device)
        self.rows = torch.full((max_num_reqs,), max_num_reqs, dtype=torch.int64, device=device)

    def stage(self, rows: Tensor | None) -> None:
        """Set the rows (R,) int64 of the request table for which `keep` stores logits; None for a dummy step."""
        count = 0 if rows is None else len(rows)
        if rows is not None:
            self.rows[:count] = rows
        self.rows[count:] = self._shape[0]

    def keep(self, logits: Tensor, column: Tensor) -> None:
        """Store the (n, Vd) logits from which the first n requests sample their draft of index `column`, () int64.

        Can be captured. Logits of padding, and of an index from K on, go to the last line of `lines`.
        """
        max_rows, k, _ = self._shape
        line_n = self.rows[: len(logits)] * k + column
        line_n = line_n.where(column < k, max_rows * k).clamp_(max=max_rows * k)
        self.lines.index_copy_(0, line_n, logits.float())

    def of(self, rows: Tensor) -> Tensor:
        """Return a copy of the logits (R, K, Vd) float32 of `rows` (R,); undefined where a draft is missing."""
        return self.lines[:-1].view(self._shape).index_select(0, rows)


@dataclass(frozen=True, slots=True)
class DraftCache:
    """KV caches of a draft head, in the blocks of one of the target's KV groups.

    kv: (k_cache, v_cache) of each attention layer of the head, in the layout of its attention backend.
    groups, group: the target's KV groups, and the index of the one that the draft layers use.
    dtype: dtype of the head's activations; None for the dtype of the caches.
    kv_scales: scales (2, Hkv) float32 of the caches of each layer, or None; () for none.

    Raises `ValueError` for a group that does not exist, stores no tokens, or has another block size than the caches.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    groups: Sequence[KVCacheGroup]
    group: int = 0
    dtype: torch.dtype | None = None
    kv_scales: Sequence[Tensor | None] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.group < len(self.groups):
            raise ValueError(f"group is {self.group}; there are {len(self.groups)} KV groups")
        if not self.blocks.has_slots:
            raise ValueError(f"group {self.group} stores no tokens; a draft's keys need a group with slots")
        size = self.blocks.block_size
        for layer, pair in enumerate(self.kv):
            for cache in pair:
                if cache.shape[1] != size:
                    raise ValueError(f"kv[{layer}] has blocks of {cache.shape[1]} tokens; the group has {size}")

    @property
    def blocks(self) -> KVCacheGroup:
        """The KV-cache group of the draft layers."""
        return self.groups[self.group]

    def require_room(self, spec: HeadSpec, limits: BatchLimits, num_drafts: int) -> None:
        """Raise `ValueError` unless the cache can hold `num_drafts` drafts of a head for requests within `limits`."""
        blocks, name = self.blocks, f"groups[{self.group}]"
        if blocks.max_blocks * blocks.block_size < limits.max_model_len:
            raise ValueError(
                f"{name}: {blocks.max_blocks} blocks of {blocks.block_size} tokens hold fewer than max_model_len "
                f"{limits.max_model_len}"
            )
        if blocks.lookahead_tokens < num_drafts - 1:
            raise ValueError(
                f"{name}: lookahead_tokens is {blocks.lookahead_tokens}; {num_drafts} drafts are stored up to "
                f"{num_drafts - 1} tokens after the step"
            )
        if len(self.kv) != spec.num_layers:
            raise ValueError(f"kv has {len(self.kv)} layers; the head has {spec.num_layers}")

    def addresses(self) -> Iterator[tuple[str, int]]:
        """Yield name and address of each cache."""
        for layer, pair in enumerate(self.kv):
            for name, cache in zip("kv", pair, strict=True):
                yield f"{name}_cache.{layer}", cache.data_ptr()
