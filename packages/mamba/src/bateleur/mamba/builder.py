"""From a staged batch to what the Mamba operators need: the row split, the slots, and the chunks of the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bateleur.mamba.pieces import DecodeRows
from bateleur.mamba.planners import (
    CopyPlan,
    FoldPlan,
    ReplayPlan,
    SlotPlan,
    plan_copy,
    plan_fold,
    plan_replay,
    plan_step,
)
from bateleur.mamba.prompts import PromptCutter, Prompts
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.row_kinds import continues_one_token_each, require_order
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, PromptScan, StatePolicy
from bateleur.mamba.step_buffers import StepBuffers, plan_of
from bateleur.mamba.step_metadata import MambaMetadata
from bateleur.metadata import BuildPhase, CommonAttentionMetadata, GraphSupport, Role, Signature, upload


class MambaMetadataBuilder:
    """Builds `MambaMetadata`; the block table of its group holds state slots, one row per request.

    The slots lie in buffers of the builder, whose addresses never change: a captured graph of a decode batch may bake
    them. What describes the chunks of prompts is made anew for each batch that has any.

    With `states`, which drafts and the FOLD policy need, the group behind the builder's own has a table of one column:
    the row of `states` that each request owns, 0 in padded rows. `commit` then ends the step.

    What no graph records runs in numpy on a CPU: a build, and a `commit` unless it is told. `on_host` set to False
    keeps to torch's operators, so that a check on a CPU sees whether other devices would wait.

    `prompt_scan` is which kernels scan prompts; `MambaMetadata.prompts.form` says it of each step.

    Raises ValueError for a chunk size or a row count below 1, and the FOLD policy without `states`.
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
        self,
        layout: CacheLayout,
        chunk_size: int,
        max_num_reqs: int,
        device: torch.device | str,
        states: RequestStates | None = None,
        *,
        prompt_scan: PromptScan = PromptScan.OWN,
    ) -> None:
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs is {max_num_reqs}; it must be at least 1")
        if layout.policy is StatePolicy.FOLD and states is None:
            raise ValueError("states is None; the policy 'fold' has a checkpoint and a ring for each request")
        self.layout = layout
        self.states = states
        self.on_host = torch.device(device).type == "cpu"
        self.graph_support = self.supports(layout.num_speculative_tokens)
        self._buffers = StepBuffers.allocate(layout, max_num_reqs, device)
        self._views: dict[int, StepBuffers] = {}
        self._cutter = PromptCutter(layout, chunk_size, max_num_reqs, prompt_scan)
        self._no_prompts = Prompts.none(device)
        self._pieces = DecodeRows(plan_of(layout, max_num_reqs, device))
        self._null = torch.zeros((), dtype=torch.int64, device=device)
        self._places = torch.arange(max_num_reqs, device=device)

    @staticmethod
    def supports(num_speculative_tokens: int) -> GraphSupport:
        """What can be captured: decode batches. One with prompts bakes its split and its chunks."""
        return GraphSupport.UNIFORM if num_speculative_tokens else GraphSupport.SINGLE_TOKEN

    def build(
        self,
        common: CommonAttentionMetadata,
        group: int,
        phase: BuildPhase = BuildPhase.RUN,
    ) -> MambaMetadata:
        """Metadata for KV-cache group `group` of `common`, which is not written to. The phase makes no difference.

        Raises ValueError for more rows than the builder was made for, and, where requests carry states, for a batch
        without the table that names them, and for a row past its prompt behind one that is not: the scan would take its
        drafts, and whatever is in its ring, for what they are not.
        """
        del phase
        views = self._views.get(common.num_reqs) or self._views_of(common.num_reqs)
        steady = continues_one_token_each(common)
        request_row = None
        if self.states is not None:
            owners = common.block_tables[group + 1 : group + 2]
            if not owners or owners[0].shape[1] != 1:
                found = f"is {owners[0].shape[1]} columns wide" if owners else "is not there"
                raise ValueError(
                    f"common: the table of group {group + 1} {found}; behind the Mamba group {group} comes one column, "
                    f"the row of `states` that each request owns"
                )
            request_row = views.request_row
        table, num_reqs = common.block_tables[group], common.num_reqs
        if request_row is not None:
            request_row.copy_(common.block_tables[group + 1].select(1, 0))
        plan = self._plan(views, common, table, steady)
        num_decodes, num_tokens, prompts = num_reqs, common.num_tokens, self._no_prompts
        if not steady:
            num_decodes, num_tokens, prompts = self._split(common, table)
        longest = 1 if steady else max(1, min(common.max_query_len, 1 + self.layout.num_speculative_tokens))
        split = (num_decodes, num_tokens, num_reqs - num_decodes)
        return MambaMetadata(
            *split, plan, common.query_start_loc, prompts, self._cutter.chunk_size, longest, request_row
        )

    def in_pieces(self, meta: MambaMetadata, common: CommonAttentionMetadata) -> MambaMetadata:
        """`meta`, which was built for `common`, with its `pieces`, in buffers of the builder: for a piecewise graph.

        Of as many rows as there can be of so many tokens, padded ones included, whatever the batch has.
        """
        own, rows = self._pieces, min(common.num_tokens, len(self._buffers.request_row))
        tokens = meta.num_decode_tokens if meta.num_prefills else common.num_actual_tokens
        own.fill(meta.plan, meta.query_start_loc, meta.request_row, meta.num_decodes, tokens)
        pieces = replace(
            meta,
            num_decodes=rows,
            num_decode_tokens=common.num_tokens,
            num_prefills=0,
            plan=own.plan.rows(0, rows),
            query_start_loc=own.query_start_loc[: rows + 1],
            prompts=self._no_prompts,
            max_query_len=1 + self.layout.num_speculative_tokens,
            request_row=None if meta.request_row is None else own.request_row[:rows],
        )
        return replace(meta, pieces=pieces)

    def lasts(self, meta: MambaMetadata, common: CommonAttentionMetadata) -> int:
        """For how many steps of these rows behind that of `common`, each of one token a row, its `meta` would be built
        again, as long as nobody writes to their tables. Where requests carry states, for none.
        """
        if self.states is not None or meta.num_prefills or not continues_one_token_each(common):
            return 0
        if self.layout.mode is MambaCacheMode.NONE:
            return self.layout.max_model_len
        size = self.layout.block_size
        into_block = (common.seq_len_bound.upper[: common.num_actual_reqs] - 1) % size
        # The step behind a boundary reads another page than it writes, and the next one the one that it wrote.
        return 0 if (into_block == 0).any() else size - 1 - int(into_block.max())

    def commit(
        self,
        meta: MambaMetadata,
        common: CommonAttentionMetadata,
        group: int,
        accepted: Tensor,
        *,
        captured: bool = False,
    ) -> CopyPlan | FoldPlan | None:
        """End the step that `meta` was built for, before the next one is built; None if there is nothing to do.

        `accepted` (R,) integer on the device: tokens of each decode row that survive, the first one included; ignored
        in prompt rows and padded ones. What the requests carry to the next step goes to `states`. The result says what
        to do with the layers' states now: `copy_states` for a `CopyPlan`, `fold_ring` for a `FoldPlan`.

        captured: a graph records the call, for batches of rows past their prompts; what it does is decided by nothing
        that the host knows of one of them.
        """
        if self.states is None or meta.request_row is None:
            return None
        table, computed, starts = (
            common.block_tables[group],
            common.num_computed_tokens,
            common.query_start_loc,
        )
        out, eager = self._views[common.num_reqs].after, self.on_host and not captured
        lens = starts[1:] - starts[:-1]
        scanned = None
        if meta.num_prefills:
            scanned = self._places[: common.num_reqs] >= meta.num_decodes
        if isinstance(meta.plan, SlotPlan):
            assert isinstance(out, CopyPlan)
            drafts = (lens - 1).clamp_min_(0)
            if scanned is not None:
                drafts.masked_fill_(scanned, 0)
            args = (self.layout, table, computed, lens, drafts, accepted, meta.plan)
            kept = plan_copy(*args, out, eager=eager)
            self.states.scatter(meta.request_row, kept.accepted, prev_col=kept.prev_col)
            return None if self.layout.mode is MambaCacheMode.NONE else kept
        assert isinstance(out, FoldPlan)
        flush = None if captured else self._flushed(meta, common)
        options = {"flush": flush, "scanned": scanned}
        fold = plan_fold(self.layout, meta.plan, computed, lens, accepted, **options, out=out, eager=eager)
        self.states.scatter(meta.request_row, fold.accepted, base=fold.base)
        return fold

    def signature(self, meta: MambaMetadata) -> Signature:
        """The split, which chooses operators, and the bounds that size their launches."""
        return Signature(
            (
                ("num_decodes", Role.CONTROL, meta.num_decodes),
                ("num_decode_tokens", Role.LAYOUT, meta.num_decode_tokens),
                ("num_prefills", Role.CONTROL, meta.num_prefills),
                ("max_chunks_per_row", Role.BOUND, meta.prompts.max_chunks_per_row),
                ("chunk_size", Role.LAYOUT, meta.chunk_size),
                ("max_query_len", Role.BOUND, meta.max_query_len),
            )
        )

    def addresses(self) -> Mapping[str, int]:
        """The plan's buffers, the rows of the requests, the buffer that stands for no prompts, and what pieces read."""
        tensors = self._buffers.plan.tensors() | {"request_row": self._buffers.request_row}
        tensors |= self._pieces.tensors()
        tensors["no_prompts"] = self._no_prompts.query_start_loc
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def _plan(
        self, views: StepBuffers, common: CommonAttentionMetadata, table: Tensor, steady: bool
    ) -> SlotPlan | ReplayPlan:
        """What the planners give, in the builder's buffers, with fewer operators where nothing is carried along."""
        computed, plan, kept = common.num_computed_tokens, views.plan, None
        if self.states is not None:
            kept = self.states.gather(views.request_row)
        elif views.one_slot is not None:
            continuing, starting = views.one_slot
            running = starting.conv_write.copy_(table.select(1, 0))  # padded rows hold the null slot
            if steady:
                return continuing
            # Some rows may have no state yet, and must not read what the slot held before. The cast takes a sixth of
            # the time that comparing with 0 takes on CPU.
            torch.where(views.resumes.copy_(computed), running, self._null, out=starting.ssm_read)
            return starting
        lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        if isinstance(plan, ReplayPlan):
            assert kept is not None
            rows = (table, computed, lens, kept.base, kept.accepted)
            return plan_replay(self.layout, *rows, plan, eager=self.on_host)
        accepted, prev_col = (None, None) if kept is None else (kept.accepted, kept.prev_col)
        args = (self.layout, table, computed, lens, accepted, plan)
        return plan_step(*args, prev_col=prev_col, eager=self.on_host)

    def _views_of(self, num_reqs: int) -> StepBuffers:
        most = len(self._buffers.request_row)
        if num_reqs > most:
            raise ValueError(f"common: has {num_reqs} rows; the builder was made for max_num_reqs = {most}")
        views = self._views[num_reqs] = self._buffers.rows(num_reqs)
        return views

    def _flushed(self, meta: MambaMetadata, common: CommonAttentionMetadata) -> Tensor | None:
        """Rows of prompts that ran through the ring; the rest of a prompt reads a checkpoint alone."""
        flushed = common.is_prefilling.numpy()[: common.num_reqs].copy()
        flushed[meta.num_decodes :] = False
        if not flushed.any():
            return None
        return upload(flushed, common.query_start_loc.device)

    def _split(self, common: CommonAttentionMetadata, table: Tensor) -> tuple[int, int, Prompts]:
        """Rows and tokens that are decodes', and the chunks of the prompts behind them.

        Decodes are leading rows that continue a state by few tokens; trailing rows without tokens count if nothing else
        follows. One token over an existing state is an update even if it ends a prompt. Of several, an update leaves a
        state for each, and the next step would read the first one's: right for drafts, and wrong for the end of a
        prompt.
        """
        starts, prompt = common.query_start_loc_cpu.numpy(), common.is_prefilling.numpy()
        query_lens = starts[1:] - starts[:-1]
        # A bound is enough: where it is not exact the row is past its prompt, and its state exists either way.
        computed = common.seq_len_bound.upper - query_lens
        few, drafts = query_lens == 1, self.layout.num_speculative_tokens
        if drafts:
            few |= (query_lens > 1) & (query_lens <= 1 + drafts) & ~prompt
        few &= computed > 0
        first = int(few.argmin())
        if few[first] or starts[first] == starts[-1]:
            return len(few), common.num_tokens, self._no_prompts
        if self.states is not None:
            require_order(first, prompt[first:], (query_lens[first:] > 0) & (computed[first:] > 0))
        cut = self._cutter.cut(starts[first:] - starts[first], computed[first:], table[first:])
        return first, int(starts[first]), cut
