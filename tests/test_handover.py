"""A prefix imported from another engine gives the tokens of this one, or is refused with the reason."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantize
from tiny import EVEN, edit_config

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.errors import PrefixRefused
from bateleur.runner.offload.prefix_file import encode_prefix, read_prefix
from bateleur.runner.offload.whole_file import write_whole
from sharing import KINDS, sharing

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
TOKENS = np.random.default_rng(3).integers(3, 60, 45).tolist()


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path], tiny_head: Path, tiny_mtp: Path) -> Callable[..., LLM]:
    """An engine of one kind, which shares blocks of 4 tokens and states of 8."""
    return sharing(tiny, tiny_head, tiny_mtp, max_model_len=96)


def say(llm: LLM, tokens: list[int]) -> tuple[list[int], int]:
    """The output of a prompt, and the number of its cached tokens."""
    (output,) = llm.generate([{"prompt_token_ids": tokens}], GREEDY)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_goes_on_with_the_same_tokens(engine: Callable[..., LLM], tmp_path: Path, kind: str) -> None:
    """The importing engine has other blocks and pages, and unused ones hold NaN."""
    ours, theirs = engine(kind), engine(kind)
    for tensor in theirs.engine.caches.named().values():
        tensor[1:].fill_(float("nan"))
    said, _ = say(ours, TOKENS)
    say(theirs, TOKENS[30:] + TOKENS[:20])
    num_tokens = ours.export_prefix(TOKENS, tmp_path / "it")
    assert num_tokens == {"attention": 44}.get(kind, 40)
    assert theirs.import_prefix(tmp_path / "it") == num_tokens
    assert say(theirs, TOKENS) == (said, num_tokens)
    behind = [*TOKENS[:num_tokens], 5, 6, 7]
    found = num_tokens if not ours.engine.scheduler.prefixes.num_lookahead_tokens else num_tokens - 8  # type: ignore[union-attr]
    if kind not in ("align", "head", "head-slots", "mtp"):
        assert say(theirs, behind) == (say(ours, behind)[0], found)
    assert theirs.import_prefix(tmp_path / "it") == num_tokens, "what is here stays"


def test_it_may_be_forgotten_like_anything_that_nobody_holds(
    engine: Callable[..., LLM], sized: Callable[..., LLM], tmp_path: Path
) -> None:
    ours, small = engine("all"), sized(engine, 25, 2, kind="all")
    say(ours, TOKENS)
    ours.export_prefix(TOKENS, tmp_path / "it")
    small.import_prefix(tmp_path / "it")
    for seed in range(4):
        other = np.random.default_rng(seed).integers(3, 60, 80).tolist()
        assert say(small, other)[0] == say(ours, other)[0]
    assert say(small, TOKENS) == (say(ours, TOKENS)[0], 0)


def test_what_does_not_fit_is_refused(engine: Callable[..., LLM], sized: Callable[..., LLM], tmp_path: Path) -> None:
    ours, small = engine("attention"), sized(engine, 21, kind="attention")
    say(ours, TOKENS)
    ours.export_prefix(TOKENS, tmp_path / "it")
    small.add_request({"prompt_token_ids": TOKENS[20:] * 2}, GREEDY)
    small.step()
    with pytest.raises(ValueError, match="has 44 tokens, for which the caches have no free room"):
        small.import_prefix(tmp_path / "it")
    while small.has_unfinished_requests:
        small.step()
    assert small.import_prefix(tmp_path / "it") == 44


def test_requests_that_run_go_on(engine: Callable[..., LLM], tmp_path: Path) -> None:
    ours, theirs = engine("fold"), engine("fold")
    said, _ = say(ours, TOKENS)
    ours.export_prefix(TOKENS, tmp_path / "it")
    other = TOKENS[::-1]
    theirs.add_request({"prompt_token_ids": other}, GREEDY)
    theirs.step()
    theirs.import_prefix(tmp_path / "it")
    theirs.add_request({"prompt_token_ids": TOKENS}, GREEDY, request_id="second")
    done = {}
    while theirs.has_unfinished_requests:
        done |= {each.request_id: each.outputs[0].token_ids for each in theirs.step()}
        theirs.export_prefix(TOKENS, tmp_path / "again")
    assert done.pop("second") == said
    assert list(done.values()) == [say(ours, other)[0]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "bfloat16"}, "its dtype is 'float32', and this engine's is 'bfloat16'"),
        ({"block_size": 8}, "its block_size is '4', and this engine's is '8'"),
        ({"mamba_block_size": 16}, "its mamba_block_size is '8'"),
        ({"mamba_state_policy": "fold"}, "its state_policy is 'slots', and this engine's is 'fold'"),
        ({"attention_backend": "torch"}, "its attention_backend is 'native'"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "its tensors are not laid out"),
        ({"draft": "head", "num_speculative_tokens": 2}, "its draft is 'none'"),
    ],
)
def test_an_engine_of_another_kind_refuses_it(
    engine: Callable[..., LLM], tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    ours = engine("all")
    if "backend" in named and ours.engine.setup.backend.name != "native":
        pytest.skip("there is no compiler, and so no other backend here")
    say(ours, TOKENS)
    ours.export_prefix(TOKENS, tmp_path / "it")
    with pytest.raises(PrefixRefused) as caught:
        engine("all", **options).import_prefix(tmp_path / "it")
    assert caught.value.reason == "foreign"
    assert named in str(caught.value)


def test_other_weights_refuse_it_whatever_their_file_is_called(
    engine: Callable[..., LLM], tiny_hybrid: Path, tmp_path: Path
) -> None:
    ours = engine("all")
    say(ours, TOKENS)
    ours.export_prefix(TOKENS, tmp_path / "it")
    folder = Path(shutil.copytree(tiny_hybrid, tmp_path / "model"))
    options: dict[str, Any] = {"device": "cpu", "block_size": 4, "mamba_block_size": 8, "max_model_len": 96}
    options |= {"skip_tokenizer_init": True, "enable_prefix_caching": True, "mamba_state_policy": "slots"}
    assert LLM(folder, **options).import_prefix(tmp_path / "it") == 40, "a copy is the same model"
    changed = bytearray((folder / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    stale = LLM(folder, **options)
    (folder / "model.safetensors").write_bytes(changed)
    with pytest.raises(PrefixRefused, match="its weights is"):
        LLM(folder, **options).import_prefix(tmp_path / "it")
    with pytest.raises(ValueError, match="its files have changed since the model was loaded"):
        stale.import_prefix(tmp_path / "it")


def test_weights_that_are_read_in_another_way_refuse_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Multipliers of Falcon-H1 are folded into weights; formats of GPTQ may have a file of their own."""
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "enable_prefix_caching": True}
    sizes = {"max_model_len": 96, "max_num_seqs": 2, "block_size": 4, "mamba_block_size": 8}
    (tmp_path / "gptq").mkdir()
    gptq, _ = quantize.quantise(tiny("mamba2", **EVEN["mamba2"]), tmp_path / "gptq", "gptq with zeros")
    fields = json.loads((gptq / "config.json").read_text()).pop("quantization_config")
    edit_config(gptq, quantization_config=None)
    (gptq / "quantize_config.json").write_text(json.dumps(fields))
    other = Path(shutil.copytree(gptq, tmp_path / "other", copy_function=os.link))
    (other / "quantize_config.json").unlink()
    (other / "quantize_config.json").write_text(json.dumps(fields | {"checkpoint_format": "gptq_v2"}))
    falcon = tiny("falcon_h1", **EVEN["falcon_h1"])
    cases: tuple[tuple[Path, Path, dict[str, Any], str], ...] = (
        (falcon, falcon, {"hf_overrides": {"ssm_in_multiplier": 0.25}}, "hf_overrides"),
        (gptq, other, {}, "weights"),
        (gptq, gptq, {"quantization": "dequantize"}, "quantization"),
    )
    for i, (folder, theirs, changes, name) in enumerate(cases):
        with LLM(folder, **options, **sizes) as ours:
            said, _ = say(ours, TOKENS)
            assert ours.export_prefix(TOKENS, tmp_path / f"{i}") == 40
        with LLM(folder, **options, **sizes) as same:
            assert same.import_prefix(tmp_path / f"{i}") == 40
        with LLM(theirs, **options, **sizes, **changes) as another:
            assert say(another, TOKENS)[0] != said or name == "quantization"
            with pytest.raises(PrefixRefused, match=f"its {name} is"):
                another.import_prefix(tmp_path / f"{i}")


def test_a_file_of_other_tokens_is_refused(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """The checksum is right, but the file's name does not match its tokens."""
    ours = engine("attention")
    say(ours, TOKENS)
    ours.export_prefix(TOKENS, tmp_path / "it")
    layout = ours.engine.offload.handover._layout()
    prefix = read_prefix(tmp_path / "it", layout)
    other = replace(prefix, token_ids=prefix.token_ids[::-1].copy())
    write_whole(tmp_path / "it", encode_prefix(layout, other))
    with pytest.raises(PrefixRefused, match="its key is not that of its tokens"):
        engine("attention").import_prefix(tmp_path / "it")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm, path: llm.export_prefix([], path), "0 tokens; a hit needs at least 5"),
        (lambda llm, path: llm.export_prefix(TOKENS, path), "no request computed this prefix"),
        (lambda llm, path: llm.export_prefix([1, -1], path), r"token_ids\[1\] is -1; it must be an integer in"),
        (lambda llm, path: llm.export_prefix("text", path), "token_ids is 'text'; it must be a sequence"),
        (lambda llm, path: llm.export_prefix(TOKENS, 3), "path is 3; it must be the path of a file"),
        (lambda llm, path: llm.import_prefix("a\0b"), "it must be the path of a file"),
        (lambda llm, path: llm.import_prefix(path), "No such file"),
    ],
)
def test_bad_calls_say_what_is_wrong(
    engine: Callable[..., LLM], tmp_path: Path, call: Callable[[LLM, Path], int], message: str
) -> None:
    llm = engine("attention")
    with pytest.raises(ValueError, match=message):
        call(llm, tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_without_sharing_there_is_nothing_to_hand_over(engine: Callable[..., LLM], tmp_path: Path) -> None:
    llm = engine("attention", enable_prefix_caching=False)
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        llm.export_prefix(TOKENS, tmp_path / "it")
