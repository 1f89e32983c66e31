"""A draft head without an engine: what it would draft behind recorded features of the target, under any convention.

Row p of a head sees the target's feature at position p and token p + 1, and drafts token p + 2.
"""

# Shape letters: T rows of a head, H hidden size.

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bateleur.eagle import DraftContext, TargetNeeds
from bateleur.eagle.heads import DenseAttend, Head
from bateleur.eagle.heads.eagle3 import Eagle3Head
from bateleur.eagle.heads.files import open_tensors
from bateleur.eagle.testing.drafters import ScriptedDrafter


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text of the target, and what it saw on the way."""

    tokens: list[int]
    """Prompt and output."""
    prompt_len: int
    features: dict[int, Tensor]
    """(T, width) by boundary, on the CPU; one behind the last boundary is the state after the final norm."""

    @property
    def num_rows(self) -> int:
        """Rows of a head that draft a token which is known."""
        return min(len(self.tokens) - 2, *(len(feature) for feature in self.features.values()))


class Recorder(ScriptedDrafter):
    """Keeps the target's features, and proposes what it was told that the target will say: at first nothing.

    keep: boundaries to keep, of 0 .. `num_layers`, and `num_layers` + 1 for the state after the final norm; empty keeps
        nothing.
    script: whole texts, prompt and output, whose rest is proposed.
    """

    def __init__(self, num_speculative_tokens: int, num_layers: int, vocab_size: int) -> None:
        super().__init__(self._rest, num_speculative_tokens, None, vocab_size)
        self.needs = TargetNeeds(tuple(range(num_layers + 1)), hidden=True)
        self.keep: frozenset[int] = frozenset()
        self.script: list[list[int]] = []
        self._request: dict[int, tuple[int, ...]] = {}
        self._chunks: dict[tuple[int, ...], dict[int, list[Tensor]]] = {}

    def admit(self, row: int, token_ids: list[int]) -> None:
        """See `Drafter`."""
        super().admit(row, token_ids)
        self._request[row] = key = tuple(token_ids)
        if self.keep:
            self._chunks[key] = {boundary: [] for boundary in self.keep}

    def propose(self, context: DraftContext) -> Tensor:
        """See `Drafter`."""
        if self.keep:
            starts, valid = context.batch.query_start_loc.tolist(), context.num_valid.tolist()
            for i, row in enumerate(context.rows.tolist()):
                for boundary, chunks in self._chunks[self._request[row]].items():
                    chunks.append(context.features[boundary][starts[i] : starts[i] + valid[i]].cpu())
        return super().propose(context)

    def recorded(self, prompt: Sequence[int], tokens: Sequence[int]) -> Recorded:
        """What was seen of the request with this prompt, which became these tokens."""
        chunks = self._chunks[tuple(prompt)]
        features = {boundary: torch.cat(parts) for boundary, parts in chunks.items()}
        return Recorded(list(tokens), len(prompt), features)

    def _rest(self, tokens: list[int]) -> list[int]:
        for text in self.script:
            if text[: len(tokens)] == tokens:
                return text[len(tokens) :]
        return []


# --- conventions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Convention:
    """One reading of a checkpoint."""

    name: str
    cause: str
    """What is wrong if this one is better: "features", "norm" or "vocabulary"; "" for the reading as declared."""
    boundaries: tuple[int, ...]
    """What the head is fed; one behind the last boundary is the state after the final norm."""
    head: Head
    device: torch.device


def conventions(
    head: Head, num_layers: int, device: torch.device, raw_ids: Tensor | None = None
) -> list[Convention]:
    """How the head could have been meant; first what its checkpoint declares.

    raw_ids: (Vd,) the table d2t as it is in the file, where it could be ids instead of offsets.
    """
    taps, after_norm = head.spec.needs.taps, num_layers + 1
    declared = (*taps, after_norm) if head.spec.needs.hidden else taps
    found = [Convention("as declared", "", declared, head, device)]

    def add(name: str, cause: str, boundaries: tuple[int, ...], meant: Head) -> None:
        if (boundaries, meant) not in [(other.boundaries, other.head) for other in found]:
            found.append(Convention(name, cause, boundaries, meant, device))

    if taps and not head.spec.needs.hidden:
        later = tuple(min(tap + 1, num_layers) for tap in taps)
        usual = (2, num_layers // 2, num_layers - 3)
        add("layer ids are outputs of layers: taps + 1", "features", later, head)
        add("taps - 1", "features", tuple(max(tap - 1, 0) for tap in taps), head)
        add("taps in ascending order", "features", tuple(sorted(taps)), head)
        if len(taps) == 3 and 2 < usual[1] < usual[2]:
            add("taps of the usual default", "features", usual, head)
    if head.spec.needs.hidden:
        add("fed the state before the final norm", "norm", (*taps, num_layers), head)
    if isinstance(head, Eagle3Head):
        other = _other_residual(head)
        normed = "normed" if other.spec.norm_before_residual else "plain"
        add(f"first residual from the {normed} hidden state", "norm", declared, other)
    if raw_ids is not None:
        ids = copy.copy(head)
        ids.target_ids = raw_ids.to(device)
        add("d2t holds ids, not offsets", "vocabulary", declared, ids)
    return found


def other_recycling(head: Head) -> Eagle3Head | None:
    """The head, fed its own state from the other side of its last norm; None where it has no such choice."""
    if not isinstance(head, Eagle3Head):
        return None
    other = copy.copy(head)
    other.spec = replace(head.spec, recycle="post_norm" if head.spec.recycle == "pre_norm" else "pre_norm")
    return other


@dataclass(frozen=True, slots=True)
class IdTable:
    """The table d2t of a checkpoint which holds offsets by definition, but could hold ids."""

    ids: Tensor
    """(Vd,) the table as it is."""
    refused: bool
    """Whether it is impossible as offsets, so that no loader takes it."""


def id_table(path: str | Path, vocab_size: int) -> IdTable | None:
    """The table, if it could be one of ids; None where it can't, or where there is none.

    Real tables of frequent tokens have neighbours among the ids, where offsets repeat and ids never do.
    """
    files = open_tensors(Path(path))
    tensors = {name.rpartition(".")[2]: name for name in files}
    if "d2t" not in tensors:
        return None
    ids = files[tensors["d2t"]].long()
    if ids.dim() != 1 or len(ids) < 2 or bool((ids.diff() <= 0).any()):
        return None
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        return None
    refused = int(ids[-1]) + len(ids) > vocab_size
    if "t2d" in tensors:
        refused |= torch.equal(files[tensors["t2d"]].bool().nonzero().flatten(), ids)
    return IdTable(ids, refused)


def _other_residual(head: Eagle3Head) -> Eagle3Head:
    normed = not head.spec.norm_before_residual
    other = copy.copy(head)
    other.spec = replace(head.spec, norm_before_residual=normed)
    other.first = copy.copy(head.first)
    # The layer took the switch from the specification when it was made.
    vars(other.first)["_norm_before_residual"] = normed
    return other


# --- drafting ---------------------------------------------------------------------------------------------


def first_drafts(convention: Convention, text: Recorded, shuffle: int | None = None) -> Tensor:
    """Whether the first draft is right, at every place of the output; bool (output tokens - 1,).

    The text before is the target's own, whatever was drafted. `shuffle`: seed of a permutation of the features over the
    text, which leaves the head with the tokens alone.
    """
    head, rows, first = convention.head, text.num_rows, text.prompt_len - 1
    hidden_TH = _fused(convention, text)
    if shuffle is not None:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(shuffle))
        hidden_TH = hidden_TH[order.to(hidden_TH.device)]
    tokens = torch.tensor(text.tokens, device=hidden_TH.device)
    positions = torch.arange(rows, device=hidden_TH.device)
    out_TH, _ = head.forward(tokens[1 : rows + 1], hidden_TH, positions, DenseAttend(head.spec))
    return (_choose(head, out_TH[first:]) == tokens[first + 2 : rows + 2]).cpu()


def roll_out(
    convention: Convention, text: Recorded, num_speculative_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode the text with the head's chains: how often draft i was reached, and right; (K,) each.

    The steps are those of an engine at temperature 0, with attention over one dense cache.
    """
    head, rows = convention.head, text.num_rows
    tried, kept = np.zeros((2, num_speculative_tokens), np.int64)
    hidden_TH = _fused(convention, text)
    tokens = torch.tensor(text.tokens, device=hidden_TH.device)
    attend = DenseAttend(head.spec)
    done, now = 0, text.prompt_len  # rows in the cache before and after the true ones of this step
    while now <= rows:
        positions = torch.arange(done, now, device=hidden_TH.device)
        state = head.forward(tokens[done + 1 : now + 1], hidden_TH[done:now], positions, attend)
        accepted, known = 0, min(num_speculative_tokens, rows + 1 - now)
        for i in range(known):
            draft = _choose(head, state[0][-1:])
            tried[i] += 1
            if int(draft) != text.tokens[now + 1 + i]:
                break
            kept[i] += 1
            accepted += 1
            if i + 1 < known:
                state = head.forward(draft, state[1][-1:], positions[-1:] + 1 + i, attend)
        attend.truncate(now)
        done, now = now, now + accepted + 1
    return tried, kept


def _fused(convention: Convention, text: Recorded) -> Tensor:
    """(T, H) on the head's device."""
    features = [text.features[boundary][: text.num_rows] for boundary in convention.boundaries]
    return convention.head.fuse([feature.to(convention.device) for feature in features])


def _choose(head: Head, hidden_TH: Tensor) -> Tensor:
    """(T,) int64: the likeliest token of each row, in the target's vocabulary."""
    ids_T = head.logits(hidden_TH).argmax(-1)
    return ids_T if head.target_ids is None else head.target_ids[ids_T]
