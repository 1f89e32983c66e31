"""A draft head without an engine: alternative interpretations of its checkpoint, and drafts on recorded features.

Token p of a head's pass gets the target's feature (hidden state) at position p and token p + 1, and drafts
token p + 2.

Shapes: T positions of a text, P output positions at which drafting starts, K drafts, V vocabulary, H heads, D channels
of a head. N keys of an attention call: T of the text, and P of each draft pass so far.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle import DraftContext, TargetNeeds
from bateleur.eagle.heads import Head, HeadSpec
from bateleur.eagle.heads.eagle import Eagle3Head
from bateleur.runner.errors import ContradictoryTokens
from bateleur.runner.spec_decode.mtp_head import MtpHead

H = TypeVar("H", Eagle3Head, MtpHead)


@dataclass(frozen=True, slots=True)
class Convention:
    """One interpretation of a draft head's checkpoint.

    If this interpretation gives better drafts than the one that the checkpoint declares, `cause` says what the
    checkpoint describes wrongly: "features" (which hidden states the head reads, or their order), "norm" (whether a
    hidden state is taken before or after a norm), or "vocabulary" (`d2t`, the map from draft to target tokens). It is
    "" for the declared interpretation.
    boundaries: target layers whose input hidden states the head reads; `num_layers` stands for the last layer's output,
    and `num_layers` + 1 for this output after the final norm. head: the head with this interpretation applied.
    """

    name: str
    cause: str
    boundaries: tuple[int, ...]
    head: Head


def conventions(head: Head, num_layers: int) -> list[Convention]:
    """Return all interpretations of a head's checkpoint. The first is the one that the checkpoint declares.

    num_layers: number of layers of the target.
    """
    needs, after_norm = head.spec.needs, num_layers + 1
    declared = (*needs.taps, after_norm) if needs.hidden else needs.taps
    found = [Convention("as declared", "", declared, head)]

    def add(name: str, cause: str, variant: Head = head, boundaries: tuple[int, ...] = declared) -> None:
        if (boundaries, variant) not in [(other.boundaries, other.head) for other in found]:
            found.append(Convention(name, cause, boundaries, variant))

    if needs.hidden:
        add("input: hidden state before the final norm", "norm", boundaries=(*needs.taps, num_layers))
    elif needs.taps:
        for name, taps in _other_taps(needs.taps, num_layers).items():
            add(name, "features", boundaries=taps)
    if isinstance(head, Eagle3Head):
        normed = not head.spec.norm_before_residual
        other = _respecified(head, norm_before_residual=normed)
        add(f"first residual from the {'normed' if normed else 'plain'} hidden state", "norm", other)
        recycle = "post_norm" if head.spec.recycle == "pre_norm" else "pre_norm"
        add("norm_output inverted", "norm", _respecified(head, recycle=recycle))
    if isinstance(head, MtpHead):
        add("next pass gets the hidden state before the final norm", "norm", _respecified(head, recycle="pre_norm"))
        swapped = copy.copy(head)
        swapped.embedding_first = False
        add("hidden state before embedding in the input", "features", swapped)
    if (ids := head.target_ids) is not None:
        offsets = ids - torch.arange(len(ids), device=ids.device)
        # A real d2t has neighbouring token ids, for which offsets repeat. So strictly growing offsets can only be ids.
        if bool((offsets.diff() > 0).all()) and int(offsets[0]) >= 0:
            raw = copy.copy(head)
            raw.target_ids = offsets
            add("d2t holds ids, not offsets", "vocabulary", raw)
    return found


def _other_taps(taps: tuple[int, ...], num_layers: int) -> dict[str, tuple[int, ...]]:
    usual = (2, num_layers // 2, num_layers - 3)
    found: dict[str, tuple[int, ...]] = {
        "layer ids are outputs of layers: taps + 1": tuple(min(tap + 1, num_layers) for tap in taps),
        "taps - 1": tuple(max(tap - 1, 0) for tap in taps),
        "taps in ascending order": tuple(sorted(taps)),
    }
    if len(taps) == 3 and 2 < usual[1] < usual[2]:
        found["default taps"] = usual
    return found


def _respecified(head: H, **changes: object) -> H:
    other = copy.copy(head)
    other.spec = replace(head.spec, **changes)  # type: ignore[arg-type]
    return other


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A text of the target (prompt and output), and hidden states (`features`) of its first T tokens: (T, width) by
    layer, numbered as in `Convention.boundaries`.
    """

    tokens: list[int]
    prompt_len: int
    features: dict[int, Tensor]


class RecordingDrafter:
    """A drafter that records hidden states of the target, and proposes tokens of known texts.

    The caller sets `script`, a list of texts (prompt and output tokens). If all tokens of a request so far are the
    beginning of such a text, the drafts are the next tokens of the text. Each `propose` synchronises with the device.
    """

    def __init__(self, num_speculative_tokens: int, num_layers: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.needs = TargetNeeds(tuple(range(num_layers + 1)), hidden=True)
        self.keep: frozenset[int] = frozenset()  # layers whose inputs are recorded, as in `Convention.boundaries`
        self.script: list[list[int]] = []  # whole texts, prompt and output
        self._tokens: dict[int, list[int]] = {}
        self._chunks: dict[int, dict[int, list[Tensor]]] = {}
        self._features_of_prompt: dict[tuple[int, ...], dict[int, list[Tensor]]] = {}

    def admit(self, row: int, token_ids: list[int]) -> None:
        """Start to record a request with these tokens, in row `row` of the request table."""
        self._tokens[row] = list(token_ids)
        self._chunks[row] = self._features_of_prompt[tuple(token_ids)] = {boundary: [] for boundary in self.keep}

    def propose(self, context: DraftContext) -> Tensor:
        """Record the features of a step and return drafts from the known texts, see `Drafter.propose`.

        Raises ContradictoryTokens if the tokens that the engine reports contradict each other.
        """
        starts, valid = context.batch.query_start_loc.tolist(), context.num_valid.tolist()
        next_token, emitted = context.next_token.tolist(), context.emitted.tolist()
        drafts = torch.full((len(valid), self.num_speculative_tokens), -1)
        for i, row in enumerate(context.rows.tolist()):
            for boundary, chunks in self._chunks[row].items():
                chunks.append(context.features[boundary][starts[i] : starts[i] + valid[i]].clone())
            new, tokens = [token for token in emitted[i] if token >= 0], self._tokens[row]
            tokens += new
            if new and tokens[-1] != next_token[i]:
                raise ContradictoryTokens(f"row {row}: next_token {next_token[i]} does not follow; emitted were {new}")
            rest = next((text[len(tokens) :] for text in self.script if text[: len(tokens)] == tokens), [])
            known = rest[: context.num_drafts] if new else []
            drafts[i, : len(known)] = torch.tensor(known, dtype=torch.int64)
        return drafts.to(context.next_token.device)

    def recorded_text(self, prompt: Sequence[int], tokens: Sequence[int]) -> RecordedText:
        """Return the recording of the request with this prompt. tokens: its prompt and output."""
        features = {boundary: torch.cat(parts) for boundary, parts in self._features_of_prompt[tuple(prompt)].items()}
        return RecordedText(list(tokens), len(prompt), features)


class DraftsByPosition(NamedTuple):
    """Results of K drafts from each of P output positions of a text; (P, K) each.

    Each draft is predicted as if the drafts before it had been the text's tokens.
    right: whether the most likely draft is the text's token. overlap: probability that a sampled draft is accepted, the
    sum of min(p, q) over the probabilities of target and draft. known: whether a draft's position is before the text's
    last token; an engine does not draft the last token before the length limit.
    """

    right: Tensor
    overlap: Tensor
    known: Tensor

    @property
    def accepted(self) -> Tensor:
        """Expected number of accepted sampled drafts from each output position whose K drafts are all `known`."""
        return self.overlap[self.known.all(1)].cumprod(1).sum(1)

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return how often an engine at temperature 0 would reach and accept each of the K drafts, (K,) int64 each."""
        prefix = (self.right & self.known).cumprod(1).bool()
        reached = self.known & torch.cat((torch.ones_like(prefix[:, :1]), prefix[:, :-1]), 1)
        step, starts = 0, []
        while step < len(prefix):
            starts.append(step)
            step += 1 + int(prefix[step].sum())
        return reached[starts].sum(0), prefix[starts].sum(0)


def draft_by_position(
    convention: Convention,
    text: RecordedText,
    num_drafts: int,
    target_logits: Callable[[Tensor], Tensor],
    temperature: float,
    *,
    shuffle: bool = False,
) -> DraftsByPosition:
    """Draft from every output position of a text, given the target's features and the text's tokens.

    target_logits: maps n hidden states after the final norm to logits (n, V), V the vocabulary. temperature: for the
    probabilities of target and draft. shuffle: permute the features, so that only tokens help.
    """
    head, num_rows = convention.head, len(text.tokens) - 2
    hidden = head.fuse([text.features[boundary][:num_rows] for boundary in convention.boundaries])
    tokens, final = torch.tensor(text.tokens, device=hidden.device), text.features[max(text.features)]
    rows = torch.arange(num_rows, device=hidden.device)
    if shuffle:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
        hidden = hidden[order.to(hidden.device)]
    start_P = rows[text.prompt_len - 1 :]
    attend = _BranchAttention(head.spec, start_P)
    out, state = (each[start_P] for each in head.forward(tokens[1 : num_rows + 1], hidden, rows, attend))
    found = []
    for i in range(num_drafts):
        at = (start_P + 2 + i).clamp(max=len(tokens) - 1)  # position of the drafted token
        logits, probs = head.logits(out), (target_logits(final[at - 1]) / temperature).softmax(-1)
        best = logits.argmax(-1)
        if head.target_ids is not None:
            best, probs = head.target_ids[best], probs[:, head.target_ids]
        overlap = torch.minimum(probs, (logits / temperature).softmax(-1)).sum(-1)
        found.append((best == tokens[at], overlap, start_P + 2 + i < len(tokens) - 1))
        if i + 1 < num_drafts:
            out, state = head.forward(tokens[at], state, start_P + 1 + i, attend)
    return DraftsByPosition(*(torch.stack(parts, 1) for parts in zip(*found, strict=True)))


class _BranchAttention:
    """Attention of P branches. A branch is the sequence of drafts that starts at one position of a text; it sees the
    text up to this position and its own drafts. The first call for a layer is the pass over the text, each later call
    one draft pass of all branches.
    """

    def __init__(self, spec: HeadSpec, start_P: Tensor) -> None:
        self._window, self._start_P = spec.sliding_window or 1 << 31, start_P
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention, (T, H, D) for a text of T tokens or (P, H, D) for P branches: H heads of D channels."""
        passes = self._passes.setdefault(layer, [])
        passes.append((k, v))
        num, row_T = len(passes) - 1, torch.arange(len(passes[0][0]), device=q.device)
        branch_P = torch.arange(len(self._start_P), device=q.device)
        start = self._start_P if num else row_T
        at_N = torch.cat((row_T, *(self._start_P + i for i in range(1, num + 1))))
        branch_N = torch.cat((torch.full_like(row_T, -1), *(branch_P for _ in range(num))))
        mask = (branch_N < 0) & (at_N <= start[:, None])
        if num:
            mask |= branch_N == branch_P[:, None]
        mask &= start[:, None] + num - at_N < self._window
        keys, values = (torch.cat(each).transpose(0, 1) for each in zip(*passes, strict=True))
        return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, mask, enable_gqa=True).transpose(0, 1)
