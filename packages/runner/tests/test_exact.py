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
from bateleur.runner.models.exact import why_not_bfloat16
from bateleur.runner.models.spec import AttentionLayer, MlpLayer

compiles = pytest.mark.skipif(not native.available(), reason="no compiler")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, whose widths are no multiples of a vector's."""
    sizes = {"hidden_size": 36, "intermediate_size": 70, "head_dim": 10, "max_position_embeddings": 512}
    model = tiny.make_model("llama", **sizes).bfloat16()
    folder: Path = tiny.save(model, tmp_path_factory.mktemp("narrow"))
    return folder


@compiles
def test_in_bfloat16_a_token_is_the_same_beside_any(path: Path) -> None:
    """Alone, beside others, in prompts of more than 64 tokens, cut, found again, as a draft: tokens and their
    probabilities to the last bit, also where instructions for bfloat16 are lacking.
    """
    random, vocab = Random(1), open_checkpoint(path).spec.vocab_size
    lengths = (1, 70, 9, 150)
    prompts = [[random.randrange(3, vocab) for _ in range(length)] for length in lengths] + [[7, 8, 9] * 30]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 200, "skip_tokenizer_init": True}

    def told(*batches: list[list[int]], **options: Any) -> list[list[tuple[int, float]]]:
        llm = LLM(path, device="cpu", max_num_seqs=5, **settings | options)
        outputs = [output.outputs[0] for batch in batches for output in llm.generate(batch, params)]
        if "draft" in options:
            assert llm.get_metrics().acceptance.tried[0] > 0
        return [
            [(token, each.logprob) for place in output.logprobs or () for token, each in place.items()]
            for output in outputs
        ]

    want = told(prompts)
    assert told(*([prompt] for prompt in prompts)) == want
    drafts = {"draft": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    assert told(prompts, max_num_batched_tokens=33, **drafts) == want
    assert told(prompts, prompts, enable_prefix_caching=True, block_size=8)[len(prompts) :] == want


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
    hybrid = open_checkpoint(tiny_checkpoint("nemotron_h")[0])
    assert why_not_bfloat16(hybrid.spec) == "a token of mamba layers may depend on what is beside it"
    assert resolve_dtype("auto", replace(hybrid, dtype=torch.bfloat16), CPU) == torch.float32
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
