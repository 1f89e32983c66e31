"""Models with experts run on FULL graphs, because no tensor shape depends on routing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import DispatchReason
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.models import grouped
from bateleur.runner.models.experts import Experts

FAMILIES = ("nemotron_h-experts", "granitemoehybrid-experts")
PROMPTS = [{"prompt_token_ids": [5 + (7 * i + 3 * n) % 80 for i in range(n)]} for n in (9, 2, 14, 5)]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(4)]
GRAPHS: dict[str, Any] = {
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "cudagraph_checks": "PARANOID",
}


def build(folder: Path, **settings: Any) -> LLM:
    common = {"device": "cpu", "dtype": "float32", "max_model_len": 48, "max_num_seqs": 4}
    return LLM(folder, skip_tokenizer_init=True, **(common | settings))


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("form", ["CPU", "CUDA"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_experts_is_captured_as_a_whole(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, form: str
) -> None:
    """Also with CUDA's implementation, whose operators the recorder sees one by one."""
    wanted = ids(build(tiny(family), cudagraph_mode="NONE").generate(PROMPTS, PARAMS))
    if form == "CUDA":
        monkeypatch.setattr(grouped, "_grouped_product", grouped.masked_products)
    llm = build(tiny(family), cudagraph_mode="FULL_AND_PIECEWISE", max_num_batched_tokens=8, **GRAPHS)
    assert ids(llm.generate(PROMPTS, PARAMS)) == wanted
    decisions = llm.engine.runner.graphs.decisions
    assert set(decisions.by_reason) == {DispatchReason.DECODE, DispatchReason.PIECEWISE}
    assert decisions.num_pad_tokens > 0
    assert llm.engine.verify_graphs(fuzz=3).ok


def test_an_expert_that_is_looked_up_on_the_host_is_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above must be able to fail."""

    def hit(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        assert ends[-1].item() == x.shape[0]
        return grouped.masked_products(x, weight, ends)

    monkeypatch.setattr(grouped, "_grouped_product", hit)
    with pytest.warns(RuntimeWarning, match="reads a device value"):
        build(tiny(FAMILIES[0]), cudagraph_mode="FULL_DECODE_ONLY", **GRAPHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_what_runs_beside(tiny: Callable[[str], Path], family: str) -> None:
    """The groups of tokens by expert differ in every batch, and padded tokens have experts, too."""
    alone = build(tiny(family), max_num_seqs=1, cudagraph_mode="NONE")
    wanted = [ids(alone.generate([prompt], each))[0] for prompt, each in zip(PROMPTS, PARAMS, strict=True)]
    assert ids(build(tiny(family), max_num_batched_tokens=5).generate(PROMPTS, PARAMS)) == wanted


def test_packed_experts_give_the_same_tokens(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ids(build(tiny(FAMILIES[1]), cudagraph_mode="NONE").generate(PROMPTS, PARAMS))
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch is built without oneDNN")
    monkeypatch.setattr("bateleur.runner.models.matrix._FEW_ENTRIES", 1)
    llm = build(tiny(FAMILIES[1]), cudagraph_mode="NONE")
    branches = [mixer for residual in llm.engine.model._residuals for _, mixer, _ in residual.parts]
    experts = [branch for branch in branches if isinstance(branch, Experts)]
    assert experts
    assert all(each.stored is None for branch in experts for each in (branch.up_proj, branch.down_proj))
    assert ids(llm.generate(PROMPTS, PARAMS)) == wanted
