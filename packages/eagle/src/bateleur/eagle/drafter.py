"""The interface between an engine and a drafter: a chain of draft passes, one block pass, or no model at all.

Legend for shapes: R requests of the target's step, Tp its tokens with padding, K draft tokens at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from bateleur.eagle.rules import Coupled, DraftDistribution, OneHot, Rule

if TYPE_CHECKING:
    from bateleur.cudagraph import BatchExecutionDescriptor
    from bateleur.metadata import CommonAttentionMetadata, PagedAttentionMetadata


@dataclass(frozen=True, slots=True)
class TargetNeeds:
    """Hidden states of the target that a drafter reads.

    taps: boundaries between the target's layers, in any order. 0 is the output of the embedding, l the input of layer
        l, and the number of layers is the output of the last one, before the final norm.
    hidden: the final hidden state, after the final norm.
    """

    taps: tuple[int, ...] = ()
    hidden: bool = False

    def __post_init__(self) -> None:
        if min(self.taps, default=0) < 0:
            raise ValueError(f"taps is {self.taps}; boundaries are counted from 0")


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Input of a drafter: a step of the target whose tokens were just verified. Tensors are on the device.

    batch: the step as it was staged, rejected tokens and padding included.
    attention: attention metadata of the target; None for a target without attention.
    features: one (Tp, width) tensor per need: taps in their order, then the final hidden state.
    next_token: (R,) int64 token after the last valid one: the last emitted token, or the next one of the prompt.
    num_valid: (R,) int64 tokens of the row that are kept, accepted drafts included: at least 1, or 0 after an error.
    emitted: (R, 1 + K) int64 tokens emitted in this step, -1 after the last; all -1 in the middle of a prompt.
    rows: (R,) int64 rows of the engine's request table.
    seeds: (R,) int64 seeds of the requests.
    temperature: (R,) float32; 0 is greedy.
    num_drafts: drafts wanted for each row, at most K; with 0 the drafter only updates its caches.
    key: the graph that the target's step ran on; None if it ran eagerly.
    greedy: every row's temperature is 0, so that eager passes need no noise. False is always correct.
    start_positions: (R,) int64, first position of each row that the drafter has seen; it attends to no earlier one. At
        most the first position of this step. None means 0; drafters that cannot start late get None, see
        `EagleSpeculator.can_start_late`.
    """

    batch: CommonAttentionMetadata
    attention: PagedAttentionMetadata | None
    features: tuple[Tensor, ...]
    next_token: Tensor
    num_valid: Tensor
    emitted: Tensor
    rows: Tensor
    seeds: Tensor
    temperature: Tensor
    num_drafts: int
    key: BatchExecutionDescriptor | None
    greedy: bool = False
    start_positions: Tensor | None = None

    def require(self, needs: TargetNeeds, num_speculative_tokens: int) -> None:
        """Raise `ValueError` if the context does not fit a drafter with these needs."""
        expected = len(needs.taps) + needs.hidden
        if len(self.features) != expected:
            raise ValueError(f"features has {len(self.features)} tensors; the head needs {expected}: {needs}")
        num_tokens = self.batch.num_tokens
        for index, feature in enumerate(self.features):
            if len(feature) != num_tokens:
                raise ValueError(f"features[{index}] has {len(feature)} tokens; the step has {num_tokens}")
        if not 0 <= self.num_drafts <= num_speculative_tokens:
            raise ValueError(f"num_drafts is {self.num_drafts}; it must be in [0, {num_speculative_tokens}]")


class Drafter(Protocol):
    """Proposes draft tokens. It may keep state of the requests, and sees every step.

    num_speculative_tokens: K, most drafts of a request.
    """

    num_speculative_tokens: int

    @property
    def needs(self) -> TargetNeeds:
        """Hidden states of the target that the drafter reads."""

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Start a request with these tokens in row `row` of the request table; drop the row's earlier state."""

    def propose(self, context: DraftContext) -> Tensor:
        """Return (R, K) int64 drafts for the tokens after `next_token`; -1 where there is none. No host sync."""


@runtime_checkable
class BoundedDrafter(Drafter, Protocol):
    """A drafter with a length limit, such as a head with a maximum position.

    max_drafted_len: most tokens of a sequence, drafts included. An engine asks for no drafts beyond it.
    """

    max_drafted_len: int


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that declares how its drafts are sampled. Other drafters are assumed to be deterministic functions
    of the tokens.

    rule: the acceptance rule that will verify the drafts. It determines the random numbers for sampling drafts: those
        of the target's own samples under `Rule.COUPLED`, independent ones under the other rules.
    """

    rule: Rule

    def distribution(self, rows: Tensor) -> DraftDistribution:
        """Return the distribution of the last K drafts of rows (R,) int64 of the request table. No host sync."""


def distribution_of(drafter: Drafter | None, rule: Rule) -> Callable[[Tensor], DraftDistribution]:
    """Return a function from request table rows to the distribution of their drafts, for the acceptance rule `rule`.

    Under RATIO and BLOCK the drafts of a drafter without a declared distribution count as one-hot. They must then be a
    function of the tokens, so the engine sets `DraftContext.temperature` to 0. Raises `ValueError` for a drafter that
    samples for another rule.
    """
    if not isinstance(drafter, SamplingDrafter):
        distribution = Coupled() if rule is Rule.COUPLED else OneHot()
        return lambda rows: distribution
    # Keys of BLOCK contain the draft index and keys of RATIO do not, so the same kind of distribution is not enough.
    if drafter.rule is not rule:
        raise ValueError(
            f"drafter draws for rule {drafter.rule.name}; drafts are tested under {rule.name}, which asks for "
            "other noise"
        )
    return drafter.distribution
