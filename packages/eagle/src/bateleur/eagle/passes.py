"""The two passes of a chain drafter, as bodies that run eagerly or in a graph: the first, and those of the chain.

Both read and write buffers at fixed addresses and nothing else, read no value on the host and have static shapes.

Legend for shapes: T padded tokens, n rows of a pass, N and M rows and tokens of the buffers, Hd hidden size of the
head, Vd draft vocabulary, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from bateleur.cudagraph import Execution
from bateleur.eagle.draw import argmax, draw, perturb
from bateleur.eagle.geometry import DraftBuffers, advance, stage_chain
from bateleur.eagle.laws import DraftLaws
from bateleur.eagle.noise import Lanes, gumbel
from bateleur.eagle.rules import Rule, tempered
from bateleur.metadata import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BatchLimits,
    CommonAttentionMetadata,
    PagedAttentionMetadata,
    ops,
)

if TYPE_CHECKING:
    from bateleur.eagle.heads.spec import Head

_MAX_NOISE = 1 << 20  # numbers made beforehand: 4 MiB
_HOST_LENGTHS = frozenset({"seq_lens_cpu_upper_bound", "seq_lens_cpu_exact"})


_Attention: TypeAlias = Callable[["DraftState", Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a draft pass is told of its rows."""

    batch: CommonAttentionMetadata
    """Sizes are read; the first pass has the target's batch, the others have one token per row."""
    metadata: PagedAttentionMetadata
    """What the head's attention layers are told."""
    greedy: bool = False
    """No row draws with noise. Only eager passes look at it: a graph serves any rows."""


class DraftInputs(DraftBuffers):
    """The buffers of the geometry, and what the passes read besides, at addresses that never change.

    hidden: (M, Hd) what the head is fed: fused features in the first pass, then its own output.
    seeds: (N,) int64. temperature: (N,) float32; 0 is greedy. block_table: (N, max_blocks) int32.
    laws: where the logits of drafts are kept for a rule that tests them; None under COUPLED, which does not.
    """

    def __init__(
        self,
        head: Head,
        limits: BatchLimits,
        num_speculative_tokens: int,
        max_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        super().__init__(limits, num_speculative_tokens, device)
        rows = limits.max_num_reqs
        self.hidden = torch.zeros(limits.max_num_tokens, head.spec.hidden_size, dtype=dtype, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.laws: DraftLaws | None = None
        if rule is not Rule.COUPLED:
            width = head.spec.vocab_size if head.target_ids is None else len(head.target_ids)
            self.laws = DraftLaws(rows, num_speculative_tokens, width, device)
        self._rows = rows  # leading rows that may differ from 0

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name that is staged anew for each step; logits of drafts stay."""
        staged = {} if self.laws is None else {"laws.rows": self.laws.rows}
        return super().tensors() | staged

    def addresses(self) -> dict[str, int]:
        """Data pointer of every buffer by name; constant for life."""
        kept = {} if self.laws is None else {"laws.lines": self.laws.lines.data_ptr()}
        return super().addresses() | kept

    def set_rows(
        self,
        seeds: Tensor,
        temperature: Tensor,
        block_table: Tensor,
        table_rows: Tensor | None = None,
    ) -> None:
        """Write what rows 0 .. n - 1 draw with and where they are stored; the rows behind them become 0.

        table_rows: as for `DraftLaws.stage`; where no laws are kept, nobody looks at them.
        """
        if self.laws is not None:
            self.laws.stage(table_rows)
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

    def poison(self) -> None:
        """Fill every buffer with values that no consumer survives unnoticed."""
        for tensor in self.tensors().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max - 6)
        self._rows = len(self.seeds)


class DraftPasses:
    """A head over its paged caches.

    kv: (k_cache, v_cache) of each attention layer of the head.
    lanes: target ids of the draft vocabulary, hashed.
    refresh: brings metadata up to date with the buffers, on the device; see `refresh_of`.
    rule: how drafts will be tested, which says whose noise they are drawn with.
    """

    def __init__(
        self,
        head: Head,
        kv: Sequence[tuple[Tensor, Tensor]],
        backend: AttentionBackend,
        inputs: DraftInputs,
        block_size: int,
        lanes: Lanes,
        refresh: Callable[[Any], object] | None,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        self._head = head
        self._inputs = inputs
        self._block_size = block_size
        self._lanes = lanes
        self._refresh = refresh
        self._rule = rule
        self._noise: list[Tensor] = []
        self._layers = [_attention(backend, pair, head.spec.sliding_window) for pair in kv]
        self._store = _storing(kv[-1])

    def make_noise(self, num_rows: int, num_drafts: int) -> None:
        """Make the noise of all drafts of a proposal at once, for eager passes over the rows that are staged.

        For few rows, where it costs no more than that of one draft; otherwise each pass makes its own.
        """
        self._noise = []
        if num_rows * num_drafts * len(self._lanes.words) > _MAX_NOISE:
            return
        x = self._inputs
        place_Kn = torch.arange(num_drafts, device=x.device).unsqueeze(1).expand(-1, num_rows)
        position_Kn = x.token_positions[:num_rows] + place_Kn
        seeds = x.seeds[:num_rows].repeat(num_drafts)
        keys = self._rule.keys(seeds, position_Kn.flatten(), place_Kn.flatten())
        self._noise.extend(gumbel(keys, self._rule.draft_role, self._lanes).chunk(num_drafts))

    def first(self, execution: Execution[DraftState]) -> Tensor:
        """Run on all tokens of the target's step, draw one draft per row, stage the chain; (n,) int64 drafts."""
        x = self._inputs
        num_rows = self._num_rows(execution)
        h_nH, recycled_nH = self._forward(execution, x.last_index[:num_rows])
        token_n = self._draw(execution, h_nH)
        x.hidden[:num_rows] = recycled_nH
        stage_chain(x, token_n, x.block_table, self._block_size, eager=execution.key is None)
        return token_n

    def keep_up(self, execution: Execution[DraftState]) -> None:
        """Run on all tokens of the target's step only to store their keys and values: the last layer needs no more."""
        self._forward(execution, self._inputs.last_index[:0], [*self._layers[:-1], self._store])

    def chain(self, execution: Execution[DraftState]) -> Tensor:
        """Run the pass that is staged and stage the next; all passes of a chain if the key's variant says so.

        A variant `(k,)` is a chain of k drafts: k - 1 passes, the metadata refreshed before each. Returns the (n,)
        int64 drafts of the last pass.
        """
        variant = () if execution.key is None else execution.key.variant
        if not variant:
            return self._chain_pass(execution)
        assert self._refresh is not None
        token_n = self._inputs.tokens[: execution.state.batch.num_tokens, 0]
        for _ in range(int(variant[0]) - 1):
            self._refresh(execution.state.metadata)
            token_n = self._chain_pass(execution)
        return token_n

    def _forward(
        self,
        execution: Execution[DraftState],
        rows: Tensor | None = None,
        layers: Sequence[_Attention] | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, num_tokens = self._inputs, execution.state.batch.num_tokens
        return self._head.forward(
            x.input_ids[:num_tokens],
            x.hidden[:num_tokens],
            x.positions[:num_tokens],
            self._attend(execution, self._layers if layers is None else layers),
            rows,
        )

    def _chain_pass(self, execution: Execution[DraftState]) -> Tensor:
        x = self._inputs
        h_nH, recycled_nH = self._forward(execution)
        token_n = self._draw(execution, h_nH)
        x.hidden[: len(token_n)] = recycled_nH
        advance(x, token_n, x.block_table, self._block_size, eager=execution.key is None)
        return token_n

    def _num_rows(self, execution: Execution[DraftState]) -> int:
        """Rows that draw. A piecewise graph doesn't pad rows, so it bakes the most that its tokens can have."""
        if execution.key is None:
            return execution.state.batch.num_actual_reqs
        if execution.key.num_reqs is None:
            return min(execution.key.num_tokens, len(self._inputs.seeds))
        return execution.key.num_reqs

    def _attend(
        self, execution: Execution[DraftState], layers: Sequence[_Attention]
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return execution.eager(layers[layer], q, k, v)

        return attend

    def _draw(self, execution: Execution[DraftState], h_nH: Tensor) -> Tensor:
        """Draw with the noise that the rule asks for, and keep what was drawn from if it asks for that; (n,) int64
        target ids, -1 for no draw. Under COUPLED it is the target's noise at the same position of the same request.
        """
        logits_nV, eager = self._head.logits(h_nH), execution.key is None
        if eager and execution.state.greedy:
            drawn = argmax(logits_nV)
        else:
            x, num_rows = self._inputs, len(h_nH)
            temperature_n = x.temperature[:num_rows]
            if x.laws is not None:  # of greedy rows no law is asked for
                x.laws.keep(logits_nV, x.step)
            scaled_nV = tempered(logits_nV, temperature_n)
            if eager and self._noise:
                drawn = perturb(self._noise.pop(0), scaled_nV, temperature_n)
            else:
                place_n = x.step.expand(num_rows)
                keys = self._rule.keys(x.seeds[:num_rows], x.token_positions[:num_rows], place_n)
                drawn = draw(scaled_nV, temperature_n, keys, self._rule.draft_role, lanes=self._lanes)
        token_n = drawn.token_ids
        if self._head.target_ids is not None:
            token_n = self._head.target_ids.index_select(0, token_n)
        return token_n.masked_fill(drawn.bad, -1)


def _storing(kv: tuple[Tensor, Tensor]) -> _Attention:
    """In place of attention that nobody looks at: keys and values are stored, what it returns means nothing."""

    def store(state: DraftState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops.write_kv(k, v, *kv, state.metadata.slot_mapping)
        return torch.zeros_like(q)

    return store


def _attention(
    backend: AttentionBackend, kv: tuple[Tensor, Tensor], sliding_window: int | None
) -> _Attention:
    """Attention of one layer, as something that a piecewise graph can run between its pieces."""

    def draft_attention(state: DraftState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.attend(q, k, v, kv, state.metadata, q.shape[-1] ** -0.5, sliding_window)

    return draft_attention


def refresh_of(builder: AttentionMetadataBuilder[Any]) -> Callable[[Any], object] | None:
    """How metadata of `builder` follows its batch from one pass of a chain to the next, without a new build.

    A builder may say so itself, with `refresh(metadata)`: on the device, in place, and fit for capture. Metadata that
    is only views of the batch follows by itself: its builder owns no buffer and reads no length on the host. None
    where neither holds, so that each pass needs a build and no graph may hold several passes.
    """
    refresh: Callable[[Any], object] | None = getattr(builder, "refresh", None)
    if refresh is not None:
        return refresh
    if builder.addresses() or builder.reads & _HOST_LENGTHS:
        return None
    return _nothing


def _nothing(metadata: object) -> None:
    """Views need no refresh."""


def storage_book(kv: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, int]]:
    """Name and address of each cache."""
    for layer, pair in enumerate(kv):
        for name, cache in zip("kv", pair, strict=True):
            yield f"{name}_cache.{layer}", cache.data_ptr()
