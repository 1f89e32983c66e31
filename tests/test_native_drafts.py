"""Drafts of the C implementation equal those of the draft passes, for all options of a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bateleur.eagle import DraftContext, EagleSpeculator
from bateleur.eagle.heads.eagle import Eagle3Head
from bateleur.eagle.native.chain import NativeChain
from bateleur.metadata.native import unavailable_reason
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.scheduling.step_batch import StepBatch

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no kernels in C: {unavailable_reason()}")
PROMPTS = ["def:fibonacci(n):", "import_os;def:walk(path):", "x", "class:Stack:def:__init__(self"]
TEMPERATURES = (0.0, 0.8, 0.0, 1.3)


@pytest.fixture(scope="module")
def make_llm(make_llm: Callable[..., LLM], tiny_hybrid: Path) -> Callable[..., LLM]:
    """Engines whose heads use float32, so that both implementations round alike."""
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 3, "num_speculative_tokens": 4}
    return partial(make_llm, model=tiny_hybrid, **settings)


@pytest.fixture
def edited(tiny_head: Path, tmp_path: Path) -> Callable[..., Path]:
    """`edited(more, **config)`: the tiny head with additional tensors of these sizes; None removes one."""

    def edit(more: dict[str, int], **config: Any) -> Path:
        read, tensors = (
            json.loads((tiny_head / "config.json").read_text()),
            load_file(tiny_head / "model.safetensors"),
        )
        generator = torch.Generator().manual_seed(2)
        for name, size in more.items():
            tensors[name] = 1 + torch.randn(size, generator=generator) / 3
            if not size:
                del tensors[name]
        (tmp_path / "config.json").write_text(json.dumps(read | config))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return edit


def speculator_of(llm: LLM) -> EagleSpeculator:
    proposer = llm.engine.runner.proposer
    assert proposer is not None
    assert isinstance(proposer.drafter, EagleSpeculator)
    return proposer.drafter


def params(tokens: int = 24) -> list[SamplingParams]:
    seeded = enumerate(TEMPERATURES)
    return [SamplingParams(temperature=t, seed=i, max_tokens=tokens, ignore_eos=True) for i, t in seeded]


def compare(llm: LLM, prompts: list[str] = PROMPTS) -> list[Tensor]:
    """Run both implementations in every step; returns the drafts."""
    drafter, made = speculator_of(llm), []
    native, propose = drafter._native, drafter.propose
    assert native is not None

    def both(context: DraftContext) -> Tensor:
        context = replace(context, num_drafts=4)  # all of them
        before = [cache.clone() for cache in drafter.kv[0]]
        drafter._native = None
        expected, stored = propose(context), stored_of(drafter, context)
        for cache, old in zip(drafter.kv[0], before, strict=True):
            cache.copy_(old)
        drafter._native = native
        drafts = propose(context).clone()
        assert torch.equal(drafts, expected)
        # Sums have another order, which depends on the processor. Differences of up to 1.1e-5 were seen.
        torch.testing.assert_close(stored_of(drafter, context), stored, rtol=5e-6, atol=5e-5)
        made.append(drafts)
        return drafts

    drafter.propose = both  # type: ignore[method-assign]
    llm.generate(prompts, params()[: len(prompts)])
    return made


def stored_of(drafter: EagleSpeculator, context: DraftContext) -> list[Tensor]:
    """Keys and values of the step's tokens at the positions of the head's cache."""
    batch, held = context.batch, drafter.inputs.limits.max_model_len
    token, row = torch.arange(batch.num_actual_tokens), torch.arange(batch.num_actual_reqs)
    starts = batch.query_start_loc.long()
    owner = row.repeat_interleave(starts.diff()[: len(row)])
    stays = (token - starts[owner] < context.num_valid[owner]) & (batch.positions[token] < held)
    slots = batch.slot_mappings[drafter._cache.group][token][stays]
    return [cache.flatten(0, 1)[slots] for cache in drafter.kv[0]]


QKV = "midlayer.self_attn."
BIASED = {f"{QKV}q_proj.bias": 64, f"{QKV}k_proj.bias": 32, f"{QKV}v_proj.bias": 32}


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ({}, {}),
        ({f"{QKV}q_norm.weight": 16, f"{QKV}k_norm.weight": 16}, {"norm_output": True}),
        (BIASED, {"norm_before_residual": True, "max_position_embeddings": 32}),
        ({f"fc_norm.{tap}.weight": 48 for tap in range(3)}, {"fc_norm": True}),
        ({"input_norm.weight": 144}, {"norm_before_fc": True}),
        ({"fc.weight": 0}, {"eagle_config": {"use_aux_hidden_state": False}}),
    ],
    ids=["as-is", "qk-norms", "biases", "tap-norms", "norm-of-taps", "no-taps"],
)
def test_the_drafts_are_those_of_the_passes(
    make_llm: Callable[..., LLM], edited: Callable[..., Path], more: dict[str, int], config: dict[str, Any]
) -> None:
    llm = make_llm(draft=edited(more, **config), max_num_batched_tokens=15)
    made = compare(llm)
    assert any(len(drafts) == 3 and (drafts >= 0).all() for drafts in made)


def test_a_step_in_which_no_row_can_draw_stores_its_keys(
    make_llm: Callable[..., LLM], edited: Callable[..., Path]
) -> None:
    llm = make_llm(draft=edited({}, max_position_embeddings=20), enable_prefix_caching=True)
    made = compare(llm, PROMPTS[3:])
    assert made
    assert all((drafts == -1).all() for drafts in made)


def test_the_shipped_head_is_drafted_so(make_llm: Callable[..., LLM]) -> None:
    made = compare(make_llm(model=None, draft="auto"))
    assert len({int(draft) for drafts in made for draft in drafts.flatten()}) > 30


def test_nothing_before_the_first_token_that_was_shown_is_read(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    llm = make_llm(draft=tiny_head)
    drafter, others = speculator_of(llm), 0
    native, propose = drafter._native, drafter.propose
    assert drafter.can_start_late

    def scribbled(context: DraftContext) -> Tensor:
        nonlocal others
        context = replace(context, num_drafts=4)
        begins = context.batch.num_computed_tokens[: len(context.rows)].long() // 2
        late, before = replace(context, start_positions=begins), [cache.clone() for cache in drafter.kv[0]]
        expected = propose(late).clone()
        for cache, old in zip(drafter.kv[0], before, strict=True):
            old = old.clone()
            table, size = context.batch.block_tables[drafter._cache.group], cache.shape[1]
            for row, end in enumerate(begins.tolist()):
                token = torch.arange(end)
                old.flatten(0, 1)[table[row][token // size].long() * size + token % size] = 50.0
            cache.copy_(old)
        assert torch.equal(propose(late), expected)
        drafter._native = None
        assert (propose(late)[begins > 0] == -1).all()
        drafter._native = native
        for cache, old in zip(drafter.kv[0], before, strict=True):
            cache.copy_(old)
        drafts = propose(context)
        others += int((drafts != expected).sum())
        return drafts

    drafter.propose = scribbled  # type: ignore[method-assign]
    llm.generate(PROMPTS[:3], params()[:3])
    assert others


def test_angles_are_held_once(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    """For long sequences, rotary angles are as large as a weight matrix."""
    drafter = speculator_of(make_llm(draft=tiny_head))
    assert isinstance(drafter.head, Eagle3Head)
    assert drafter.head.rotary is not None
    assert drafter.head.rotary.table is not None
    assert drafter._native is not None
    held = [each.data_ptr() for each in drafter.head.rotary.table]
    assert held == [drafter._native._struct.cos, drafter._native._struct.sin]


def test_what_c_does_not_read_is_left_to_torch(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    drafter = speculator_of(make_llm(draft=tiny_head))
    head, native = drafter.head, drafter._native
    assert native is not None
    assert not NativeChain.fits(head, drafter._cache, "ratio")  # type: ignore[arg-type]
    head.layers[0].mlp.up_proj = lambda x: x  # type: ignore[attr-defined]
    assert not NativeChain.fits(head, drafter._cache, drafter.rule)  # type: ignore[arg-type]


def test_a_row_that_ends_by_nan_has_no_part_in_it(
    make_llm: Callable[..., LLM], tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(draft=tiny_head)
    model, drafter, seen = llm.engine.model, speculator_of(llm), []
    logits, propose = model.logits, drafter.propose

    def spoiled(hidden: Tensor) -> Tensor:
        made = logits(hidden)
        if len(seen) == 3:
            made[0] = torch.nan
        return made

    def watched(context: DraftContext) -> Tensor:
        seen.append((context.num_valid.tolist(), propose(context).clone()))
        return seen[-1][1]

    monkeypatch.setattr(model, "logits", spoiled)
    monkeypatch.setattr(drafter, "propose", watched)
    reasons = [each.outputs[0].finish_reason for each in llm.generate(PROMPTS[:3], params()[:3])]
    num_valid, drafts = seen[3]
    assert num_valid[0] == 0
    assert (drafts[0] == -1).all()
    assert (drafts[1:] >= 0).all()
    assert reasons == ["error", "length", "length"]


def test_a_row_of_logits_with_a_nan_has_no_drafts(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    llm = make_llm(draft=tiny_head)
    output: Any = speculator_of(llm).head.vocabulary.output  # type: ignore[attr-defined]
    output._native[0, 0, 5] = torch.nan
    assert all((drafts == -1).all() for drafts in compare(llm))


def test_drafts_are_kept_wherever_rows_lie(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    llm = make_llm(draft=tiny_head)
    proposer, drafter, seen = llm.engine.runner.proposer, speculator_of(llm), []
    assert proposer is not None
    propose, draft, verifier = proposer.propose, drafter.propose, proposer._sampler

    def watched(context: DraftContext) -> Tensor:
        drafts = draft(context)
        seen.append(drafts.clone())
        return drafts

    def kept(plan: StepBatch, staged: Any, features: Any, ended: Any, admitted: Any) -> Any:
        lengths = propose(plan, staged, features, ended, admitted)
        width = verifier.rows.next_ids.shape[1]
        certain, emitted = verifier.rows.next_ids[plan.rows, 0], ended.packed[:, 2 : 2 + width]
        assert torch.equal(verifier.drafts_of(plan.rows), seen[-1])
        if len(emitted) == len(plan.rows):
            last = (emitted >= 0).sum(1, keepdim=True) - 1
            assert torch.equal(certain, emitted.gather(1, last).squeeze(1))
        return lengths

    drafter.propose = watched  # type: ignore[method-assign]
    proposer.propose = kept  # type: ignore[method-assign]
    ends = [replace(each, max_tokens=count) for each, count in zip(params(), (24, 9, 30), strict=False)]
    llm.generate(PROMPTS[:3], ends)
    assert len(seen) > 9


def test_steps_of_other_kinds_are_left_to_torch(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    """Steps that C supports alternate with steps that have one tensor of another kind, which must not be taken for the
    previous step's.
    """
    llm = make_llm(draft=tiny_head)
    drafter = speculator_of(llm)
    native, propose = drafter._native, drafter.propose
    assert native is not None

    def of_all_kinds(context: DraftContext) -> Tensor:
        (first, *others), drafts = context.features, propose(context).clone()
        for changes in (
            {"seeds": context.seeds.int()},
            {"temperature": context.temperature.double()},
            {"next_token": context.next_token.int()},
            {"num_valid": context.num_valid.int()},
            {"start_positions": torch.zeros_like(context.num_valid).int()},
            {"features": (first.double(), *others)},
            {"features": (*others, first.t().contiguous().t())},
            {"features": tuple(others)},
            {"num_drafts": 5},
        ):
            assert native.propose(replace(context, **changes)) is None  # type: ignore[arg-type]
            again = native.propose(context)
            assert again is not None
            assert torch.equal(again, drafts)
        return drafts

    drafter.propose = of_all_kinds  # type: ignore[method-assign]
    llm.generate(PROMPTS, params(6))


def test_rows_of_features_may_lie_apart(make_llm: Callable[..., LLM], tiny_head: Path) -> None:
    llm = make_llm(draft=tiny_head)
    drafter = speculator_of(llm)
    native, propose = drafter._native, drafter.propose
    assert native is not None

    def apart(context: DraftContext) -> Tensor:
        taps = tuple(torch.cat((tap, tap), -1)[:, : tap.shape[1]] for tap in context.features)
        drafts = native.propose(replace(context, features=taps))
        assert drafts is not None
        assert torch.equal(drafts, propose(context))
        return drafts

    drafter.propose = apart  # type: ignore[method-assign]
    llm.generate(PROMPTS, params(4))
