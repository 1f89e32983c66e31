"""Number of operators that the layers of a decode step dispatch on CUDA, by kind: at most one launch each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner import SamplingParams
from bateleur.runner.models.residual import ResidualLayer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a device that this machine has")

OPERATORS = {
    "Mamba": 6,
    "Mlp": 4,
    "Experts": 13,
    "Attention": 5,
    "Delta+Attention": 11,
    "Attention norm last": 6,
    "Delta": 8,
    "LatentAttention": 9,
}
"""For the layers of `fake_cuda.SPEC`; the sum before a norm counts with that norm."""


class Count(TorchDispatchMode):
    """Counts operators by name, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = [each.alias_info for each in func._schema.returns]
        views = results and all(each is not None and not each.is_write for each in results)
        space, _, name = func._schema.name.partition("::")
        if not views and space != "prim" and "empty" not in name and name != "_unsafe_view":
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_a_branch_has_one_operator_beside_its_mixer_and_one_for_its_activation(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Counter[str]] = {}
    add_to = ResidualLayer.add_to

    def counted(residual: ResidualLayer, stream: Any, step: Any) -> None:
        with Count() as count:
            add_to(residual, stream, step)
        kinds = "+".join(type(mixer).__name__ for _, mixer, _ in residual.parts)
        seen[kinds + (" norm last" if residual.norm_last else "")] = count.found  # the last step is a decode

    monkeypatch.setattr(ResidualLayer, "add_to", counted)
    cuda = harness.FakeCuda(monkeypatch)
    cuda.run(cuda.make(), [[5]], [SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)])
    assert {kind: found.total() for kind, found in seen.items()} == OPERATORS
    assert seen["Mlp"] == {"add_rms_norm": 1, "mm": 2, "activation": 1}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_attention_is_divided_once_for_all_layers_of_a_kind(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Four attention layers: two with equal heads, one of these sizes with a window, one with other heads; and one in
    each pass of a draft head, which is part of a graph if there is one.
    """
    layers = list(harness.SPEC.layers)
    layers[3] = replace(layers[3], sliding_window=7)
    divide, seen = TritonBackend.build_work_list, Counter[tuple[int, int | None]]()

    def counted(
        backend: TritonBackend, meta: Any, kv: Any, num_heads: int, window: int | None, dtype: torch.dtype
    ) -> Any:
        seen[kv[0].shape[2], window] += 1
        return divide(backend, meta, kv, num_heads, window, dtype)

    monkeypatch.setattr(TritonBackend, "build_work_list", counted)
    cuda = harness.FakeCuda(monkeypatch, spec=replace(harness.SPEC, layers=tuple(layers)))
    llm = cuda.make(draft="auto", num_speculative_tokens=2, cudagraph_mode=mode)
    seen.clear()
    cuda.run(llm, [[5]], [SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)])
    steps = [Counter(each.split(" at ")[0] for each in step) for step in cuda.launched]
    assert len(steps) > 2
    if mode != "NONE":
        assert not any(step["work_kernel"] or step["attention_kernel"] for step in steps), "they are on graphs"
        return
    num_passes = sum(step["attention_kernel"] - 4 for step in steps)  # of the draft head
    assert num_passes > len(steps)
    assert seen == {(1, None): len(steps) + num_passes, (1, 7): len(steps), (2, None): len(steps)}
    assert sum(step["work_kernel"] for step in steps) == seen.total()
