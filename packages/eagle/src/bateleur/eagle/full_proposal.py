"""A whole proposal in one CUDA graph: staging of the first draft pass, the pass, and all further passes (the chain)."""

# Shape letters: N rows of a padded step, T its tokens, K drafts at most.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bateleur.cudagraph import BatchExecutionDescriptor, Execution, Phase
from bateleur.eagle.borrow import TargetState
from bateleur.eagle.buffers import DraftInputs
from bateleur.eagle.chain_steps import ChainSteps, bound_of_drafts
from bateleur.eagle.drafter import DraftContext
from bateleur.eagle.geometry import draft_max_seq_len, stage_first
from bateleur.eagle.heads.spec import Head
from bateleur.eagle.managers import Adopt
from bateleur.eagle.passes import DraftPasses, DraftState, refresh_of
from bateleur.metadata import AttentionMetadataBuilder, BuildPhase, GraphSupport, Signature

Borrow = Callable[[TargetState, BuildPhase], DraftState]
"""Builds the state of a first pass over a step of the target."""


def can_follow(builder: AttentionMetadataBuilder[Any]) -> bool:
    """Whether metadata of `builder` can be refreshed inside a graph, so that one graph can hold a whole proposal."""
    return refresh_of(builder) is not None and builder.graph_support >= GraphSupport.SINGLE_TOKEN


@dataclass(frozen=True, slots=True)
class FullProposalState:
    """Metadata of the draft passes of a proposal: the first one, and those after it (the chain)."""

    first: DraftState
    chain: DraftState | None
    """None for fewer than two drafts."""

    @property
    def signature(self) -> Signature:
        """Host scalars of the metadata of all passes."""
        parts = {"first": self.first, "chain": self.chain}
        return Signature.join(**{name: each.sign(each.metadata) for name, each in parts.items() if each is not None})


class FullProposal:
    """One graph for a whole proposal, after steps in which all requests decode with equal query lengths. The host reads
    nothing between passes.
    """

    def __init__(
        self,
        head: Head,
        inputs: DraftInputs,
        passes: DraftPasses,
        steps: ChainSteps,
        borrow: Borrow,
        adopt: Adopt,
        group: int,
    ) -> None:
        self._head, self._inputs, self._passes, self._steps = head, inputs, passes, steps
        self._borrow, self._adopt, self._group = borrow, adopt, group
        self._max_model_len = steps.max_seq_len
        self._columns_K = torch.arange(inputs.num_speculative_tokens, device=inputs.device)

    @property
    def generation(self) -> int:
        """Number of times that metadata of the passes after the first was built."""
        return self._steps.generation

    def addresses(self) -> Mapping[str, int]:
        """Return addresses by name of the drafter's buffers and caches, and of its builder's buffers."""
        return self._steps.addresses()

    def poison(self) -> None:
        """Fill the drafter's buffers with invalid values; each proposal overwrites all entries that it reads."""
        self._steps.poison()

    def stage(self, target: TargetState, num_drafts: int, phase: Phase = Phase.RUN) -> FullProposalState:
        """Build the metadata of all passes of a proposal of `num_drafts` drafts, after a step of the target.

        The other inputs are staged by `record`. In a phase other than RUN the metadata has the bounds of the longest
        requests.
        """
        first, batch = self._borrow(target, BuildPhase(phase.value)), target.batch
        if num_drafts < 2:
            return FullProposalState(first, None)
        longest = self._max_model_len
        if phase is Phase.RUN:
            k = self._inputs.num_speculative_tokens
            longest = draft_max_seq_len(batch.seq_len_bound, k, longest)
        bound = bound_of_drafts(batch).advanced(num_drafts - 1, self._max_model_len)
        num_rows, padded_rows = batch.num_actual_reqs, batch.num_reqs
        chain = self._steps.build(num_rows, padded_rows, bound, longest, BuildPhase(phase.value))
        return FullProposalState(first, chain)

    def fuzz(self, target: TargetState, seed: int) -> None:
        """Fill caches and buffers of the drafter with random values; use it only in an engine without requests."""
        self._adopt(target, Phase.RUN, seed)

    def record(self, key: BatchExecutionDescriptor, state: FullProposalState, context: DraftContext) -> Tensor:
        """Propose drafts for all N rows of the padded step. Returns (N, K) int64, -1 where there is no draft.

        key: graph key of the step, with the variant `(num_drafts,)`.
        context: tensors of N rows, at fixed addresses or made by the same graph; `rows` of padding are
            `max_num_reqs`.
        """
        x, batch, (num_drafts,) = self._inputs, context.batch, key.variant
        stage_first(x, batch, self._group, context.next_token, context.num_valid)
        x.hold_rows(context.seeds, context.temperature, batch.block_tables[self._group], context.rows)
        x.hidden[: batch.num_tokens] = self._head.fuse(context.features)
        room_N = (self._max_model_len - x.token_positions[: batch.num_reqs]).clamp_(max=int(num_drafts))
        if not num_drafts:
            self._passes.store_kv(Execution(key, state.first))
        else:
            self._passes.first(Execution(key, state.first))
        if state.chain is not None:
            self._passes.chain(Execution(key, state.chain))
        return x.tokens[: batch.num_reqs].where(self._columns_K < room_N.unsqueeze(1), -1)

    def ran(self, num_rows: int) -> None:
        """Record on the host that a replayed graph has written the leading `num_rows` rows of the buffers."""
        self._inputs.note_rows(num_rows)
