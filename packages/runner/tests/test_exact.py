"""A bfloat16 checkpoint on a CPU is computed in that where a token has the same bits whatever is beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import open_checkpoint, resolve_dtype
from bateleur.runner.diagnose.costs import describe
from bateleur.runner.models import exact, native
from bateleur.runner.models.exact import Chosen, why_not_bfloat16
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer

compiles = pytest.mark.skipif(not native.available(), reason="no compiler")
CPU = torch.device("cpu")
DRAFTS = {"draft": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def path(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, whose widths are no multiples of a vector's."""
    sizes = {"hidden_size": 36, "intermediate_size": 70, "head_dim": 10, "max_position_embeddings": 512}
    model = tiny.make_model("llama", **sizes).bfloat16()
    folder: Path = tiny.save(model, tmp_path_factory.mktemp("narrow"))
    return folder


@pytest.fixture(scope="module")
def hybrid(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2, attention and an MLP in bfloat16, of odd heads and states."""
    sizes = {"mamba_head_dim": 10, "ssm_state_size": 18, "max_position_embeddings": 512}
    model = tiny.make_model("nemotron_h", **sizes).bfloat16()
    folder: Path = tiny.save(model, tmp_path_factory.mktemp("hybrid"))
    return folder


Told = list[list[tuple[int, float]]]


class Answers:
    """Tokens and log probabilities that a checkpoint in bfloat16 gives to the same prompts."""

    def __init__(self, path: Path) -> None:
        random, vocab = Random(1), open_checkpoint(path).spec.vocab_size
        self._path = path
        self.prompts = [[random.randrange(3, vocab) for _ in range(length)] for length in (1, 70, 9, 150)]
        self.prompts.append([7, 8, 9] * 30)

    def told(self, *batches: list[list[int]], **options: Any) -> Told:
        """Of each request, what was told of each of its tokens."""
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 200, "skip_tokenizer_init": True}
        llm = LLM(self._path, device="cpu", max_num_seqs=5, **settings | options)
        outputs = [output.outputs[0] for batch in batches for output in llm.generate(batch, params)]
        if "draft" in options:
            assert llm.get_metrics().acceptance.tried[0] > 0
        return [
            [(token, each.logprob) for place in output.logprobs or () for token, each in place.items()]
            for output in outputs
        ]


@compiles
def test_in_bfloat16_a_token_is_the_same_beside_any(path: Path) -> None:
    """Alone, beside others, in prompts of more than 64 tokens, cut, found again, as a draft: tokens and their
    probabilities to the last bit, also where instructions for bfloat16 are lacking.
    """
    answers = Answers(path)
    told, prompts = answers.told, answers.prompts
    want = told(prompts)
    assert told(*([prompt] for prompt in prompts)) == want
    assert told(prompts, max_num_batched_tokens=33, **DRAFTS) == want
    assert told(prompts, prompts, enable_prefix_caching=True, block_size=8)[len(prompts) :] == want


@compiles
def test_so_it_is_in_a_hybrid(hybrid: Path) -> None:
    """With a state a token, and with rings; over states found in the middle of a prompt."""
    answers = Answers(hybrid)
    told, prompts = answers.told, answers.prompts
    want = told(prompts)
    assert told(*([prompt] for prompt in prompts)) == want
    for policy in ("slots", "fold"):
        assert told(prompts, max_num_batched_tokens=33, mamba_state_policy=policy, **DRAFTS) == want
        cached = {"enable_prefix_caching": True, "block_size": 8, "mamba_state_policy": policy}
        again = told(prompts, prompts, mamba_block_size=16, mamba_retention="all", **cached, **DRAFTS)
        assert again[len(prompts) :] == want


@compiles
def test_a_head_in_bfloat16_changes_no_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64}
    plain, drafted = LLM(**settings), LLM(**settings, draft="auto", num_speculative_tokens=3)
    want, found = (llm.generate(["def area(", "import"], params) for llm in (plain, drafted))
    assert drafted.get_metrics().acceptance.tried[0] > 0
    for one, other in zip(want, found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


@compiles
def test_it_is_the_default_where_that_holds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(path)
    monkeypatch.setattr(native, "in_bfloat16", lambda: True)
    assert resolve_dtype("auto", checkpoint, CPU) == torch.bfloat16
    assert str(describe(path, device="cpu").cpu_kernels).endswith(
        "as it is stored, a token is the same beside any"
    )
    assert resolve_dtype("float32", checkpoint, CPU) == torch.float32
    assert resolve_dtype("auto", replace(checkpoint, dtype=torch.float16), CPU) == torch.float32
    monkeypatch.setattr(native, "in_bfloat16", lambda: False)
    assert resolve_dtype("auto", checkpoint, CPU) == torch.float32
    told = str(describe(path, device="cpu").cpu_kernels)
    assert told.endswith("since in bfloat16 this processor has no products of bfloat16")
    monkeypatch.setattr(exact, "missing", lambda: "no gcc")
    assert why_not_bfloat16(checkpoint.spec) == "no gcc"


@compiles
def test_layers_that_torch_computes_keep_float32(
    path: Path, tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "in_bfloat16", lambda: True)
    delta = open_checkpoint(tiny_checkpoint("qwen3_next")[0])
    assert str(why_not_bfloat16(delta.spec)).startswith("a token of delta layers")
    assert resolve_dtype("auto", replace(delta, dtype=torch.bfloat16), CPU) == torch.float32
    spec = open_checkpoint(path).spec
    attention, mlp, *rest = spec.layers
    assert isinstance(attention, AttentionLayer)
    assert isinstance(mlp, MlpLayer)

    def why(attention: AttentionLayer, mlp: MlpLayer) -> str | None:
        return why_not_bfloat16(replace(spec, layers=(attention, mlp, *rest)))

    assert why(attention, mlp) is None
    assert str(why(replace(attention, qk_norm_eps=1e-6), mlp)).startswith("a token of norms of heads may")
    assert str(why(replace(attention, gated=True), mlp)).startswith("a token of gated attention may")
    odd = "it has an odd width"  # products of which are torch's
    assert why(replace(attention, num_heads=1, num_kv_heads=1, head_dim=11), mlp) == odd
    assert why(attention, replace(mlp, intermediate_size=71)) == odd
    assert why_not_bfloat16(replace(spec, hidden_size=37)) == odd


@compiles
def test_a_hybrid_keeps_float32_for_its_speed_alone(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else keeps it from bfloat16."""
    monkeypatch.setattr(native, "in_bfloat16", lambda: True)
    checkpoint = open_checkpoint(hybrid)
    assert resolve_dtype("auto", checkpoint, CPU) == torch.float32
    speed = "one stream of a hybrid is no faster, and drafts by a head are not made in C"
    assert str(describe(hybrid, device="cpu").cpu_kernels).endswith(f"since in bfloat16 {speed}")
    spec = checkpoint.spec
    mamba = spec.recurrent[0]
    assert isinstance(mamba, MambaLayer)

    def why(layer: MambaLayer = mamba, **chosen: Any) -> str:
        layers = tuple(layer if isinstance(each, MambaLayer) else each for each in spec.layers)
        reason = str(why_not_bfloat16(replace(spec, layers=layers), Chosen(**chosen)))
        return reason.removeprefix("a token of ").removesuffix(" may depend on what is beside it")

    assert why() == speed
    assert why(replace(mamba, norm="gate only")) == "gates without a norm"
    assert (
        why(replace(mamba, state=replace(mamba.state, ssm_dtype=torch.bfloat16)))
        == "states that are not float32"
    )
    assert why(ssm_dtype=torch.float16) == "states that are not float32"
    assert why(num_speculative_tokens=15) == speed
    assert why(num_speculative_tokens=16) == "mamba layers with 16 drafts or more"
    assert why(ranks=2 * mamba.state.num_groups) == "norms that several ranks share"
    for size in ({"conv_width": 9}, {"state_size": 4096}):
        assert why(replace(mamba, state=replace(mamba.state, **size))) == "mamba layers of that size"
    odd = replace(mamba.state, num_heads=mamba.state.num_groups, head_dim=5)
    assert (why(replace(mamba, state=odd)) == "it has an odd width") == bool(odd.inner_size % 2)


@compiles
def test_what_a_user_chose_decides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attention than the one in C."""
    monkeypatch.setattr(native, "in_bfloat16", lambda: True)

    def told(**options: Any) -> str:
        return str(describe(path, device="cpu", **options).cpu_kernels)

    assert told(attention_backend="native").endswith("as it is stored, a token is the same beside any")
    why = "since in bfloat16 a token of attention by 'torch' may depend on what is beside it"
    assert told(attention_backend="torch").endswith(why)
    engine = LLM(path, device="cpu", attention_backend="torch", max_model_len=64, skip_tokenizer_init=True)
    assert engine.dtype == torch.float32
