"""What drafts were drawn from: the logits of every draft that waits for its test, by row of the engine's table.

Drafts are made in one step and tested in a later one. Until then their row may pause, or stand elsewhere in the batch,
so logits are kept where the request is and not where it was drawn.

Legend for shapes: M rows of the request table, N rows of a batch at most, K drafts, Vd draft vocabulary, n rows of a
pass, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftLaws:
    """Logits of drafts, and what a pass is told to put its own in their place; addresses never change.

    lines: (M * K + 1, Vd) float32, K lines a row of the table; the last one takes what belongs to no request.
    rows: (N,) int64, the row of the table that each row of the batch has; M in padding.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_tokens: int, vocab_size: int, device: torch.device | str
    ) -> None:
        """Allocate for `max_num_reqs` rows, of the table and of a batch. No line holds a law before it is kept."""
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
