"""From a staged batch to what the Mamba operators need: the row split, the slots, and the chunks of the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bateleur.mamba.plan import SlotPlan, plan_step
from bateleur.mamba.spec import CacheLayout, MambaCacheMode
from bateleur.metadata import CommonAttentionMetadata, GraphSupport, Phase, Role, Signature


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
    chunk_write: Tensor
    """(chunks,) int64, slot for the page after each chunk; 0 where it is not kept."""
    row_chunk_loc: Tensor
    """(Pf + 1,) int32, first chunk of each prompt row."""
    max_chunks_per_row: int
    chunk_size: int
    """Most tokens of a chunk."""
    max_query_len: int
    """Bound of the tokens of a decode row, not of a prompt row: 1 without speculation."""


class MambaMetadataBuilder:
    """Builds `MambaMetadata`; the block table of its group holds state slots, one row per request.

    The slots lie in buffers of the builder, whose addresses never change: a captured graph of a decode batch may bake
    them. What describes the chunks of prompts is made anew for each batch that has any.

    Chunks of a prompt end at multiples of `chunk_size` counted from the start of the request, so that the same tokens
    share a chunk however the scheduler cuts the prompt at such multiples.

    Raises ValueError for a chunk size or a row count below 1.
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

    def __init__(
        self, layout: CacheLayout, chunk_size: int, max_num_reqs: int, device: torch.device | str
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs is {max_num_reqs}; it must be at least 1")
        self.layout = layout
        self.chunk_size = chunk_size
        self.graph_support = self.supports(layout.num_speculative_tokens)
        self._slots = SlotPlan.allocate(layout, max_num_reqs, device)
        self._resumes = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self._null = torch.zeros((), dtype=torch.int64, device=device)
        self._views: dict[int, _SlotViews] = {}
        self._iota = np.arange(max_num_reqs, dtype=np.int32)
        self._multiples = self._iota * chunk_size
        no_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_prompts = (no_rows, no_rows, no_rows[:0], self._slots.conv_read[:0], no_rows, 0)

    @staticmethod
    def supports(num_speculative_tokens: int) -> GraphSupport:
        """What can be captured: decode batches. One with prompts bakes its split and its chunks."""
        return GraphSupport.UNIFORM if num_speculative_tokens else GraphSupport.SINGLE_TOKEN

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

        Raises ValueError for more rows than the builder was made for.
        """
        del phase
        loc = common.query_start_loc
        steady = _continues_one_token_each(common)
        plan = self._plan(common, common.block_tables[group], accepted, steady)
        if steady:
            split = (common.num_reqs, common.num_tokens, 0, plan, loc, *self._no_prompts)
            return MambaMetadata(*split, self.chunk_size, 1)
        starts = common.query_start_loc_cpu.numpy()
        query_lens = starts[1:] - starts[:-1]
        # A bound is enough: where it is not exact the row is past its prompt, and its state exists either way.
        computed = common.seq_len_bound.upper - query_lens
        num_decodes = self._num_decodes(starts, query_lens, computed, common.is_prefilling)
        prompts, num_decode_tokens = self._no_prompts, common.num_tokens
        if num_decodes < common.num_reqs:
            num_decode_tokens = int(starts[num_decodes])
            upper = common.seq_len_bound.upper[num_decodes:]
            starts_p = starts[num_decodes:] - num_decode_tokens
            table = common.block_tables[group][num_decodes:]
            prompts = self._cut(starts_p, computed[num_decodes:], upper, table)
        return MambaMetadata(
            num_decodes,
            num_decode_tokens,
            common.num_reqs - num_decodes,
            plan,
            loc,
            *prompts,
            self.chunk_size,
            max(1, min(common.max_query_len, 1 + self.layout.num_speculative_tokens)),
        )

    def signature(self, meta: MambaMetadata) -> Signature:
        """The split, which chooses operators, and the bounds that size their launches."""
        return Signature(
            (
                ("num_decodes", Role.CONTROL, meta.num_decodes),
                ("num_decode_tokens", Role.LAYOUT, meta.num_decode_tokens),
                ("num_prefills", Role.CONTROL, meta.num_prefills),
                ("max_chunks_per_row", Role.BOUND, meta.max_chunks_per_row),
                ("chunk_size", Role.LAYOUT, meta.chunk_size),
                ("max_query_len", Role.BOUND, meta.max_query_len),
            )
        )

    def addresses(self) -> Mapping[str, int]:
        """The slot buffers, and the one that stands for no prompts."""
        slots = {field.name: getattr(self._slots, field.name).data_ptr() for field in fields(SlotPlan)}
        return {**slots, "no_prompts": self._no_prompts[0].data_ptr()}

    def _plan(
        self, common: CommonAttentionMetadata, table: Tensor, accepted: Tensor | None, steady: bool
    ) -> SlotPlan:
        """What `plan_step` gives, in the builder's buffers, with fewer operators where nothing is drafted."""
        views = self._views.get(common.num_reqs) or self._views_of(common.num_reqs)
        computed = common.num_computed_tokens
        if self.layout.num_speculative_tokens or self.layout.mode is not MambaCacheMode.NONE:
            lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
            return plan_step(self.layout, table, computed, lens, accepted, views.plan)
        views.running.copy_(table.select(1, 0))  # padded rows hold the null slot
        if steady:
            return views.continuing
        # Some rows may have no state yet, and must not read what the slot held before. The cast takes a sixth of the
        # time that comparing with 0 takes on CPU.
        views.resumes.copy_(computed)
        torch.where(views.resumes, views.running, self._null, out=views.plan.ssm_read)
        return views.starting

    def _views_of(self, num_reqs: int) -> _SlotViews:
        most = self._slots.ssm_read.shape[0]
        if num_reqs > most:
            raise ValueError(f"common: has {num_reqs} rows; the builder was made for max_num_reqs = {most}")
        plan = SlotPlan(*(getattr(self._slots, field.name)[:num_reqs] for field in fields(SlotPlan)))
        running = plan.conv_write
        views = _SlotViews(
            plan,
            running,
            self._resumes[:num_reqs],
            continuing=SlotPlan(running, running[:, None], running, plan.conv_offset, running),
            starting=SlotPlan(plan.ssm_read, running[:, None], plan.ssm_read, plan.conv_offset, running),
        )
        self._views[num_reqs] = views
        return views

    def _num_decodes(
        self,
        starts: npt.NDArray[np.int32],
        query_lens: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int32],
        is_prefilling: Tensor,
    ) -> int:
        """Leading rows that continue a state by few tokens; trailing rows without tokens count if nothing else follows.

        One token over an existing state is an update even if it ends a prompt. Of several, an update leaves a state for
        each, and the next step would read the first one's: right for drafts, and wrong for the end of a prompt.
        """
        few = (query_lens == 1) & (computed > 0)
        if self.layout.num_speculative_tokens:
            drafted = (query_lens > 1) & (query_lens <= 1 + self.layout.num_speculative_tokens)
            few |= drafted & ~is_prefilling.numpy() & (computed > 0)
        first = int(few.argmin())
        return len(few) if few[first] or starts[first] == starts[-1] else first

    def _cut(
        self,
        starts: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int32],
        upper: npt.NDArray[np.int32],
        table: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """Of the prompt rows: starts, chunk starts, chunk rows, chunk slots, first chunk of each row, most of a row.

        starts (Pf + 1,) from 0; computed and upper (Pf,), tokens before and after the step, which decide where in a
        chunk each row begins; table (Pf, columns), where the slots are found. Rows without tokens have neither and get
        no chunk. All parts go to the device in one copy.
        """
        size, num_rows = self.chunk_size, len(computed)
        first_R = computed // size
        counts_R = (upper - 1) // size - first_R + 1
        ends_R = np.add.accumulate(counts_R, dtype=np.int32)
        total = int(ends_R[-1])
        if total > len(self._iota):
            self._iota = np.arange(2 * total, dtype=np.int32)
            self._multiples = self._iota * size
        # A fresh array: nothing writes to it after the upload.
        packed = np.empty(2 * num_rows + 3 + 4 * total, np.int32)
        a, b = num_rows + 1, num_rows + 2 + total
        c = b + total
        chunk_start_loc, row_chunk_loc = packed[a:b], packed[c : c + num_rows + 1]
        cells, kept = packed[-2 * total : -total], packed[-total:]
        packed[:a] = starts
        packed[b : b + total] = self._iota[:num_rows].repeat(counts_R)
        row_chunk_loc[0] = 0
        row_chunk_loc[1:] = ends_R
        # Every chunk begins at a multiple of the chunk size, but the first of a row, which begins with the row.
        origin_R = starts[:-1] - computed + (first_R - row_chunk_loc[:-1]) * size
        np.add(origin_R.repeat(counts_R), self._multiples[:total], out=chunk_start_loc[:total])
        chunk_start_loc[row_chunk_loc] = starts
        # The page after a chunk is kept at the end of a row and on block boundaries, in the column of that many tokens.
        ends = chunk_start_loc[1:] + (computed - starts[:-1]).repeat(counts_R)
        np.equal(ends % self.layout.block_size, 0, out=kept)
        kept[row_chunk_loc[1:] - 1] = 1
        np.floor_divide(ends - 1, self.layout.block_size, out=cells)
        cells += packed[b:c] * table.shape[1]
        on_device = torch.from_numpy(packed)
        if table.device.type != "cpu":
            on_device = on_device.to(table.device, non_blocking=True)
        most = int(np.maximum.reduce(counts_R))
        parts = torch.split_with_sizes(on_device, [a, total + 1, total, num_rows + 1, total, total])
        chunk_write = table.reshape(-1).index_select(0, parts[4]).mul_(parts[5]).long()
        return parts[0], parts[1], parts[2], chunk_write, parts[3], most


@dataclass(frozen=True, slots=True)
class _SlotViews:
    """The builder's buffers for one number of rows, as plans that share them."""

    plan: SlotPlan
    running: Tensor
    """(R,) slot each row writes to."""
    resumes: Tensor
    """(R,) bool, the row has a state."""
    continuing: SlotPlan
    """Every row has a state: read and write slots are one buffer."""
    starting: SlotPlan
    """Some rows have none: read slots have their own."""


def _continues_one_token_each(common: CommonAttentionMetadata) -> bool:
    """Whether the batch says so as a whole: the steady case, decided without looking at each row's length."""
    if common.max_query_len != 1 or not common.num_actual_reqs:
        return False
    return bool(np.minimum.reduce(common.seq_len_bound.upper[: common.num_actual_reqs]) > 1)
