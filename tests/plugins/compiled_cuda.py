"""Whole engines of published sizes on a fake H100: each Triton launch is compiled for sm_90 and not run.

`CompiledCuda` is a `FakeCuda` whose Triton launches `sm90` compiles with their arguments. Tensors are fake, so weights
of any size cost nothing. Checkpoints are blank (`blank_checkpoint`), with real configs and names.

`start` creates an engine and records everything that it launches: warm-up, captures and cache planners. Every later
launch of a step must have been launched before (`late`): a GPU would compile it within the step.
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
    "Nemotron-3-Nano-30B-A3B": {"layers_block_type": ["linear_attention", "moe", "full_attention"]} | _NEMOTRON_MTP,
    "Granite-4.0-H-Small": _TWO,
    "Kimi-Linear-48B-A3B": _TWO | {"mlp_layer_types": ["dense", "sparse"]},
}
"""Config fields of published models that leave one layer of each kind, and the MTP head if there is one."""


class _Launching(Watch):
    """Also handles the project's collectives between ranks."""

    @property
    def avoid_device_init(self) -> bool:
        """True: torch must not look for a driver, although `torch.cuda.is_available` returns True."""
        return True

    def result(self, func: Any, types: Any, args: Any, kwargs: Any, leaves: Any) -> Any:
        """Return the operator's result. A collective has one implementation for every device and runs with ranks that
        agree.
        """
        if func.namespace != "bateleur":
            return super().result(func, types, args, kwargs, leaves)
        with self:
            return getattr(ranks, f"_{func._opname}")(*args, **kwargs)


class OnceCaptured(GraphBackend):
    """Captures by running the body once. A replay launches nothing and returns the captured result.

    Eager parts of a piecewise body run again in each replay, as with CUDA graphs.
    """

    name = "cuda"

    def capture(self, body: Body[S, T], key: BatchExecutionDescriptor, state: S) -> CapturedBody[S, T]:
        """Run `body` once."""
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
    """Engines of one test. compiled: their launches."""

    def __init__(self, patch: pytest.MonkeyPatch, compiled: Compiled) -> None:
        super().__init__(patch)
        self.compiled = compiled
        self.started = 0
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # torch 2.11 would look for a driver
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (78 * _GIB, 80 * _GIB))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
        patch.setattr(FakeTensor, "data_ptr", _address, raising=False)
        patch.setattr("bateleur.cudagraph.backends.CudaBackend", lambda device: OnceCaptured())
        patch.setattr("bateleur.runner.distributed.ranks._group", lambda name: _OthersAgree())

    def _make_watch(self) -> Watch:
        return _Launching(self.gpus)

    def _replace_kernels(self, patch: pytest.MonkeyPatch) -> None:
        """Do nothing: here kernels are compiled."""

    def _replace_loading(self, patch: pytest.MonkeyPatch) -> None:
        """Do not read the weights of a blank checkpoint."""
        patch.setattr("bateleur.runner.checkpoint.open.fill_weights", lambda *_: None)
        patch.setattr("bateleur.runner.spec_decode.draft_head.fill_weights", lambda *_: None)

    def start(self, folder: Path, of: Ranks = ALONE, **options: Any) -> LLM:
        """Start an engine with these options, or the part of it that rank ``of`` has, without the other ranks."""
        with self._watch, pytest.MonkeyPatch.context() as patch:
            patch.setattr("bateleur.runner.llm.ALONE", of)
            llm = LLM(folder, device="cuda:0", skip_tokenizer_init=True, **options)
        self.started = len(self.compiled.launches)
        return llm

    @property
    def late(self) -> list[Kernel]:
        """Specialisations that were first launched after the engine had started."""
        return self.compiled.kernels_since(self.started)


class _OthersAgree:
    """Replaces a process group: all other ranks have the same values as this one."""

    def allreduce(self, tensors: list[Tensor], options: object) -> _Done:
        """Compute no sums and maxima."""
        return _Done()

    def _allgather_base(self, every: Tensor, own: Tensor, options: object) -> _Done:
        every.view(-1, own.numel()).copy_(own)
        return _Done()

    def alltoall_base(self, got: Tensor, given: Tensor, *_: object) -> _Done:
        """Receive what this rank sends."""
        got.copy_(given)
        return _Done()


class _Done:
    def wait(self) -> None:
        """Return at once."""


def _address(tensor: Tensor) -> int:
    """An address of the tensor's own memory, with the alignment of torch's allocator."""
    memory = tensor.untyped_storage()._cdata
    return (memory << 5) + tensor.storage_offset() * tensor.element_size()
