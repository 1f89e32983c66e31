"""What the head is worth: true chains of drafts over text that the target wrote, with the noise it was written with.

A draft is accepted iff it is the token that the target itself drew, so the written text is all that is needed of the
target: as long as a chain is right, its own tokens are the text's, and behind its first error nothing counts. One
teacher-forced pass therefore gives the exact number of drafts that an engine accepts at every place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, Role, gumbel
from shipped_draft.data import Text, pad
from shipped_draft.network import Head
from shipped_draft.target import Target


@dataclass(frozen=True)
class Measured:
    """Speculative decoding of some sequences at one temperature.

    tokens_per_step: emitted tokens per verification. acceptance: per draft position, of the drafts whose predecessors
    were all accepted, the share that was.
    """

    tokens_per_step: float
    acceptance: list[float]
    steps: int

    @classmethod
    def of(cls, accepted: NDArray[np.int64], k: int) -> Measured:
        """From the number of accepted drafts of every verification."""
        reached = np.array([(accepted >= i).sum() for i in range(k + 1)])
        shares = [float(b / a) if a else 0.0 for a, b in pairwise(reached)]
        return cls(float(1 + accepted.mean()), shares, len(accepted))


@torch.no_grad()
def accepted_drafts(
    head: Head,
    target: Target,
    ids: NDArray[np.uint16],
    prompt_len: int,
    k: int,
    temperature: float,
    seed: int,
    vocab: HashedVocab,
    target_ids: Tensor,
) -> NDArray[np.int64]:
    """Entry i: how many of K drafts are accepted if the last emitted token is the one at index `prompt_len` + i."""
    taps = target.taps_of(pad([ids], multiple=64)).float()
    tokens = torch.from_numpy(ids.astype(np.int64))
    chains = len(ids) - prompt_len - k
    begin = torch.tensor([prompt_len - 1])
    embedded = F.embedding(tokens, target.embedding)[None]
    states = head.unroll(embedded, taps[:, : len(ids)], begin, chains, k)
    right = torch.ones(chains, dtype=torch.int64)
    accepted = torch.zeros(chains, dtype=torch.int64)
    drawn_at = torch.arange(prompt_len + 1, len(ids))  # index of the token of every draw
    noise = gumbel(Keys(torch.full_like(drawn_at, seed), drawn_at), Role.TARGET, vocab) if temperature else None
    for step, hidden in enumerate(states):
        logits = head.logits(hidden)[0].float()
        if noise is not None:
            logits = logits / temperature + noise[step : step + chains]
        right *= target_ids[logits.argmax(-1)] == tokens[prompt_len + 1 + step :][:chains]
        accepted += right
    return accepted.numpy()


def walk(accepted: NDArray[np.int64]) -> Iterator[int]:
    """The drafts accepted by each verification of one sequence: a step emits those and one token more."""
    place = 0
    while place < len(accepted):
        yield int(accepted[place])
        place += int(accepted[place]) + 1


def measure(
    head: Head, target: Target, text: Text, target_ids: Tensor, k: int = 4, only: Sequence[int] | None = None
) -> dict[str, Measured]:
    """By temperature, over the sequences of `text` (or those of index `only`).

    target_ids: (draft vocabulary,) int64 id of each draft id in the target's vocabulary.
    """
    vocab = HashedVocab.of(target_ids, target_ids.device)
    steps: dict[str, list[int]] = {}
    for i in range(len(text)) if only is None else only:
        ids, prompt_len, heat = text.sequence(i), int(text.prompt_len[i]), float(text.temperature[i])
        if len(ids) - prompt_len > k:
            accepted = accepted_drafts(head, target, ids, prompt_len, k, heat, int(text.seed[i]), vocab, target_ids)
            steps.setdefault(f"{heat:g}", []).extend(walk(accepted))
    return {heat: Measured.of(np.array(counts), k) for heat, counts in sorted(steps.items())}
