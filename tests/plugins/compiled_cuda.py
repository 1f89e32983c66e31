"""Whole engines of published sizes as on an H100, without one: each Triton launch is compiled for sm_90 and not run.

`CompiledCuda` is a `FakeCuda` whose launches of Triton kernels `sm90` compiles, with the arguments that they have.
Tensors are fake, so weights of any size cost nothing; checkpoints are blank (`blank_checkpoint`), with the real
`config.json` and the real names.

`start` opens an engine and notes everything that its start launches: warm-ups, captures, planners of caches. What steps
launch behind that must have been launched before (`late`): on a GPU anything else would be compiled within a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from bateleur.cudagraph.backends.base import CapturedBody, GraphBackend
from bateleur.cudagraph.batch_descriptor import BatchExecutionDescriptor
from bateleur.cudagraph.execution import Body, Execution, S, T
from bateleur.runner import LLM
from bateleur.runner.distributed import ranks
from bateleur.runner.distributed.ranks import ALONE, Ranks
from fake_cuda import FakeCuda, Watch
from sm90 import Compiled, Kernel

_GIB = 1 << 30
_TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_QWEN_MTP = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
_NEMOTRON_MTP = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"num_hidden_layers": 1},
    "Qwen3.5-9B": _TWO | _QWEN_MTP,
    "Qwen3.6-35B-A3B": _TWO | _QWEN_MTP,
    "Nemotron-3-Nano-30B-A3B": {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
    | _NEMOTRON_MTP,
    "Granite-4.0-H-Small": _TWO,
    "Kimi-Linear-48B-A3B": _TWO | {"mlp_layer_types": ["dense", "sparse"]},
}
"""Of published models, fields that leave a layer of each kind, and the MTP head where there is one."""


class _Launching(Watch):
    """Operators of the project between ranks, too."""

    @property
    def avoid_device_init(self) -> bool:
        """True: torch must not look for a driver, though `torch.cuda.is_available` says that there is one."""
        return True

    def result(self, func: Any, types: Any, args: Any, kwargs: Any, leaves: Any) -> Any:
        """What the operator returns; a collective, which has one form for every device, runs with other ranks that
        agree.
        """
        if func.namespace != "bateleur":
            return super().result(func, types, args, kwargs, leaves)
        with self:
            return getattr(ranks, f"_{func._opname}")(*args, **kwargs)


class OnceCaptured(GraphBackend):
    """Captures by running the body once. A replay launches nothing, and returns what the capture returned.

    Eager parts of a piecewise body run again in each replay, as with CUDA graphs.
    """

    name = "cuda"

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Run one call of `body`."""
        parts: list[tuple[Any, tuple[Tensor, ...]]] = []

        def cut(fn: Any, tensors: tuple[Tensor, ...]) -> Tensor:
            parts.append((fn, tensors))
            result: Tensor = fn(state, *tensors)
            return result

        piecewise = key.mode.name == "PIECEWISE"
        output = body(Execution(key, state, cut if piecewise else None))

        def run(state: S) -> T:
            for fn, tensors in parts:
                fn(state, *tensors)
            return output

        recording = CapturedBody(key, run)
        recording.num_graphs = 1 + len(parts)
        return recording


class CompiledCuda(FakeCuda):
    """Engines of one test. compiled: what they launch."""

    def __init__(self, patch: pytest.MonkeyPatch, compiled: Compiled) -> None:
        super().__init__(patch)
        self.compiled = compiled
        self.started = 0
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(
            fake_tensor, "init_gpu_context", lambda device: None
        )  # torch 2.11 would look for a driver
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (78 * _GIB, 80 * _GIB))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        patch.setattr(FakeTensor, "data_ptr", _address, raising=False)
        patch.setattr("bateleur.cudagraph.backends.CudaBackend", lambda device: OnceCaptured())
        patch.setattr("bateleur.runner.distributed.ranks._group", lambda name: _OthersAgree())

    def _make_watch(self) -> Watch:
        return _Launching(self.gpus)

    def _replace_kernels(self, patch: pytest.MonkeyPatch) -> None:
        """Kernels are what this is about."""

    def _replace_loading(self, patch: pytest.MonkeyPatch) -> None:
        """Weights of a blank checkpoint are not read."""
        patch.setattr("bateleur.runner.checkpoint.open.fill_weights", lambda *_: None)
        patch.setattr("bateleur.runner.spec_decode.draft_head.fill_weights", lambda *_: None)

    def start(self, folder: Path, of: Ranks = ALONE, **options: Any) -> LLM:
        """Open an engine with every default but ``options``, or what rank ``of`` has of it, without the others."""
        with self._watch, pytest.MonkeyPatch.context() as patch:
            patch.setattr("bateleur.runner.llm.ALONE", of)
            llm = LLM(folder, device="cuda:0", skip_tokenizer_init=True, **options)
        self.started = len(self.compiled.launches)
        return llm

    @property
    def late(self) -> list[Kernel]:
        """Specialisations that were launched first after the engine had started."""
        return self.compiled.kernels_since(self.started)


class _OthersAgree:
    """In place of a process group: every other rank has what this one has."""

    def allreduce(self, tensors: list[Tensor], options: object) -> _Done:
        """Sums and maxima are not computed."""
        return _Done()

    def _allgather_base(self, every: Tensor, own: Tensor, options: object) -> _Done:
        every.view(-1, own.numel()).copy_(own)
        return _Done()

    def alltoall_base(self, got: Tensor, given: Tensor, *_: object) -> _Done:
        """What others give is what they are given."""
        got.copy_(given)
        return _Done()


class _Done:
    def wait(self) -> None:
        """It is done."""


def _address(tensor: Tensor) -> int:
    """An address of the tensor's own memory, with the alignment of torch's allocator."""
    memory = tensor.untyped_storage()._cdata
    return (memory << 5) + tensor.storage_offset() * tensor.element_size()
