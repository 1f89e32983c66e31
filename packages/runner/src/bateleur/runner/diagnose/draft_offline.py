"""A draft head without an engine: what it would draft behind recorded features of the target, under any convention.

Row p of a head sees the target's feature at position p and token p + 1, and drafts token p + 2.
"""

# Shape letters: T rows of a text, P places of its answer where a chain begins, K drafts of a chain, N keys of the text
# and of the passes, V vocabulary, H heads, D lanes of a head.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle import DraftContext, TargetNeeds
from bateleur.eagle.heads import HeadSpec
from bateleur.runner.diagnose.conventions import Convention


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text of the target, and what it saw on the way."""

    tokens: list[int]
    """Prompt and output."""
    prompt_len: int
    features: dict[int, Tensor]
    """(T, width) by boundary; one behind the last boundary is the state after the final norm."""


class Recorder:
    """A drafter that keeps the target's features, and proposes what it was told that the target will say.

    keep: boundaries to keep, of 0 .. `num_layers`, and `num_layers` + 1 for the state after the final norm; empty keeps
        nothing.
    script: whole texts, prompt and output, whose rest is proposed; at first none. It reads the device, and raises
        `RuntimeError` for a step that it was told nonsense of.
    """

    def __init__(self, num_speculative_tokens: int, num_layers: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.needs = TargetNeeds(tuple(range(num_layers + 1)), hidden=True)
        self.keep: frozenset[int] = frozenset()
        self.script: list[list[int]] = []
        self._tokens: dict[int, list[int]] = {}
        self._chunks: dict[int, dict[int, list[Tensor]]] = {}
        self._of_prompt: dict[tuple[int, ...], dict[int, list[Tensor]]] = {}

    def admit(self, row: int, token_ids: list[int]) -> None:
        """See `Drafter`."""
        self._tokens[row] = list(token_ids)
        self._chunks[row] = self._of_prompt[tuple(token_ids)] = {boundary: [] for boundary in self.keep}

    def propose(self, context: DraftContext) -> Tensor:
        """See `Drafter`."""
        starts, valid = context.batch.query_start_loc.tolist(), context.num_valid.tolist()
        next_token, emitted = context.next_token.tolist(), context.emitted.tolist()
        drafts = torch.full((len(valid), self.num_speculative_tokens), -1)
        for i, row in enumerate(context.rows.tolist()):
            for boundary, chunks in self._chunks[row].items():
                chunks.append(context.features[boundary][starts[i] : starts[i] + valid[i]].clone())
            new, tokens = [token for token in emitted[i] if token >= 0], self._tokens[row]
            tokens += new
            if new and tokens[-1] != next_token[i]:
                raise RuntimeError(
                    f"row {row}: next_token {next_token[i]} does not follow; emitted were {new}"
                )
            rest = next((text[len(tokens) :] for text in self.script if text[: len(tokens)] == tokens), [])
            right = rest[: context.num_drafts] if new else []
            drafts[i, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return drafts.to(context.next_token.device)

    def recorded(self, prompt: Sequence[int], tokens: Sequence[int]) -> Recorded:
        """What was seen of the request with this prompt, which became these tokens."""
        chunks = self._of_prompt[tuple(prompt)]
        features = {boundary: torch.cat(parts) for boundary, parts in chunks.items()}
        return Recorded(list(tokens), len(prompt), features)


# --- drafting ---------------------------------------------------------------------------------------------


class Chains(NamedTuple):
    """What becomes of a chain at every place of an answer, as if all drafts before each were right; (P, K) each.

    right: the likeliest draft is the text's. overlap: 1 - TV of the laws of target and draft, which is the chance that
    a drawn draft is accepted. known: the draft is one of a token before the last.
    """

    right: Tensor
    overlap: Tensor
    known: Tensor

    @property
    def accepted(self) -> Tensor:
        """Drafts that are accepted, on average, at each place that knows all K tokens, if drafts are drawn."""
        return self.overlap[self.known.all(1)].cumprod(1).sum(1)

    def steps(self) -> tuple[Tensor, Tensor]:
        """(K,) int64 each: how often draft i is reached and accepted in the steps of an engine at temperature 0."""
        prefix = (self.right & self.known).cumprod(1).bool()
        reached = self.known & torch.cat((torch.ones_like(prefix[:, :1]), prefix[:, :-1]), 1)
        step, places = 0, []
        while step < len(prefix):
            places.append(step)
            step += 1 + int(prefix[step].sum())
        return reached[places].sum(0), prefix[places].sum(0)


def chains(
    meant: Convention,
    text: Recorded,
    num_drafts: int,
    target_logits: Callable[[Tensor], Tensor],
    temperature: float,
    *,
    shuffle: bool = False,
) -> Chains:
    """Draft the answer of a text, from true features and tokens at every place.

    target_logits: (n, V) of states after the final norm. `shuffle`: permute the features over the text, which leaves
    the head with the tokens alone.
    """
    head, num_rows = meant.head, len(text.tokens) - 2
    hidden = head.fuse([text.features[boundary][:num_rows] for boundary in meant.boundaries])
    tokens, final = torch.tensor(text.tokens, device=hidden.device), text.features[max(text.features)]
    rows = torch.arange(num_rows, device=hidden.device)
    if shuffle:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
        hidden = hidden[order.to(hidden.device)]
    place_P = rows[text.prompt_len - 1 :]
    attend = _ChainAttend(head.spec, place_P)
    out, state = (each[place_P] for each in head.forward(tokens[1 : num_rows + 1], hidden, rows, attend))
    found = []
    for i in range(num_drafts):
        at = (place_P + 2 + i).clamp(max=len(tokens) - 1)  # the token that is drafted
        logits, law = head.logits(out), (target_logits(final[at - 1]) / temperature).softmax(-1)
        best = logits.argmax(-1)
        if head.target_ids is not None:
            best, law = head.target_ids[best], law[:, head.target_ids]
        overlap = torch.minimum(law, (logits / temperature).softmax(-1)).sum(-1)
        found.append((best == tokens[at], overlap, place_P + 2 + i < len(tokens) - 1))
        if i + 1 < num_drafts:
            out, state = head.forward(tokens[at], state, place_P + 1 + i, attend)
    return Chains(*(torch.stack(parts, 1) for parts in zip(*found, strict=True)))


class _ChainAttend:
    """Attention of chains that begin at every place of a text: one sees the text up to its place, and its own passes.

    The first call for a layer is the pass over the text, each later one a pass of all chains.
    """

    def __init__(self, spec: HeadSpec, place_P: Tensor) -> None:
        self._window = spec.sliding_window or 1 << 31
        self._place_P = place_P
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(T, H, D) of the text, or (P, H, D) of a pass."""
        passes = self._passes.setdefault(layer, [])
        passes.append((k, v))
        num, row_T = len(passes) - 1, torch.arange(len(passes[0][0]), device=q.device)
        chain_P = torch.arange(len(self._place_P), device=q.device)
        place = self._place_P if num else row_T
        at_N = torch.cat((row_T, *(self._place_P + i for i in range(1, num + 1))))
        chain_N = torch.cat((torch.full_like(row_T, -1), *(chain_P for _ in range(num))))
        seen = (chain_N < 0) & (at_N <= place[:, None])
        if num:
            seen |= chain_N == chain_P[:, None]
        seen &= place[:, None] + num - at_N < self._window
        keys, values = (torch.cat(each).transpose(0, 1) for each in zip(*passes, strict=True))
        return F.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, seen, enable_gqa=True
        ).transpose(0, 1)
