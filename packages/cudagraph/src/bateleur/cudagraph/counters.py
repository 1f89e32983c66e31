"""Counts of decisions: the evidence that graphs are used, or why they are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from bateleur.cudagraph.decision import Decision, Why


class DecisionCounter:
    """Counts decisions by reason, and the tokens run and padded on graphs."""

    def __init__(self) -> None:
        self._by_why: Counter[Why] = Counter()
        self.num_graph_tokens = 0
        """Tokens run on graphs, with padding."""
        self.num_pad_tokens = 0
        """Of these, padding."""

    def count(self, decision: Decision) -> None:
        """Add one decision."""
        self._by_why[decision.why] += 1
        if decision.descriptor is not None:
            self.num_graph_tokens += decision.descriptor.num_tokens
            self.num_pad_tokens += decision.pad_tokens

    @property
    def by_why(self) -> Mapping[Why, int]:
        """How often each reason occurred; a view, without reasons that never did."""
        return MappingProxyType(self._by_why)

    @property
    def total(self) -> int:
        """Number of decisions."""
        return self._by_why.total()

    def table(self) -> str:
        """Return the counts as text, most frequent first, and the share of padding."""
        lines = [f"{count:>10}  {why}" for why, count in self._by_why.most_common()]
        if self.num_graph_tokens:
            lines.append(f"padding {self.num_pad_tokens / self.num_graph_tokens:.1%} of tokens run on graphs")
        return "\n".join(lines)
