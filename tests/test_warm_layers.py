"""Kernels of layers are launched before a capture and before the first request, with every specialisation of later
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from bateleur.cudagraph import Phase, manager
from bateleur.mamba.ops import FORMS as MAMBA
from bateleur.metadata.backends import _torch_ops
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.models.operators import FORMS

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [1, 2, 4],
    "max_num_seqs": 2,
    "max_model_len": 48,
    "max_num_batched_tokens": 16,
}
FAMILIES = {
    "qwen3_5_moe_text": (
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        {
            "activation",
            "add_rms_norm",
            "combine",
            "gate",
            "rms_norm",
            "rotate_and_write_kv",
            "route_tokens",
            "sort_places",
        },
    ),
    "kimi_linear": (
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
        },
        {"activation", "add_rms_norm", "join_heads", "rms_norm", "rotate_and_write_kv"},
    ),
}


SCANS = {name: forms for name, forms in MAMBA.items() if name.endswith("_varlen")}


def _kind(arg: Any) -> Any:
    """The dtype of a vector: its length depends on the tokens."""
    if isinstance(arg, list | tuple):
        return tuple(map(_kind, arg))
    return (arg.dtype, *arg.shape[1:]) if isinstance(arg, Tensor) else arg


class Seen:
    """Specialisations of kernels: name, and of each argument the dtype and the sizes per token, or the value."""

    def __init__(self) -> None:
        self.warm: set[Any] = set()
        self.captured: set[Any] = set()
        self.stepped: set[Any] = set()
        self.now = self.warm

    def noting(self, name: str, form: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.now.add((name, *map(_kind, args)))
            return form(*args)

        return call


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Record the fused operators of layers, as on CUDA, by the phase of the staging before them."""
    found, stage, library = Seen(), manager.stage_batch, Library("bateleur", "IMPL")
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)
    forms = {name: each.torch for name, each in FORMS.items()}
    for name, form in (forms | {"rotate_and_write_kv": _torch_ops.rotate_and_write_kv}).items():
        library.impl(name, found.noting(name, form), "CPU", allow_override=True)
        if name in FORMS:
            monkeypatch.setattr(FORMS[name], "torch", getattr(torch.ops.bateleur, name).default)
            monkeypatch.setattr(FORMS[name], "native", None)

    def noting(producer: Any, key: Any, phase: Phase, **options: Any) -> Any:
        found.now = found.captured if phase is Phase.CAPTURE else found.warm
        return stage(producer, key, phase, **options)

    monkeypatch.setattr(manager, "stage_batch", noting)
    yield found
    library._destroy()


def test_scans_of_prompts_are_launched_before_the_first_prompt(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no graph holds them: their kernels do not depend on the prompts' lengths."""
    launched: list[set[str]] = [set(), set()]
    now = 0

    def noting(name: str, form: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            launched[now].add(name)
            return form(*args)

        return call

    for name, forms in SCANS.items():
        monkeypatch.setattr(forms, "torch", noting(name, forms.torch))
        monkeypatch.setattr(forms, "native", None)
    options = {"cudagraph_mode": "FULL_DECODE_ONLY", "attention_backend": "auto"}
    llm = LLM(tiny("nemotron_h"), **OPTIONS | options)
    now = 1
    prompt = {"prompt_token_ids": list(range(3, 26))}
    llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert launched == [{"causal_conv1d_varlen", "ssd_scan_varlen"}] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_and_no_capture_is_the_first_to_launch_a_kernel(
    tiny: Callable[..., Path], seen: Seen, family: str
) -> None:
    """For decodes, and for prompts longer than any graph."""
    config, names = FAMILIES[family]
    llm = LLM(tiny(family, **config), **OPTIONS)
    assert {name for name, *_ in seen.captured} == names
    assert seen.captured <= seen.warm
    seen.now = seen.stepped
    prompts = [{"prompt_token_ids": [(5 * i + j) % 60 + 3 for j in range(n)]} for i, n in enumerate((23, 2))]
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert seen.stepped
    assert seen.stepped <= seen.warm
