"""The seam between an engine and whatever proposes tokens: a chain of draft passes, one block pass, or no model at all.

Legend for shapes: R real rows of the target's step, Tp its tokens with padding, K draft tokens at most.
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
    """What a drafter wants to see of the target's forward pass.

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
    """A step of the target whose tokens were just verified. Tensors are on the device; only `room` is written to."""

    batch: CommonAttentionMetadata
    """The step as it was staged, rejected tokens and padding included."""
    attention: PagedAttentionMetadata | None
    """What the target's attention layers were told; None for a target without any."""
    features: tuple[Tensor, ...]
    """One (Tp, width) tensor per need: taps in their order, then the final hidden state."""
    next_token: Tensor
    """(R,) int64 token that follows the last valid one: the last that was emitted, or the next one of the prompt."""
    num_valid: Tensor
    """(R,) int64 tokens of the row that stay: those that were certain and the drafts that were accepted; at least 1, or
    0 in a row that has ended by an error, whose drafts nobody reads."""
    emitted: Tensor
    """(R, 1 + K) int64 tokens emitted in this step, -1 behind the last; all -1 where the prompt goes on."""
    rows: Tensor
    """(R,) int64 rows of the engine's request table."""
    seeds: Tensor
    """(R,) int64 seeds of the requests."""
    temperature: Tensor
    """(R,) float32; 0 is greedy."""
    num_drafts: int
    """Drafts wanted for each row, at most K; 0 means that the drafter only brings what it remembers up to date."""
    key: BatchExecutionDescriptor | None
    """The graph that the target's step ran on; None if it ran eagerly."""
    greedy: bool = False
    """The host knows that every row's temperature is 0, so that eager passes need no noise. False is always right."""
    begins: Tensor | None = None
    """(R,) int64 position of the first token of each row that the drafter was shown: it remembers nothing of those
    before; at most the first of this step. None for 0: other drafters than `EagleSpeculator`, if it `begins_late`,
    get no other.
    """
    room: Tensor | None = None
    """(R, K) int64 that a drafter may write to, and return, in place of a tensor of its own."""

    def require(self, needs: TargetNeeds, num_speculative_tokens: int) -> None:
        """Raise `ValueError` for what is not as a drafter with such needs wants it."""
        expected = len(needs.taps) + needs.hidden
        if len(self.features) != expected:
            raise ValueError(f"features has {len(self.features)} tensors; the head needs {expected}: {needs}")
        for index, feature in enumerate(self.features):
            if feature.shape[0] != self.batch.num_tokens:
                raise ValueError(
                    f"features[{index}] has {feature.shape[0]} tokens; the step has {self.batch.num_tokens}"
                )
        if not 0 <= self.num_drafts <= num_speculative_tokens:
            raise ValueError(f"num_drafts is {self.num_drafts}; it must be in [0, {num_speculative_tokens}]")


class Drafter(Protocol):
    """Proposes what comes next. It may remember what it likes about the requests' tokens, and is told of every step.

    num_speculative_tokens: K.
    """

    num_speculative_tokens: int

    @property
    def needs(self) -> TargetNeeds:
        """What it wants to see of the target."""
        ...

    def admit(self, row: int, token_ids: list[int]) -> None:
        """A request with these tokens begins in row `row` of the table; whatever was there before is gone."""
        ...

    def propose(self, context: DraftContext) -> Tensor:
        """(R, K) int64 drafts for the tokens after `next_token`; -1 where there is none. No host sync."""
        ...


@runtime_checkable
class BoundedDrafter(Drafter, Protocol):
    """A drafter that proposes nothing behind some length, such as a head that has only so many positions.

    max_drafted_len: tokens of a sequence, its drafts included. An engine asks for no more, and counts no more.
    """

    max_drafted_len: int


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that says how its drafts are drawn; without these two, they are taken for a function of the tokens.

    rule: whose noise it draws with.
    """

    rule: Rule

    def distribution(self, rows: Tensor) -> DraftDistribution:
        """How the drafts that it proposed last for these rows of the table, (R,) int64, were proposed; `Logits` of all
        K of each. No host sync.
        """
        ...


def distribution_of(drafter: Drafter | None, rule: Rule) -> Callable[[Tensor], DraftDistribution]:
    """How an engine that verifies under `rule` learns how drafts were proposed, by rows of its table.

    A drafter that doesn't say so is one-hot under RATIO and BLOCK, and must not look at noise, so that its engine shows
    it every row as greedy. `ValueError` for a drafter that draws for another rule.
    """
    if not isinstance(drafter, SamplingDrafter):
        distribution = Coupled() if rule is Rule.COUPLED else OneHot()
        return lambda rows: distribution
    # Not only the kind of the distribution must fit: the names of BLOCK's draws hold their place, and RATIO's do not.
    if drafter.rule is not rule:
        raise ValueError(
            f"drafter draws for rule {drafter.rule.name}; drafts are tested under {rule.name}, which asks for "
            "other noise"
        )
    return drafter.distribution
