"""Speculation beside transformers: a tiny model with its own cache, its own sampling loop, and heads over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle import Rule, TargetNeeds
from bateleur.eagle.causal_lm import CausalLM
from bateleur.eagle.heads import TargetInfo, load_head
from bateleur.eagle.loop import CachedTarget, Request, sample, speculate

transformers = pytest.importorskip("transformers")
VOCAB, SIZE, LAYERS = 97, 32, 6
PROMPT = [3, 14, 15, 92, 6]


def tiny(family: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **changes,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def head_for(model: Any, write: Callable[..., Any], taps: tuple[int, ...]) -> Any:
    """An untrained EAGLE-3 head of the model's size."""
    writer = write(H=SIZE, Ht=SIZE, V=VOCAB, Vd=VOCAB, D=8, HEADS=4, KV_HEADS=2, F=40)
    config, tensors = writer.eagle3(taps)
    folder = writer.write(config | {"max_position_embeddings": 256}, tensors)
    return load_head(folder, TargetInfo.of(model), dtype=torch.float32, device="cpu")[0]


def bigrams(model: Any) -> Callable[[list[int]], list[int]]:
    """Guesses that are often right: what the model says of a token alone."""
    with torch.no_grad():
        follows = model(torch.arange(VOCAB)[:, None]).logits[:, -1].argmax(-1).tolist()

    def guess(tokens: list[int]) -> list[int]:
        found = [follows[tokens[-1]]]
        for _ in range(5):
            found.append(follows[found[-1]])
        return found

    return guess


def text(steps: Any) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_what_a_target_is_told_comes_from_the_model(model: Any) -> None:
    info = TargetInfo.of(model)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (LAYERS, SIZE, VOCAB)
    assert info.embedding is model.model.embed_tokens.weight
    assert info.lm_head is model.lm_head.weight
    assert isinstance(CausalLM(model), CachedTarget)


def test_taps_are_the_boundaries_and_not_what_transformers_calls_so(model: Any) -> None:
    """The last of its `hidden_states` is behind the final norm; a head that asks for the last boundary gets the state
    before, and one that asks for the final hidden state that behind.
    """
    needs = TargetNeeds((2, 0, LAYERS), hidden=True)
    target, ids = CausalLM(model, needs), torch.tensor(PROMPT)
    with torch.no_grad():
        logits, features = target(ids)
        theirs = model(ids[None], output_hidden_states=True)
    assert torch.equal(logits, theirs.logits[0])
    states = [state[0] for state in theirs.hidden_states]
    assert torch.equal(features[0], states[2])
    assert torch.equal(features[1], states[0])
    assert torch.equal(features[3], states[-1])
    assert torch.equal(model.model.norm(features[2]), states[-1])
    assert not torch.allclose(features[2], states[-1])
    assert not any(layer._forward_pre_hooks for layer in model.model.layers), "hooks are gone with the call"


def test_the_cache_is_cut_and_goes_on(model: Any) -> None:
    target, ids = CausalLM(model, TargetNeeds((LAYERS,))), torch.tensor(PROMPT)
    with torch.no_grad():
        whole, (features,) = target(ids)
        target.truncate(2)
        again, (others,) = target(ids[2:])
        target.reset()
        first, _ = target(ids[:1])
    near = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(again, whole[2:], **near)
    torch.testing.assert_close(others, features[2:], **near)
    torch.testing.assert_close(first, whole[:1], **near)


def test_greedy_sampling_is_that_of_transformers(model: Any) -> None:
    said = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24, use_cache=True)
    assert sample(CausalLM(model), Request(PROMPT, 24)) == said[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_change_no_token(family: str, temperature: float) -> None:
    model = tiny(family)
    plain = sample(CausalLM(model), Request(PROMPT, 40, seed=5, temperature=temperature))
    steps = list(speculate(CausalLM(model), bigrams(model), Request(PROMPT, 40, seed=5, temperature=temperature), 4))
    assert text(steps) == plain
    assert temperature or any(step.num_accepted for step in steps)
    assert any(step.num_accepted < step.num_drafts for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("taps", [(1, 3, 6), (6,)])
def test_a_head_over_the_cache_drafts_as_over_whole_sequences(
    model: Any, sized_checkpoints: Callable[..., Any], taps: tuple[int, ...], temperature: float
) -> None:
    """A feature or a key of a rejected draft that stayed would show in later drafts."""
    head, how = head_for(model, sized_checkpoints, taps), {"seed": 5, "temperature": temperature}
    needs = head.spec.needs

    def function(ids: Tensor) -> Any:
        return CausalLM(model, needs)(ids)

    cached = list(speculate(CausalLM(model, needs), head, Request(PROMPT, 30, **how), 3))
    assert cached == list(speculate(function, head, Request(PROMPT, 30, **how), 3))
    assert text(cached) == sample(CausalLM(model), Request(PROMPT, 30, **how))


def test_each_token_is_computed_once(model: Any) -> None:
    target, sizes = CausalLM(model), []

    class Counted:
        device = target.device
        truncate = staticmethod(target.truncate)

        def __call__(self, ids: Tensor) -> Any:
            sizes.append(len(ids))
            return target(ids)

    steps = list(speculate(Counted(), bigrams(model), Request(PROMPT, 30), 4))
    assert sizes == [len(PROMPT), *(1 + step.num_drafts for step in steps[1:])]


@pytest.mark.parametrize("rule", Rule)
def test_an_answer_ends_where_it_is_told_to(model: Any, rule: Rule) -> None:
    """Behind a token, or where a condition holds, in the middle of a step as well."""
    plain = sample(CausalLM(model), Request(PROMPT, 40))
    end = next(i for i in range(5, 40) if plain[i] not in plain[:i])

    def run(**how: Any) -> list[int]:
        return text(speculate(CausalLM(model), bigrams(model), Request(PROMPT, 40, **how), 4, rule=rule))

    assert run(stop=[plain[end]]) == sample(CausalLM(model), Request(PROMPT, 40, stop={plain[end]})) == plain[: end + 1]
    assert run(stop=lambda answer: answer[-2:] == plain[6:8]) == plain[:8]
    assert run(stop=lambda answer: len(answer) == 1) == plain[:1]


def test_models_that_cannot_forget_are_refused(model: Any) -> None:
    hybrid = transformers.BambaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
    )
    with pytest.raises(
        ValueError, match=r"model: layers are \['full_attention', 'linear_attention'\]; all must be attention"
    ):
        CausalLM(transformers.BambaForCausalLM(hybrid))
    with pytest.raises(ValueError, match=r"needs.taps is \(7,\); the model has 6 layers"):
        CausalLM(model, TargetNeeds((7,)))


def test_nothing_is_left_to_the_default_device(model: Any, sized_checkpoints: Callable[..., Any]) -> None:
    """A tensor that is made without a device fails beside those of the model."""
    head, how = head_for(model, sized_checkpoints, (6,)), {"seed": 5, "temperature": 0.8}
    plain = sample(CausalLM(model), Request(PROMPT, 12, **how))
    for drafter in (head, bigrams(model)):
        for rule in Rule:
            with torch.device("meta"):
                steps = list(
                    speculate(CausalLM(model, TargetNeeds((6,))), drafter, Request(PROMPT, 12, **how), 3, rule=rule)
                )
            assert rule is not Rule.COUPLED or text(steps) == plain
    with torch.device("meta"):
        assert sample(CausalLM(model), Request(PROMPT, 12, **how)) == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_a_gpu() -> None:
    model = tiny()
    guess = bigrams(model)
    plain = sample(CausalLM(model), Request(PROMPT, 30, seed=5, temperature=0.8))
    model.cuda()
    assert text(speculate(CausalLM(model), guess, Request(PROMPT, 30, seed=5, temperature=0.8), 4)) == plain
