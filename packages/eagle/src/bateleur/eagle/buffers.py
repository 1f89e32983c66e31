"""What draft passes read, in buffers whose addresses never change; padding of each is defined.

Legend for shapes: N rows and M tokens of the largest batch, K drafts, Vd draft vocabulary, Hd hidden size of the head,
n rows of a pass, R rows.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from bateleur.eagle.cache import DraftCache
from bateleur.eagle.heads.spec import Head, lanes_of
from bateleur.eagle.rules import Rule
from bateleur.metadata import PAD_SLOT, BatchLimits

NO_TOKEN = -1


class DraftBuffers:
    """What the geometry writes. Padding: 0, slots -1, `query_start_loc` repeats.

    input_ids: (M,) int32. positions: (M,) int64, below `max_model_len`. slot_mapping: (M,) int64, -1 stores nothing.
    query_start_loc: (N + 1,) int32. seq_lens, num_computed_tokens: (N,) int32.
    last_index: (N,) int64, token of the row that draws: its features and outputs are the ones to gather.
    token_positions: (N,) int64, index in its sequence of the token that the row draws; never clamped, so a key of
        noise made of it is never used twice.
    tokens: (N, K) int64, the drafts so far, -1 where there is none.
    step: () int64, the column that the next drawn token goes to.
    on_host: eager passes run in numpy, by default on a CPU. False keeps to torch's operators, so that a check on a CPU
        sees whether other devices would wait.
    """

    def __init__(self, limits: BatchLimits, num_speculative_tokens: int, device: torch.device | str) -> None:
        """Allocate for batches within `limits`, defined as an empty batch.

        limits: sizes of the largest batch of the target. `max_model_len` is what the *draft* can hold, its own
            maximum if that is smaller: rows beyond it store nothing and draft nothing.
        num_speculative_tokens: K; `ValueError` below 1.
        """
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1")
        self.limits = limits
        self.num_speculative_tokens = num_speculative_tokens
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
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
        self._arrays: SimpleNamespace | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def arrays(self) -> SimpleNamespace:
        """The same memory as numpy sees it, on a CPU; but for hidden states in bfloat16, which it has not."""
        if self._arrays is None:
            whole = {name: each for name, each in self.tensors().items() if each.dtype != torch.bfloat16}
            self._arrays = SimpleNamespace(**{name: each.numpy() for name, each in whole.items()})
        return self._arrays

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name; constant for life."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors().items()}

    def poison(self) -> None:
        """Fill every buffer with values that no consumer survives unnoticed; the next staging defines all of them."""
        for tensor in self.tensors().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max - 6)


class DraftInputs(DraftBuffers):
    """The buffers of the geometry, and what the passes read besides.

    hidden: (M, Hd) what the head is fed: fused features in the first pass, then its own output.
    seeds: (N,) int64. temperature: (N,) float32; 0 is greedy. block_table: (N, max_blocks) int32.
    logits: where those of drafts are kept for a rule that tests them; None under COUPLED, which does not.
    """

    def __init__(
        self, head: Head, cache: DraftCache, limits: BatchLimits, num_speculative_tokens: int, rule: Rule
    ) -> None:
        keys = cache.kv[0][0]
        super().__init__(limits, num_speculative_tokens, keys.device)
        rows, blocks = limits.max_num_reqs, cache.blocks.max_blocks
        self.hidden = keys.new_zeros(limits.max_num_tokens, head.spec.hidden_size)
        self.seeds = keys.new_zeros(rows, dtype=torch.int64)
        self.temperature = keys.new_zeros(rows, dtype=torch.float32)
        self.block_table = keys.new_zeros(rows, blocks, dtype=torch.int32)
        self.logits: DraftLogits | None = None
        if rule is not Rule.COUPLED:
            width = len(lanes_of(head, torch.device("cpu")).words)
            self.logits = DraftLogits(rows, num_speculative_tokens, width, self.device)
        self._rows = rows  # leading rows that may differ from 0

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name that is staged anew for each step; logits of drafts stay."""
        staged = {} if self.logits is None else {"logits.rows": self.logits.rows}
        return super().tensors() | staged

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name; constant for life."""
        kept = {} if self.logits is None else {"logits.lines": self.logits.lines.data_ptr()}
        return super().addresses() | kept

    def set_rows(
        self, seeds: Tensor, temperature: Tensor, block_table: Tensor, table_rows: Tensor | None = None
    ) -> None:
        """Write what rows 0 .. n - 1 draw with and where they are stored; the rows behind them become 0.

        table_rows: as for `DraftLogits.stage`; where no logits are kept, nobody looks at them.
        """
        if self.logits is not None:
            self.logits.stage(table_rows)
        rows = len(seeds)
        for buffer, values in (
            (self.seeds, seeds),
            (self.temperature, temperature),
            (self.block_table, block_table[:rows]),
        ):
            buffer[:rows] = values
            if self._rows > rows:
                buffer[rows : self._rows] = 0
        self._rows = rows

    def hold_rows(self, seeds: Tensor, temperature: Tensor, block_table: Tensor, table_rows: Tensor) -> None:
        """The same as `set_rows` in a graph, for all rows that it looks at; `note_rows` behind a replay tells of it."""
        rows = len(seeds)
        if self.logits is not None:
            self.logits.stage(table_rows)
        for buffer, values in (
            (self.seeds, seeds),
            (self.temperature, temperature),
            (self.block_table, block_table),
        ):
            buffer[:rows].copy_(values[:rows])

    def note_rows(self, rows: int) -> None:
        """So many leading rows may differ from 0, or more."""
        self._rows = max(self._rows, rows)

    def poison(self) -> None:
        """As for any buffers."""
        super().poison()
        self._rows = len(self.seeds)


class DraftLogits:
    """What drafts were drawn from: the logits of every draft that waits for its test, for RATIO and BLOCK.

    Drafts are made in one step and tested in a later one. Until then their row may pause, or stand elsewhere in the
    batch, so logits are kept where the request is, by row of the engine's table, and not where it was drawn.

    lines: (N * K + 1, Vd) float32, K lines a row of the table; the last one takes what belongs to no request.
    rows: (N,) int64, the row of the table that each row of the batch has; N in padding.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_tokens: int, vocab_size: int, device: torch.device | str
    ) -> None:
        """Allocate for `max_num_reqs` rows, of the table and of a batch. Nothing is kept yet."""
        self._shape = (max_num_reqs, num_speculative_tokens, vocab_size)
        num_lines = max_num_reqs * num_speculative_tokens
        self.lines = torch.zeros(num_lines + 1, vocab_size, dtype=torch.float32, device=device)
        self.rows = torch.full((max_num_reqs,), max_num_reqs, dtype=torch.int64, device=device)

    def stage(self, rows: Tensor | None) -> None:
        """Say whose drafts come next: `rows` (R,) int64 of the table; None is nobody's, those of a dummy."""
        count = 0 if rows is None else len(rows)
        if rows is not None:
            self.rows[:count] = rows
        self.rows[count:] = self._shape[0]

    def keep(self, logits: Tensor, column: Tensor) -> None:
        """Keep the (n, Vd) logits that the leading n rows draw draft `column` from, () int64. Fit for capture.

        Padding, and a column that is none, goes to the last line.
        """
        max_rows, k, _ = self._shape
        line_n = self.rows[: len(logits)] * k + column
        line_n = line_n.where(column < k, max_rows * k).clamp_(max=max_rows * k)
        self.lines.index_copy_(0, line_n, logits.float())

    def of(self, rows: Tensor) -> Tensor:
        """(R, K, Vd) float32 of `rows`, (R,) int64 of the table: a copy. Where a draft is missing, whatever."""
        return self.lines[:-1].view(self._shape).index_select(0, rows)
