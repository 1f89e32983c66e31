"""Scaled rotary embedding: tokens equal those of transformers, also beyond the original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import open_checkpoint

ORIGINAL = 48
KINDS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0 + i / 12 for i in range(12)],
        "long_factor": [2.0 + i / 2 for i in range(12)],
        "original_max_position_embeddings": ORIGINAL,
        "factor": 4.0,
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def saved(folder: Path, kind: str, **more: Any) -> tuple[Any, Path]:
    """A tiny Llama trained for ORIGINAL positions."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind], **more}
    model = tiny.make_model("llama", rope_parameters=rope, max_position_embeddings=ORIGINAL)
    return model, tiny.save(model, folder)


def generated(model: Any, prompt: list[int]) -> list[int]:
    """transformers' tokens, with tables that no other prompt has changed."""
    rotary = model.model.rotary_emb
    for name in ("inv_freq", "original_inv_freq"):
        if hasattr(rotary, name):
            setattr(rotary, name, rotary.original_inv_freq.clone())
    rotary.max_seq_len_cached = model.config.max_position_embeddings
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 97 + 1 for i in range(length)]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"async_scheduling": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Prompts within the original length, some with answers beyond it, and longer ones, all at once."""
    model, folder = saved(tmp_path, kind)
    llm = LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4, **options)
    prompts = [prompt_of(length) for length in (10, 40, 60, 12, 47, 48, 49, 75)]
    expected = [generated(model, prompt) for prompt in prompts]
    assert [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)] == expected
    llm.add_request(prompts[0], GREEDY)
    (again,) = llm.generate([prompts[3]], GREEDY)
    assert again.outputs[0].token_ids == expected[3]


@pytest.mark.parametrize(
    ("kind", "more", "default", "longest"),
    [
        ("yarn", {}, 4 * ORIGINAL, 4 * ORIGINAL),
        ("yarn", {"original_max_position_embeddings": 24}, 96, 96),
        ("linear", {}, ORIGINAL, 4 * ORIGINAL),
        ("dynamic", {}, ORIGINAL, 4 * ORIGINAL),
        ("longrope", {}, ORIGINAL, 4 * ORIGINAL),
    ],
)
def test_a_request_may_be_as_long_as_the_scaling_reaches(
    tmp_path: Path, kind: str, more: dict[str, Any], default: int, longest: int
) -> None:
    _, folder = saved(tmp_path, kind, **more)
    assert LLM(folder, device="cpu", skip_tokenizer_init=True).limits.max_model_len == default
    assert LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=longest).limits.max_model_len == longest
    with pytest.raises(ValueError, match=f"max_model_len is {longest + 1}; .* at most the model's {longest}"):
        LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=longest + 1)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_prefixes_are_not_shared_if_keys_depend_on_the_prompt(tmp_path: Path, kind: str) -> None:
    model, folder = saved(tmp_path, kind)
    with pytest.warns(RuntimeWarning, match="enable_prefix_caching is off: with rope_type"):
        llm = LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=True)
    for length in (40, 80):
        (output,) = llm.generate([prompt_of(length)], GREEDY)
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (generated(model, prompt_of(length)), 0)


def test_frequencies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "longrope")
    for wrong in ({"short_factor": [1.0, 2.0]}, {"long_factor": "x"}, {"short_factor": None}):
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **KINDS["longrope"], **wrong}
        tiny.edit_config(folder, rope_parameters=rope)
        with pytest.raises(ValueError, match=r"(rope_parameters|short_factor|long_factor) is "):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ({"rope_theta": 123.0}, {"rope_theta": 123.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": np.int64(2)}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": None, "rope_theta": 7}, {"rope_type": "default", "rope_theta": 7.0}),
    ],
)
def test_older_names_replace_fields_of_rope_parameters(
    tmp_path: Path, override: dict[str, Any], same: dict[str, Any]
) -> None:
    """transformers would ignore `rope_theta`, and drop the file's value with `rope_scaling`."""
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
    folder = tiny.save(tiny.make_model("llama", rope_parameters=rope), tmp_path / "file")
    wanted = tiny.save(tiny.make_model("llama", rope_parameters=rope | same), tmp_path / "wanted")
    assert open_checkpoint(folder, override).spec == open_checkpoint(wanted).spec


def test_overrides_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.make_model("gemma3_text"), tmp_path / "file")
    with pytest.raises(ValueError, match=r"hf_overrides is .*; it must be an object as JSON has them"):
        open_checkpoint(folder, {"rope_scaling": {"factor": object()}})
    with pytest.raises(ValueError, match=r"rope_theta is 7; it must be absent: rope_parameters has one for each"):
        open_checkpoint(folder, {"rope_theta": 7})
