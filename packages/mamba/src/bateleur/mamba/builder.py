"""From a staged batch to what the Mamba operators need: the row split, the slots, and the chunks of the prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.mamba.plan import SlotPlan, plan_continuing, plan_step
from bateleur.mamba.spec import CacheLayout
from bateleur.metadata import CommonAttentionMetadata, GraphSupport, Phase


@dataclass(frozen=True, slots=True)
class MambaMetadata:
    """One step of a Mamba group. Decode rows lead, and prompt rows follow; D + Pf = R counts padded rows too.

    Decode rows, D of them, continue a state by 1 (to 1 + K) tokens and take the update operators. Prompt rows, Pf of
    them, take the varlen operators, with tokens counted from the first prompt token. Padded rows have no tokens; they
    are decode rows if all real rows are, else prompt rows.
    """

    num_decodes: int
    """D."""
    num_decode_tokens: int
    """Tokens before the first prompt row; all of the padded batch's if there is none."""
    num_prefills: int
    """Pf."""
    plan: SlotPlan
    """Slots of all R rows."""
    query_start_loc: Tensor
    """(R + 1,) int32; the first D + 1 entries are the decode rows'."""
    query_start_loc_p: Tensor
    """(Pf + 1,) int32, prompt rows, from 0."""
    chunk_start_loc: Tensor
    """(chunks + 1,) int32, first token of each chunk of the prompts, from 0."""
    chunk_row: Tensor
    """(chunks,) int32, prompt row of each chunk, from 0."""
    row_chunk_loc: Tensor
    """(Pf + 1,) int32, first chunk of each prompt row."""
    max_chunks_per_row: int
    chunk_size: int
    """Most tokens of a chunk."""
    max_query_len: int
    """Bound of the tokens of a decode row, not of a prompt row: 1 without speculation."""


class MambaMetadataBuilder:
    """Builds `MambaMetadata`; the block table of its group holds state slots, one row per request.

    Chunks of a prompt end at multiples of `chunk_size` counted from the start of the request, so that the same tokens
    share a chunk however the scheduler cuts the prompt at such multiples.

    Raises ValueError for a chunk size below 1.
    """

    reads: frozenset[str] = frozenset(
        {
            "block_tables",
            "is_prefilling",
            "num_computed_tokens",
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens_cpu_upper_bound",
        }
    )
    seq_len_fill: int = 0
    graph_support: GraphSupport = GraphSupport.UNIFORM

    def __init__(self, layout: CacheLayout, chunk_size: int, device: torch.device | str) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
        self.layout = layout
        self.chunk_size = chunk_size
        no_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_prompts = (no_rows, no_rows, no_rows[:0], no_rows, 0)

    def build(
        self,
        common: CommonAttentionMetadata,
        group: int,
        phase: Phase = Phase.RUN,
        *,
        accepted: Tensor | None = None,
    ) -> MambaMetadata:
        """Metadata for KV-cache group `group` of `common`, which is not written to.

        `accepted` is `plan_step`'s: (R,) on the device, or None where no row has drafted. The phase makes no
        difference.
        """
        del phase
        loc = common.query_start_loc
        steady = _continues_one_token_each(common)
        if steady and not self.layout.num_speculative_tokens and common.num_actual_reqs == common.num_reqs:
            plan = plan_continuing(common.block_tables[group])
        else:
            plan = plan_step(
                self.layout,
                common.block_tables[group],
                common.num_computed_tokens,
                loc[1:] - loc[:-1],
                accepted,
            )
        if steady:
            split = (common.num_reqs, common.num_tokens, 0, plan, loc)
            return MambaMetadata(*split, *self._no_prompts, chunk_size=self.chunk_size, max_query_len=1)
        starts = common.query_start_loc_cpu.numpy()
        query_lens = np.diff(starts)
        # A bound is enough: where it is not exact the row is past its prompt, and its state exists either way.
        computed = common.seq_len_bound.upper - query_lens
        num_decodes = self._num_decodes(query_lens, computed, common.is_prefilling.numpy())
        if num_decodes == common.num_reqs:
            prompts = self._no_prompts
            num_decode_tokens = common.num_tokens
        else:
            num_decode_tokens = int(starts[num_decodes])
            chunks = _cut(starts[num_decodes:] - num_decode_tokens, computed[num_decodes:], self.chunk_size)
            prompts = _upload(*chunks, loc.device)
        longest = (
            int(query_lens[:num_decodes].max()) if self.layout.num_speculative_tokens and num_decodes else 1
        )
        return MambaMetadata(
            num_decodes,
            num_decode_tokens,
            common.num_reqs - num_decodes,
            plan,
            loc,
            *prompts,
            chunk_size=self.chunk_size,
            max_query_len=max(1, longest),
        )

    def _num_decodes(
        self,
        query_lens: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int32],
        is_prefilling: npt.NDArray[np.bool_],
    ) -> int:
        """Leading rows that continue a state by few tokens; trailing rows without tokens count if nothing else follows.

        One token over an existing state is an update even if it ends a prompt. Drafts only follow a prompt.
        """
        few = (query_lens == 1) | ((query_lens <= 1 + self.layout.num_speculative_tokens) & ~is_prefilling)
        others = np.flatnonzero(~(few & (computed > 0) & (query_lens > 0)))
        if not len(others) or not query_lens[others[0] :].any():
            return len(query_lens)
        return int(others[0])


def _continues_one_token_each(common: CommonAttentionMetadata) -> bool:
    """Whether the batch says so as a whole: the steady case, decided without looking at each row's length."""
    bounds = common.seq_len_bound.upper[: common.num_actual_reqs]
    return common.max_query_len == 1 and len(bounds) > 0 and bool(np.minimum.reduce(bounds) > 1)


def _cut(
    starts: npt.NDArray[np.int32], computed: npt.NDArray[np.int32], chunk_size: int
) -> tuple[list[npt.NDArray[np.int32]], int]:
    """Chunks of the prompt rows: [starts, chunk starts, chunk rows, first chunk of each row] and most chunks of a row.

    starts (Pf + 1,) from 0, computed (Pf,) tokens before the step, which decide where in a chunk each row begins.
    """
    query_lens = np.diff(starts)
    phase = computed % chunk_size
    counts = np.where(query_lens > 0, -(-(phase + query_lens) // chunk_size), 0)
    row_chunk_loc = np.concatenate(([0], np.cumsum(counts)))
    chunk_row = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(len(chunk_row)) - row_chunk_loc[chunk_row]
    # The first chunk of a row begins with the row, every later one at a multiple of the chunk size.
    begin = starts[chunk_row] + np.maximum(rank * chunk_size - phase[chunk_row], 0)
    parts = [starts, np.append(begin, starts[-1]), chunk_row, row_chunk_loc]
    return [part.astype(np.int32) for part in parts], int(counts.max(initial=0))


def _upload(
    parts: list[npt.NDArray[np.int32]], max_chunks: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """All parts in one copy, from memory that nothing writes to again, and the count beside them."""
    packed = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    starts, begin, row, loc = packed.split([len(part) for part in parts])
    return starts, begin, row, loc, max_chunks
