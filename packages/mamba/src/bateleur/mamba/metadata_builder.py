"""Builds the metadata of recurrent layers from a staged batch: decode/prefill split, state slots, prefill chunks."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bateleur.mamba.metadata import MambaMetadata
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
from bateleur.mamba.prefill_chunks import PrefillChunker, PrefillChunks
from bateleur.mamba.request_states import RequestStates
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, PromptScan, StatePolicy
from bateleur.metadata import BuildPhase, CommonAttentionMetadata, GraphSupport, Role, Signature, upload


class MambaMetadataBuilder:
    """Builds `MambaMetadata` from the block table of a KV-cache group whose entries are state slots.

    An `AttentionMetadataBuilder`, which explains `reads` and `seq_len_fill`. Slots are written to persistent buffers,
    so a captured graph of a decode batch can read them. Chunks are allocated for each batch that has prefills.

    Args:
        layout: block-table layout of the group.
        chunk_size: maximum number of tokens of a prefill chunk.
        max_num_reqs: maximum number of rows of a batch.
        device: device of the buffers.
        states: values that requests carry between steps. Required for draft tokens and the state policy FOLD. The
            KV-cache group after this one then has a block table of one column: the row in `states` of each request, 0
            in padded rows.
        prompt_scan: kernels to scan prefills. `MambaMetadata.prefill_chunks.prompt_scan` has those that a step uses.

    Raises ValueError for a chunk size or a row count below 1, and for the state policy FOLD or draft tokens without
    `states`.
    """

    reads: frozenset[str] = frozenset({
        "block_tables", "is_prefilling", "num_computed_tokens", "query_start_loc", "query_start_loc_cpu",
        "seq_lens_cpu_upper_bound",
    })  # fmt: skip
    seq_len_fill: int = 0

    def __init__(
        self, layout: CacheLayout, chunk_size: int, max_num_reqs: int, device: torch.device | str,
        states: RequestStates | None = None, *, prompt_scan: PromptScan = PromptScan.OWN,
    ) -> None:  # fmt: skip
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs is {max_num_reqs}; it must be at least 1")
        if states is None and (layout.policy is StatePolicy.FOLD or layout.num_speculative_tokens):
            raise ValueError("states is None; the policy 'fold' and draft tokens need RequestStates")
        self.layout = layout
        self.states = states
        self.graph_support = self.supports(layout.num_speculative_tokens)
        self._buffers = _Buffers(layout, max_num_reqs, device)
        self._piecewise = _Buffers(layout, max_num_reqs, device)
        """The decode rows as piecewise graphs read them: rows after the last decode have no tokens, slot 0 and request
        row 0, so the operators ignore them."""
        self._piecewise_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        after = FoldPlan if layout.policy is StatePolicy.FOLD else CopyPlan
        self._commit_plan = after.allocate(max_num_reqs, device)
        self._chunker = PrefillChunker(layout, chunk_size, prompt_scan)
        self._no_chunks = PrefillChunks.empty(device)
        self._row_indices = torch.arange(max_num_reqs, device=device)

    @staticmethod
    def supports(num_speculative_tokens: int) -> GraphSupport:
        """Return which batches a full graph can be captured for: decodes with equally many tokens, 1 without drafts.

        With prefills, the numbers of decodes and chunks are sizes that a graph would fix.
        """
        return GraphSupport.UNIFORM if num_speculative_tokens else GraphSupport.SINGLE_TOKEN

    def build(self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN) -> MambaMetadata:
        """Build the metadata of KV-cache group `group`. `common` is not modified; `phase` is ignored.

        Raises ValueError for more rows than `max_num_reqs`. With `RequestStates` also if the next group's block table
        is not one column of request rows, and if a decode follows a row in its prompt: a prefill accepts all drafts.
        """
        del phase
        num_reqs, most = common.num_reqs, len(self._row_indices)
        if num_reqs > most:
            raise ValueError(f"common: has {num_reqs} rows; the builder was made for max_num_reqs = {most}")
        table, request_row = common.block_tables[group], None
        if self.states is not None:
            request_row = self._buffers.request_row[:num_reqs].copy_(self._request_rows(common, group))
        plan = self._plan(common, table, request_row)
        num_decodes, num_tokens, chunks = self._split(common, table)
        longest = max(1, min(common.max_query_len, 1 + self.layout.num_speculative_tokens))
        return MambaMetadata(
            num_decodes, num_tokens, num_reqs - num_decodes, plan, common.query_start_loc, chunks,
            self._chunker.chunk_size, longest, request_row,
        )  # fmt: skip

    def with_piecewise_decodes(self, meta: MambaMetadata, common: CommonAttentionMetadata) -> MambaMetadata:
        """Return `meta`, which was built for `common`, with its decode rows also in persistent buffers, for piecewise
        graphs (`piecewise_decodes`).

        The number of rows in them depends only on the padded number of tokens.
        """
        own, n, rows = self._piecewise, meta.num_decodes, min(common.num_tokens, len(self._row_indices))
        sources = [*meta.plan.tensors().values(), *([] if meta.request_row is None else [meta.request_row])]
        targets = [*own.plan.tensors().values(), own.request_row][: len(sources)]
        torch._foreach_copy_([each[:n] for each in targets], [each[:n] for each in sources])
        torch._foreach_zero_([each[n:] for each in targets])
        self._piecewise_loc[:n].copy_(meta.query_start_loc[:n])
        self._piecewise_loc[n:].fill_(meta.num_decode_tokens if meta.num_prefills else common.num_actual_tokens)
        decodes = replace(
            meta,
            num_decodes=rows,
            num_decode_tokens=common.num_tokens,
            num_prefills=0,
            plan=own.plan.rows(0, rows),
            query_start_loc=self._piecewise_loc[: rows + 1],
            prefill_chunks=self._no_chunks,
            max_query_len=1 + self.layout.num_speculative_tokens,
            request_row=None if meta.request_row is None else own.request_row[:rows],
        )
        return replace(meta, piecewise_decodes=decodes)

    def num_repeatable_steps(self, meta: MambaMetadata, common: CommonAttentionMetadata, *, settled: bool) -> int:
        """Return how many further steps of the same requests, with one token each, would get the same metadata.

        With `states`, these steps need no `commit` either: it would store the values that are there. Assumes that the
        block tables do not change. 0 for prefills, state policy FOLD, and with `states` unless the batch is settled.

        settled: whether the step before was of the same requests, with one token each. After a step with drafts, the
            next one reads the state after the last accepted token, so its metadata differ.
        """
        lens = common.seq_len_bound.upper[: common.num_actual_reqs]
        continues = common.max_query_len == 1 and len(lens) and (lens > 1).all()
        carries = self.states is not None and (not settled or self.layout.policy is StatePolicy.FOLD)
        if carries or meta.num_prefills or not continues:
            return 0
        if self.layout.mode is MambaCacheMode.NONE:
            return self.layout.max_model_len
        size = self.layout.block_size
        into_block = (lens - 1) % size
        # The first step of a block reads the previous block's slot and writes another; later steps use one slot.
        return 0 if (into_block == 0).any() else size - 1 - int(into_block.max())

    def commit(
        self, meta: MambaMetadata, common: CommonAttentionMetadata, group: int, accepted: Tensor, *,
        captured: bool = False,
    ) -> CopyPlan | FoldPlan | None:  # fmt: skip
        """End the step that `meta` was built for; call it before the next `build`.

        Updates `states` and returns a plan for the layers' states. Pass a `CopyPlan` to `StatePool.copy` and
        a `FoldPlan` to `StatePool.fold`; with None there is nothing to do.

        Args:
            meta, common, group: result and arguments of `build`.
            accepted: (R,) integer on the device, accepted tokens of each decode row, counting the row's first token,
                which is no draft; ignored in prefill rows and padded rows.
            captured: whether a CUDA graph records the call. The method then reads no values of the batch on the host.
                Use it only for decode batches without rows inside a prompt, because their rings are not emptied then.
        """
        if self.states is None or meta.request_row is None:
            return None
        table, computed, lens = common.block_tables[group], common.num_computed_tokens, common.query_start_loc.diff()
        out, scanned = self._commit_plan.rows(0, common.num_reqs), None
        if meta.num_prefills:
            scanned = self._row_indices[: common.num_reqs] >= meta.num_decodes
        if isinstance(meta.plan, SlotPlan):
            assert isinstance(out, CopyPlan)
            drafts = (lens - 1).clamp_min_(0)
            if scanned is not None:
                drafts.masked_fill_(scanned, 0)
            copies = plan_copy(self.layout, table, computed, lens, drafts, accepted, meta.plan, out)
            self.states.scatter(meta.request_row, copies.accepted, prev_col=copies.prev_col)
            return None if self.layout.mode is MambaCacheMode.NONE else copies
        assert isinstance(out, FoldPlan)
        flush = None
        if not captured:  # decodes inside a prompt: a later prefill ignores rings, so theirs are emptied
            inside = common.is_prefilling.numpy()[: common.num_reqs] & (np.arange(common.num_reqs) < meta.num_decodes)
            flush = upload(inside, accepted.device) if inside.any() else None
        fold = plan_fold(self.layout, meta.plan, computed, lens, accepted, flush=flush, scanned=scanned, out=out)
        self.states.scatter(meta.request_row, fold.accepted, base=fold.base)
        return fold

    def signature(self, meta: MambaMetadata) -> Signature:
        """Return the host scalars that a graph fixes: decode and prefill counts, and bounds that size launches."""
        return Signature(
            (
                ("num_decodes", Role.CONTROL, meta.num_decodes),
                ("num_decode_tokens", Role.LAYOUT, meta.num_decode_tokens),
                ("num_prefills", Role.CONTROL, meta.num_prefills),
                ("max_chunks_per_row", Role.BOUND, meta.prefill_chunks.max_chunks_per_row),
                ("chunk_size", Role.LAYOUT, meta.chunk_size),
                ("max_query_len", Role.BOUND, meta.max_query_len),
            )
        )

    def addresses(self) -> Mapping[str, int]:
        """Return the device address of every persistent buffer, by name."""
        tensors = self._buffers.tensors() | {"no_prompts": self._no_chunks.query_start_loc}
        tensors |= {f"piecewise.{name}": tensor for name, tensor in self._piecewise.tensors().items()}
        tensors["piecewise.query_start_loc"] = self._piecewise_loc
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def _plan(
        self, common: CommonAttentionMetadata, table: Tensor, request_row: Tensor | None
    ) -> SlotPlan | ReplayPlan:
        """Compute the state slots of the step into persistent buffers, by the planner of the layout's policy."""
        plan = self._buffers.plan.rows(0, common.num_reqs)
        args = (self.layout, table, common.num_computed_tokens, common.query_start_loc.diff())
        if self.states is None or request_row is None:
            assert isinstance(plan, SlotPlan)
            return plan_step(*args, out=plan)
        carried = self.states.gather(request_row)
        if isinstance(plan, ReplayPlan):
            return plan_replay(*args, carried.base, carried.accepted, plan)
        return plan_step(*args, carried.accepted, plan, prev_col=carried.prev_col)

    @staticmethod
    def _request_rows(common: CommonAttentionMetadata, group: int) -> Tensor:
        """Return the row in `states` of each request, (R,): the one column of the next group's block table."""
        tables = common.block_tables[group + 1 : group + 2]
        if not tables or tables[0].shape[1] != 1:
            found = f"has {tables[0].shape[1]} columns" if tables else "is missing"
            raise ValueError(
                f"common: the table of group {group + 1} {found}; the group after Mamba group {group} must have one "
                f"column, the row of `states` of each request"
            )
        return tables[0].select(1, 0)

    def _split(self, common: CommonAttentionMetadata, table: Tensor) -> tuple[int, int, PrefillChunks]:
        """Return the number of decode rows, the number of their tokens, and the chunks of the prefill rows.

        Decodes are the leading rows that continue a state by at most 1 + K tokens (K drafts), and trailing rows without
        tokens if there is no prefill row. One token over an existing state is a decode even if it ends a prompt.
        Several tokens of a prompt are a prefill. As a decode they would count as draft tokens, and the next step would
        start from the state after the first one.
        """
        starts, prompt = common.query_start_loc_cpu.numpy(), common.is_prefilling.numpy()
        query_lens = starts[1:] - starts[:-1]
        # An upper bound is enough: it is exact for rows inside a prompt, and other rows always have a state.
        computed = common.seq_len_bound.upper - query_lens
        drafts = (query_lens > 1) & (query_lens <= 1 + self.layout.num_speculative_tokens) & ~prompt
        few = ((query_lens == 1) | drafts) & (computed > 0)
        first = int(few.argmin())
        if few[first] or starts[first] == starts[-1]:
            return len(few), common.num_tokens, self._no_chunks
        continues = ~prompt & (query_lens > 0) & (computed > 0)
        late = np.logical_or.accumulate(prompt[first:]) & continues[first:]
        if self.states is not None and late.any():
            raise ValueError(
                f"common: row {first + int(late.argmax())} is past its prompt, and row "
                f"{first + int(prompt[first:].argmax())} before it is not; rows past their prompts come first"
            )
        chunks = self._chunker.split(starts[first:] - starts[first], computed[first:], table[first:])
        return first, int(starts[first]), chunks


class _Buffers:
    """Plan and request rows of a step at fixed addresses, for at most `num_reqs` rows."""

    def __init__(self, layout: CacheLayout, num_reqs: int, device: torch.device | str) -> None:
        folds = layout.policy is StatePolicy.FOLD
        self.plan = ReplayPlan.allocate(num_reqs, device) if folds else SlotPlan.allocate(layout, num_reqs, device)
        self.request_row = torch.zeros(num_reqs, dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return self.plan.tensors() | {"request_row": self.request_row}
