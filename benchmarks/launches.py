"""Operators that a decode step of three published models dispatches: the number of kernel launches without CUDA graphs.

    uv run python benchmarks/launches.py --output benchmarks/results/launches.json

The models have the published layers in the published order but narrow random weights in bfloat16. They decode eagerly
on the CPU with unpacked weights and the operators that CUDA uses (`as_on_cuda`). Every operator of the model that
creates or changes a tensor counts as one launch, also a fused one. Grouped matrix products may take two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from performance.published import MODELS, NARROW, SHOWN

from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.matrix import Projection


def as_on_cuda() -> None:
    """Make this process use the fused operators of CUDA."""
    TritonBackend.unsupported_reason = lambda *_, **how: None  # type: ignore[method-assign]
    Projection.pack = lambda self, **how: None  # type: ignore[method-assign]


class Count(TorchDispatchMode):
    """Counts operators by name, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func._schema.name
        memory = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        results = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        made = any(each.untyped_storage().data_ptr() not in memory for each in results)
        if (writes or made) and "empty" not in name:
            self.found[name] += 1
        return found


@contextmanager
def counting() -> Iterator[Count]:
    """Count the operators of all decoders in this block."""
    count, run, logits = Count(), HybridDecoder.run, HybridDecoder.logits

    def counted(method: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            with count:
                return method(*args, **more)

        return call

    HybridDecoder.run, HybridDecoder.logits = counted(run), counted(logits)  # type: ignore[method-assign]
    try:
        yield count
    finally:
        HybridDecoder.run, HybridDecoder.logits = run, logits  # type: ignore[method-assign]


def operators(name: str, folder: Path) -> Counter[str]:
    """Operators of one decode step of two rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**MODELS[name], **NARROW[MODELS[name]["model_type"]], "vocab_size": 64, "max_position_embeddings": 128}
    kind = fields.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    model.save_pretrained(folder)
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "triton"}
    options |= {"mamba_state_policy": "fold"}
    llm = LLM(folder, skip_tokenizer_init=True, max_num_seqs=2, **options)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for _ in range(3):
        llm.step()
    with counting() as count:
        llm.step()
    return count.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    as_on_cuda()
    for name in SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            found = operators(name, Path(folder))
        rows.append({"model": name, "operators": found.total(), "most": dict(found.most_common(12))})
        print(f"{name:<26}{found.total():6} operators a step", flush=True)
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "results": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
