"""Bytes that ranks with vocabulary shards exchange: the numbers of docs/parallel.md."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bateleur.eagle import (
    Coupled,
    DraftContext,
    Drafts,
    EagleSpeculator,
    HashedVocab,
    Logits,
    OneHot,
    Rows,
    Rule,
    VocabShard,
    argmax,
    sample,
    verify,
)
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.sampling.logprobs import logprobs_of
from bateleur.runner.sampling.sampler import Sampler
from eagle_doubles.laws import keys_of, metadata_of, normal
from together import OneOf, Together, at_once, parts_of

CPU = torch.device("cpu")
V, N, R, K = 1003, 8, 2, 3
SIZES = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 96, "vocab_size": 97}
LOGITS = normal(N, V, 2.0)
ROWS = Rows(torch.tensor([0, 4, 8], dtype=torch.int32), torch.arange(R), torch.arange(R) * 5, torch.full((R,), 0.8))
DRAFTS = LOGITS.argmax(1).view(R, K + 1)[:, :K].contiguous()


def drawn(*row: float) -> Callable[[Tensor, VocabShard], object]:
    """Sample with these parameters."""
    temperature, min_p, top_k, top_p = row
    metadata = metadata_of(*[(temperature, min_p, top_k, top_p)] * N)
    return lambda own, shard: sample(own, metadata, keys_of(N), vocab=HashedVocab.of(shard, CPU))


def verified(rule: Rule, kind: str) -> Callable[[Tensor, VocabShard], object]:
    """Verify drafts."""

    def run(own: Tensor, shard: VocabShard) -> object:
        whole = LOGITS.view(R, K + 1, V)[:, :K]
        of = {
            "coupled": Coupled(),
            "one-hot": OneHot(),
            "whole": Logits(whole),
            "parts": Logits(whole[:, :, shard.first : shard.end], shard=shard),
        }[kind]
        return verify(own, Drafts(DRAFTS, of), ROWS, rule=rule, vocab=HashedVocab.of(shard, CPU))

    return run


def told(own: Tensor, shard: VocabShard) -> object:
    """Log probabilities of tokens of all shards."""
    return logprobs_of(own, torch.arange(N) * 125, 5, shard)


def ruled(own: Tensor, shard: VocabShard) -> object:
    """Rows with token rules."""
    state = Sampler(N, V, CPU, shard)
    for row in range(N):
        state.admit(row, SamplingParams(logit_bias={row: 1.0}), row, ())
    return state.process(own, np.arange(N), np.ones(N, np.int64))


def penalised(own: Tensor, shard: VocabShard) -> object:
    """Rows with penalties."""
    state = Sampler(N, V, CPU, shard)
    for row in range(N):
        state.admit(row, SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3), row, (1, 700), (5, 1002))
    return state.process(own, np.arange(N), np.full(N, 2))


TABLE: dict[str, Callable[[Tensor, VocabShard], object]] = {
    "argmax": argmax,
    "sample": drawn(0.7, 0, 0, 1),
    "min_p": drawn(0.7, 0.1, 0, 1),
    "top_k": drawn(0.7, 0, 9, 1),
    "top_p": drawn(0.7, 0, 0, 0.9),
    "min_p, top_k and top_p": drawn(0.7, 0.01, 9, 0.9),
    "COUPLED": verified(Rule.COUPLED, "coupled"),
    "RATIO, deterministic drafts": verified(Rule.RATIO, "one-hot"),
    "RATIO, drafts sampled from whole logits": verified(Rule.RATIO, "whole"),
    "RATIO, drafts sampled from sharded logits": verified(Rule.RATIO, "parts"),
    "BLOCK with 3 drafts, sampled from whole logits": verified(Rule.BLOCK, "whole"),
    "log probabilities of the token and 5 others": told,
    "token rules, biases, bad words, grammars": ruled,
    "penalties": penalised,
}


def told_in_docs() -> dict[str, list[int]]:
    page = (Path(__file__).parents[1] / "docs/parallel.md").read_text()
    table = page[page.index("| what | bytes per row of logits") :].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {name: [int(each.replace(",", "")) for each in cells] for name, *cells in lines[3:]}


def test_all_of_the_table_is_counted() -> None:
    assert told_in_docs().keys() == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_ranks_tell_each_other_as_many_bytes_as_the_docs_say(name: str) -> None:
    of_row, of_draft, of_request, collectives = told_in_docs()[name]
    together = Together(3)
    parts = parts_of(V, together)
    at_once(together, lambda r: TABLE[name](LOGITS[:, parts[r].first : parts[r].end], parts[r]))
    assert together.num_bytes == of_row * N + of_draft * R * K + of_request * R
    assert len(together.told) == collectives


def test_log_probabilities_of_named_tokens_are_those_of_all_shards() -> None:
    named = torch.tensor([[1002, 5], [400, -1]] * (N // 2))
    together = Together(3)
    parts = parts_of(V, together)
    tokens = torch.arange(N) * 125
    want = logprobs_of(LOGITS, tokens, 2, None, named)
    for found in at_once(
        together, lambda r: logprobs_of(LOGITS[:, parts[r].first : parts[r].end], tokens, 2, parts[r], named)
    ):
        torch.testing.assert_close(found, want)


PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, top_k=20, max_tokens=9, ignore_eos=True),
    SamplingParams(seed=5, logprobs=3, repetition_penalty=1.3, min_p=0.02, max_tokens=9, ignore_eos=True),
    SamplingParams(seed=6, allowed_token_ids=[5, 40, 41, 42, 70], max_tokens=9, ignore_eos=True),
]


class Said(NamedTuple):
    """Outputs of an engine, and the drafts of its head."""

    tokens: list[list[int]]
    drafts: list[list[list[int]]]


def said(folder: Path, params: list[SamplingParams], **settings: Any) -> Said:
    sizes: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 48, "block_size": 4, "device": "cpu"}
    with LLM(folder, skip_tokenizer_init=True, **(sizes | settings)) as llm:
        return of(llm, params)


def of(llm: LLM, params: list[SamplingParams]) -> Said:
    prompts = [{"prompt_token_ids": [7 + i, 9, 7 + i, 9, 11]} for i in range(len(params))]
    tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    proposer = llm.engine.runner.proposer
    return Said(tokens, [] if proposer is None else vars(proposer.drafter).get("seen", []))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    """Ranks in threads, started by `as_rank`."""
    here, rank = Together(2), threading.local()
    opened = LLM._open

    def open_(llm: LLM, ranks: Ranks) -> None:
        opened(llm, Ranks(rank.number, here.size, "none") if hasattr(rank, "number") else ranks)

    monkeypatch.setattr(LLM, "_open", open_)
    for name in ("sum_", "max_", "every"):
        one = getattr(Ranks, name)

        def tell(ranks: Ranks, x: Tensor, name: str = name, one: Any = one) -> Tensor:
            told: Tensor = one(ranks, x) if ranks.alone else getattr(OneOf(here, ranks.rank), name)(x)
            return told

        monkeypatch.setattr(Ranks, name, tell)
    monkeypatch.setattr(here, "as_rank", lambda number: setattr(rank, "number", number), raising=False)
    return here


def said_together(together: Together, size: int, *args: Any, **settings: Any) -> list[Said]:
    together.size = size
    together.__post_init__()

    def run(rank: int) -> Said:
        together.as_rank(rank)  # type: ignore[attr-defined]
        return said(*args, **settings)

    return at_once(together, run)


@pytest.mark.parametrize("drafts", [{}, {"draft": "ngram"}, {"draft": "ngram", "speculative_rule": "ratio"}])
def test_engines_with_a_part_each_say_what_one_says(
    tiny: Callable[..., Path], together: Together, drafts: dict[str, Any]
) -> None:
    folder = tiny("llama", **SIZES)
    want = said(folder, PARAMS, **drafts)
    assert said_together(together, 3, folder, PARAMS, **drafts) == [want] * 3


@pytest.mark.parametrize("rule", ["coupled", "ratio", "block"])
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_heads_draft_what_those_of_one_do(
    make_mtp: Callable[..., Path],
    make_head: Callable[..., Path],
    together: Together,
    kind: str,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head with the target's output projection, which is sharded, and a head with its own."""
    propose = EagleSpeculator.propose

    def seen(head: EagleSpeculator, context: DraftContext) -> Tensor:
        drafts = propose(head, context)
        if context.num_drafts:
            vars(head).setdefault("seen", []).append(drafts.tolist())
        return drafts

    monkeypatch.setattr(EagleSpeculator, "propose", seen)
    folder = make_mtp(num_attention_heads=4, linear_num_key_heads=2, linear_num_value_heads=8)
    draft = "mtp" if kind == "mtp" else make_head(40, 103, 16, (1, 2, 3))
    settings = {"draft": draft, "num_speculative_tokens": 2, "speculative_rule": rule}
    want = said(folder, PARAMS, **settings)
    assert said_together(together, 2, folder, PARAMS, **settings) == [want] * 2
    assert sum(draft >= 0 for step in want.drafts for row in step for draft in row) > 30


@pytest.mark.parametrize("some", [slice(1), slice(2)], ids=["greedy", "drawn"])
def test_a_decode_step_tells_8_bytes_a_row_beside_what_layers_sum(
    tiny: Callable[..., Path], together: Together, some: slice
) -> None:
    """No collective gathers the vocabulary: of all transfers only all-reduces of hidden states are wider."""
    folder = tiny("llama", **SIZES)
    said_together(together, 3, folder, PARAMS[some])
    loaded = max(at for at, (kind, _) in enumerate(together.told) if kind == "every")
    told = together.told[loaded + 1 :]
    assert {kind for kind, _ in told} == {"sum", "max"}
    assert {count for kind, count in told if kind == "max"} == {8 * len(PARAMS[some])}
    assert sum(kind == "max" for kind, _ in told) >= 9
