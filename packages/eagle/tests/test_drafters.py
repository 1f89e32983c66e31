"""Drafters without a model, driven by a loop that is the smallest engine there is."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.eagle import ngram
from bateleur.eagle.drafter import DraftContext, Drafter, TargetNeeds
from bateleur.eagle.ngram import NGramDrafter
from bateleur.eagle.stats import AcceptStats
from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, StepRows
from eagle_doubles.drafters import NoDrafts, RandomDrafter, ScriptedDrafter, StickyDrafter

VOCAB, K = 50, 4


def continuation(tokens: list[int]) -> list[int]:
    """The next tokens, true ones: each depends on the whole text."""
    out = list(tokens)
    for _ in range(K + 1):
        out.append((7 * len(out) + sum(out)) % VOCAB)
    return out[len(tokens) :]


def context(
    computed: Sequence[int],
    emitted: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    num_drafts: int = K,
    last: Any = None,
    longest: int = 256,
) -> DraftContext:
    """A step in which all tokens stayed; `emitted` is empty where the prompt goes on."""
    count = len(rows)
    lens = [max(len(each), 1) for each in emitted]
    buffers = InputBuffers(BatchLimits(8, 64, longest), (KVCacheGroup(longest // 16, 16),), "cpu")
    step = StepRows(
        query_lens=np.array(lens, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        is_prefilling=np.zeros(count, bool),
        token_ids=np.zeros(sum(lens), np.int32),
        block_tables=(np.arange(1, 1 + 16 * count, dtype=np.int32).reshape(count, 16),),
    )
    shape = BatchShape(count, sum(lens), count + 1, sum(lens) + 2, max(lens))
    table = torch.full((count, 1 + K), -1)
    for row, each in enumerate(emitted):
        table[row, : len(each)] = torch.tensor(list(each), dtype=torch.int64)
    next_token = [each[-1] if each else 3 for each in emitted] if last is None else last
    return DraftContext(
        batch=buffers.stage(step, shape),
        attention=None,
        features=(),
        next_token=torch.tensor(next_token),
        num_valid=torch.tensor(lens),
        emitted=table,
        rows=torch.tensor(list(rows)),
        seeds=torch.tensor(list(rows)) + 100,
        temperature=torch.zeros(count),
        num_drafts=num_drafts,
        key=None,
    )


ALL = [NoDrafts(K), StickyDrafter(K), RandomDrafter(K, VOCAB), ScriptedDrafter(continuation, K, None, VOCAB)]


@pytest.mark.parametrize("drafter", ALL, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("num_drafts", [0, 2, K])
def test_every_drafter_keeps_the_protocol(drafter: Drafter, num_drafts: int) -> None:
    assert drafter.needs == TargetNeeds()
    assert drafter.num_speculative_tokens == K
    for row in (5, 2):
        drafter.admit(row, [1, 2])
    drafts: Tensor = drafter.propose(context([2, 2], [[9], [8]], [5, 2], num_drafts=num_drafts))
    assert drafts.shape == (2, K)
    assert drafts.dtype == torch.int64
    assert (drafts[:, num_drafts:] == -1).all()
    wanted = drafts[:, :num_drafts]
    if isinstance(drafter, NoDrafts):
        assert (wanted == -1).all()
    else:
        assert ((wanted >= 0) & (wanted < VOCAB)).all()


@pytest.mark.parametrize("right", [None, *range(K + 1)])
def test_scripted_drafts_give_exactly_s_plus_one_tokens_per_step(right: int | None) -> None:
    """Two requests, of which one ends and gives its row to a third; their order in the batch changes."""
    drafter, stats = ScriptedDrafter(continuation, K, right, VOCAB), AcceptStats(K)
    texts = {4: [1, 2, 3], 0: [7]}
    pending: dict[int, list[int]] = {row: [] for row in texts}
    for row, text in texts.items():
        drafter.admit(row, text)
    for step in range(12):
        if step == 6:
            texts[0], pending[0] = [9, 9], []
            drafter.admit(0, texts[0])
        order = sorted(texts, reverse=bool(step % 3))
        computed = [len(texts[row]) for row in order]
        emitted = []
        for row in order:
            truth = continuation(texts[row])
            accepted = next((i for i, draft in enumerate(pending[row]) if draft != truth[i]), len(pending[row]))
            if pending[row]:
                stats.update(np.array([len(pending[row])]), np.array([accepted]))
            emitted.append(truth[: accepted + 1])
            texts[row] = texts[row] + emitted[-1]
        drafts = drafter.propose(context(computed, emitted, order)).tolist()
        pending = dict(zip(order, drafts, strict=True))
    assert stats.num_steps > 20
    assert stats.mean_acceptance_length == (K if right is None else right) + 1


def test_scripted_drafts_end_with_the_continuation_and_wait_for_the_prompt() -> None:
    drafter = ScriptedDrafter(lambda tokens: [11, 12], K, 1, VOCAB)
    drafter.admit(0, [1, 2, 3, 4])
    drafter.admit(1, [1])
    drafts = drafter.propose(context([1, 1], [[], [6]], [0, 1]))
    assert drafts.tolist() == [[-1] * K, [11, 13, -1, -1]]


def test_scripted_drafter_notices_what_does_not_follow() -> None:
    drafter = ScriptedDrafter(continuation, K, None, VOCAB)
    drafter.admit(0, [1])
    with pytest.raises(RuntimeError, match="row 3 takes part in a step, but no request was admitted"):
        drafter.propose(context([1], [[6]], [3]))
    with pytest.raises(RuntimeError, match="row 0: next_token 5 does not follow; emitted were "):
        drafter.propose(context([1], [[6]], [0], last=[5]))


def test_random_drafts_belong_to_the_request_and_its_length() -> None:
    drafter = RandomDrafter(K, VOCAB, seed=3)
    both = drafter.propose(context([4, 9], [[1], [2]], [0, 1]))
    alone = drafter.propose(context([9], [[2]], [1]))
    later = drafter.propose(context([10], [[2]], [1]))
    assert torch.equal(both[1:], alone)
    assert not torch.equal(alone, later)
    assert not torch.equal(drafter.propose(context([9], [[2]], [0])), alone)
    assert not torch.equal(RandomDrafter(K, VOCAB, seed=4).propose(context([9], [[2]], [1])), alone)


def test_sticky_drafts_repeat_the_next_token() -> None:
    assert StickyDrafter(K).propose(context([4], [[1, 8]], [0])).tolist() == [[8] * K]


def looked_up(tokens: list[int], least: int, most: int, num_drafts: int) -> list[int]:
    """What followed the latest of the longest earlier occurrences of the end of a text, and goes on with itself."""
    n = len(tokens)
    for length in range(min(most, n - 1), least - 1, -1):
        for end in range(n - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[n - length :]:
                text = tokens[end:]
                while len(text) < num_drafts:
                    text += text
                return text[:num_drafts]
    return [-1] * num_drafts


@pytest.mark.parametrize("places", [2**18, 35, 1])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 3), (2, 200)])
def test_lookup_finds_the_latest_of_the_longest(
    monkeypatch: pytest.MonkeyPatch, least: int, most: int, places: int
) -> None:
    """Rows of a few tokens each, in rows of the table that others had before, in parts of what is known of them."""
    monkeypatch.setattr(ngram, "_PLACES_ON_CPU", places)
    random = Random(most)
    drafter = NGramDrafter(K, 8, 64, "cpu", prompt_lookup_min=least, prompt_lookup_max=most)
    num_found = 0
    for _ in range(12):
        texts, computed, emitted = dict[int, list[int]](), [], []
        for row in random.sample(range(8), 5):
            prompt = random.choices(range(3), k=random.randint(2, 40))
            drafter.admit(row, prompt)
            new: list[int] = []
            if random.random() < 0.6:
                new = random.choices(range(3), k=random.randint(1, 1 + K))
                texts[row] = prompt + new
            else:  # the prompt goes on, perhaps behind the token that comes next
                texts[row] = prompt[: random.randint(2, len(prompt))]
            computed.append(len(texts[row]) - 1 - max(len(new), 1))
            emitted.append(new)
        last = [text[-1] for text in texts.values()]
        drafts = drafter.propose(context(computed, emitted, [*texts], last=last)).tolist()
        wanted = [looked_up(text, least, most, K) for text in texts.values()]
        assert drafts == wanted
        num_found += sum(each[0] >= 0 for each in wanted)
    assert 0 < num_found <= 60


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is not a view of `but`."""

    def __init__(self, but: torch.Tensor) -> None:
        super().__init__()
        self.known, self.num_bytes = but.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.known:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


def test_lookup_in_long_texts_takes_memory_for_a_part_of_them() -> None:
    """It took 600 MB for 256 texts of 131,072 tokens."""
    rows, length = 7, 2**16
    drafter = NGramDrafter(K, rows, length, "cpu")
    drafter._tokens.random_(250_000)
    for row in range(rows):  # the last tokens once more, far in front, and nowhere else
        drafter.admit(row, drafter._tokens[row, : length - 8].tolist())
        drafter._tokens[row, 100:104] = drafter._tokens[row, length - 12 : length - 8]
    step = context([length - 10] * rows, [[]] * rows, [*range(rows)], longest=length)
    with Largest(drafter._tokens) as largest:
        drafts = drafter.propose(step)
    assert torch.equal(drafts, drafter._tokens[:, 104 : 104 + K].long())
    assert largest.num_bytes <= 8 * (2**18 + rows * 3)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is 0; with a draft it must be at least 1"):
        NGramDrafter(0, 1, 8, "cpu")
    with pytest.raises(ValueError, match=r"prompt_lookup_min is 3; it must be .* at most prompt_lookup_max = 2"):
        NGramDrafter(1, 1, 8, "cpu", prompt_lookup_min=3, prompt_lookup_max=2)
    with pytest.raises(ValueError, match="num_speculative_tokens=0"):
        NoDrafts(0)
    with pytest.raises(ValueError, match="vocab_size=0"):
        RandomDrafter(1, 0)
    with pytest.raises(ValueError, match="vocab_size=1 must be at least 2"):
        ScriptedDrafter(continuation, 1, None, 1)
    with pytest.raises(ValueError, match="right_up_to=-1"):
        ScriptedDrafter(continuation, 1, -1, VOCAB)
