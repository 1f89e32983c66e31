"""No step is the first to launch an eager kernel: for short prompts, few drafts, or passes of a draft head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.eagle import geometry
from bateleur.metadata.dispatch import Implementations
from bateleur.runner import SamplingParams

attention = pytest.importorskip("bateleur.metadata.kernels.attention", reason="triton is not installed")
from bateleur.metadata.backends import _launch_config  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a device that this machine has"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]
PROMPTS = ([range(10, 43), [5], range(10, 43)], [[5]], [[5, 6, 7]], [[3, 4, 5, 6, 7, 8], [1, 2]], [range(9, 20)])


def _kind(arg: Any) -> Any:
    """What a kernel is compiled for, of a tensor: its number of rows depends on the batch."""
    if isinstance(arg, list | tuple):
        return tuple(map(_kind, arg))
    return (arg.dtype, *arg.shape[1:]) if isinstance(arg, Tensor) else arg


def _kinds_of_tiles(q: Tensor, k_cache: Tensor, max_query_len: int) -> list[Any]:
    """What the kernels of an attention call are compiled for, as far as it depends on the batch."""
    lanes, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    launches = _launch_config.launches_of(max_query_len, group)
    tiles = [
        _launch_config.tile_options(lines, lanes, q.dtype, 1 << 20, long_queries=least > 1)
        for least, _, lines in launches
    ]
    return [(lanes, group, each["BLOCK_M"], each["BLOCK_N"]) for each in tiles]


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("policy", ["fixed", {1: 1, 2: 3}], ids=["fixed", "by rows"])
def test_no_step_is_the_first_to_launch_a_kernel(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, mode: str, policy: Any
) -> None:
    """Draft passes, prompts of up to 16 tokens and rows near their end used to be the first to launch theirs."""
    launched: set[Any] = set()
    dispatch = type(cuda._watch).__torch_dispatch__

    def noted(watch: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "bateleur::triton_paged_attention":
            launched.update(_kinds_of_tiles(args[0], args[1], args[7]))
        elif name == "bateleur::attention_work":  # one kernel for all batches
            launched.add(name)
        elif name.startswith("bateleur::"):
            launched.add((name, *map(_kind, args)))
        return dispatch(watch, func, types, args, kwargs)

    def noting(name: str, form: Callable[..., None]) -> Implementations:
        def stage(*args: Any) -> None:
            launched.add((name, *(each for each in args if isinstance(each, bool))))  # a flag is another kernel
            form(*args)

        return Implementations(stage)

    monkeypatch.setattr(type(cuda._watch), "__torch_dispatch__", noted)
    for name, forms in geometry.FORMS.items():
        monkeypatch.setitem(geometry.FORMS, name, noting(name, forms.torch))
    llm = cuda.make(draft="auto", num_speculative_tokens=3, max_num_seqs=3, cudagraph_mode=mode, draft_policy=policy)
    warm = launched.copy()
    launched.clear()
    for temperature in (0.0, 0.8):
        for prompts in PROMPTS:
            params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=temperature)
            assert len(cuda.run(llm, prompts, [params] * len(prompts))) == len(prompts)
    assert not cuda.faults, "\n".join(cuda.faults)
    assert {("stage_first",), ("stage_next", True)} <= launched
    assert launched <= warm, "\n".join(map(str, launched - warm))
