"""Runs the engine on fake CUDA tensors, and finds operators that mix devices and places where the host would wait.

`FakeCuda` runs the real `LLM` (scheduler, staging, metadata, layers, sampler, verification, drafts and outputs) on fake
tensors of a CUDA device, which have shapes, dtypes and devices but no values. Host tensors are real. Operators have
their CUDA implementations up to the launches of Triton kernels, which are counted and do nothing. Within engine steps
it records, with the line of code:

    * operators with tensors of both devices;
    * reads of a device value (`item`, `tolist`, a condition), and results whose size the host would have to read;
    * copies between devices that are not `non_blocking`, and copies from pageable memory. The one wait of a step, for
      its outputs, is not a copy here.

It always records work on a device that is not the thread's current device: operators, kernel launches, and pinned
memory, which opens a CUDA context on the current device.

`sent` has the bytes that each step sends, with their places; `launched` what it launches, a graph being one launch;
`unaligned` the kernel arguments that are not aligned to 16 bytes.

All replacements are made by a `pytest.MonkeyPatch`:

    * the model is a tiny hybrid with a tiny EAGLE-3 head with its own vocabulary; weights have no values;
    * Triton kernels are not compiled or run; the attention backend "triton" claims to be supported;
    * copies to the host are not made, because pinning needs a GPU; the tokens of a step are invented, as many per
      request as its drafts allow;
    * inference mode is `no_grad`, because it would hide operators from a dispatch mode.

Not covered: values, kernels, capture of CUDA graphs (only the eager graph backend runs), loading of weights, streams,
and waits of the allocator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.jit import JITFunction

from bateleur.cudagraph.backends.base import CapturedBody
from bateleur.eagle import TargetNeeds
from bateleur.eagle.heads import Head, HeadSpec, LoadReport, TargetInfo
from bateleur.eagle.heads.eagle import Eagle3Head
from bateleur.eagle.heads.layers import Vocabulary
from bateleur.eagle.heads.spec import Rope
from bateleur.eagle.heads.weights import Weights
from bateleur.mamba import GatedDelta, KimiDelta, Mamba2
from bateleur.metadata import Fetch
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.runner import LLM, RequestOutput, SamplingParams
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.output_processor import EmittedTokens, LogprobsProcessor, OutputProcessor
from bateleur.runner.engine.step_in_flight import StepInFlight
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.rope import RopeSpec
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    LatentLayer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    RouterSpec,
)
from bateleur.runner.sampling.logprobs import PendingPromptLogprobs
from gpus import Gpus
from quick_fakes import QuickFakes, leaves_of

DEVICE = "cuda:0"
VOCAB_SIZE = 96

# Rows of projections and their parts are aligned to 16 bytes, as in published models.
_INV_FREQ = (1.0, 0.5, 0.2, 0.1)
_STATE = Mamba2(num_heads=8, head_dim=4, state_size=16, num_groups=1)
_ROUTER = RouterSpec(scores="sigmoid", corrected=True, num_groups=3, top_groups=2)
_DELTA = DeltaLayer(GatedDelta(num_key_heads=1, num_value_heads=8, key_dim=16, value_dim=8), 16, norm_eps=1e-6)
SPEC = ModelSpec(
    architecture="NemotronHForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    layers=(
        MambaLayer(_STATE, 16, conv_bias=True, proj_bias=False, norm_eps=1e-5),
        MlpLayer(48, "relu2", gated=False),
        ExpertsLayer(num_experts=6, top_k=2, intermediate_size=16, router=_ROUTER, shared=MlpLayer(24)),
        AttentionLayer(2, 1, 16, scale=0.25, rope=RopeSpec(_INV_FREQ)),
        ParallelLayer((_DELTA, AttentionLayer(2, 1, 16, 0.25, gated=True, qk_norm_eps=1e-6)), (0.5, 2.0)),
        DeltaLayer(KimiDelta(8, 8, 16), 16, 1e-6, "sigmoid", rank=8),
        ParallelLayer((AttentionLayer(2, 1, 16, 0.25, qk_norm_eps=1e-6, qk_norm_whole=True),), (1.0,), True),
        LatentLayer(2, 2, 12, 0.3, rank=8, key_dim=8, shared_dim=4, value_dim=8, norm_eps=1e-6),
    ),
    norm_eps=1e-5,
    max_position_embeddings=1 << 17,
    eos_token_ids=(0,),
)
HEAD = HeadSpec(
    kind="eagle3",
    hidden_size=32,
    target_hidden_size=32,
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    norm_eps=1e-5,
    needs=TargetNeeds(taps=(1, 2)),
    rope=Rope(_INV_FREQ),
)

_READS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "argwhere",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    )
)
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_NOT_AT_FAULT = (str(Path(torch.__file__).parent), str(Path(triton.__file__).parent), __file__)
_CUDA = torch._C.DispatchKey.CUDA


class Watch(QuickFakes):
    """Fake CUDA tensors and real host tensors, with records of their use."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self.gpus = gpus
        self.in_step = False
        self.faults: dict[str, None] = {}  # a set that keeps its order
        self.pinned: dict[int, Tensor] = {}  # by address: host tensors that would be pinned on a real device
        self.always_pinned: dict[int, Tensor] = {}  # pinned outside of steps
        self.unaligned: dict[str, None] = {}
        self.sent: list[tuple[str, int]] = []
        self.launched: list[str] = []
        self.in_graph = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # the most frequent call
        kwargs = kwargs or {}
        leaves = leaves_of((*args, *kwargs.values()))
        if not any(isinstance(each, FakeTensor) or _names_cuda(each) for each in leaves):
            return func(*args, **kwargs)  # host tensors only
        self._note_devices(func._schema.name, leaves)
        if func.namespace == "bateleur" and func.has_kernel_for_dispatch_key(_CUDA):
            with self:
                return func._op_dk(_CUDA, *args, **kwargs)
        if self.in_step:
            if (fault := _fault(func, args, kwargs, leaves)) is not None:
                self.faults[f"{fault} at {_place()}"] = None
            self._note_sent(func._schema.name, args, kwargs)
            if not self.in_graph and _launches(func):
                self.launched.append(f"{func._schema.name} at {_place()}")
        return self.result(func, types, args, kwargs, leaves)

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Record the launch of a Triton kernel."""
        self._note_devices(kernel.__name__, [*args, *named.values()])
        for parameter, each in zip(kernel.params, args, strict=False):
            free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if isinstance(each, Tensor) and not free and each.storage_offset() * each.element_size() % 16:
                self.unaligned[f"{parameter.name} of {kernel.__name__} at {_place()}"] = None
        if self.in_step and not self.in_graph:
            self.launched.append(f"{kernel.__name__} at {_place()}")

    def _note_devices(self, name: str, leaves: Sequence[Any]) -> None:
        """Record that work starts on the devices of these arguments."""
        current = self.gpus.current()
        for index in {_gpu_of(each) for each in leaves} - {None}:
            self.gpus.use(index)
            if index != current:
                self.faults[f"{name} on cuda:{index} with cuda:{current} as current device at {_place()}"] = None

    def _note_sent(self, name: str, args: Any, kwargs: Any) -> None:
        """Record what is sent to the device; it must come from pinned memory."""
        if name not in _COPIES:
            return
        target, source = args[0].device, args[0]
        if name == "aten::copy_":
            source = args[1]
        elif kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
        if source.device.type != "cpu" or target.type != "cuda":
            return
        self.sent.append((_place(), source.nbytes))
        memory = source.untyped_storage().data_ptr()
        if source.dim() and memory not in self.pinned and memory not in self.always_pinned:
            self.faults[f"copy from pageable memory at {_place()}"] = None

    def pin(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Replaces `pinned`, which needs a device; records the tensors of this step."""
        assert device.type == "cuda"
        self.gpus.use(self.gpus.current())  # torch pins memory there
        if device.index != self.gpus.current():
            self.faults[f"memory for {device} pinned with cuda:{self.gpus.current()} as current device"] = None
        made = torch.from_numpy(np.empty(shape, str(dtype).removeprefix("torch.")))
        self.pinned[made.untyped_storage().data_ptr()] = made
        return made

    def pin_for_ever(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Replaces `lasting` in the same way."""
        made = self.pin(shape, torch.uint8, device)
        self.always_pinned[made.untyped_storage().data_ptr()] = made
        return made


def _launch(kernel: JITFunction[Any], watch: Watch, *args: Any, **named: Any) -> None:
    """Replaces `JITFunction.run`."""
    watch.launch(kernel, *args, **named)


class _OneStream:
    """Replaces `CopyStream`: work runs in the order of its calls."""

    def __init__(self, gpus: Gpus, device: torch.device) -> None:
        assert device.type == "cuda"
        self._gpus = gpus

    def run(self, work: Any) -> Any:
        """Return an event; waiting for it opens a context on the current device of the waiting thread."""
        work()
        return SimpleNamespace(synchronize=lambda: self._gpus.use(self._gpus.current()))

    def wait(self, event: Any = None) -> None:
        """Return at once."""


def _names_cuda(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def _gpu_of(leaf: Any) -> int | None:
    """Index of the CUDA device of a tensor or device argument."""
    if isinstance(leaf, FakeTensor):
        leaf = leaf.fake_device
    if not _names_cuda(leaf):
        return None
    return leaf.index or 0  # as for fake tensors


def _launches(func: Any) -> bool:
    """Whether an operator launches work: views and allocations do not."""
    results = [each.alias_info for each in func._schema.returns]
    views = results and all(each is not None and not each.is_write for each in results)
    space, _, name = func._schema.name.partition("::")
    return not views and space != "prim" and "empty" not in name and name != "_unsafe_view"


def _fault(func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> str | None:
    """The fault of an operator call, or None."""
    name = func._schema.name
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    if name in _COPIES:
        return _blocking_copy(name, args, kwargs)
    # A 0-d host tensor is passed as a number, except as an index or a value to put, unless with a mask.
    whole = name in _INDEXING and not (_fills(args) and _has_mask(args[:2]))
    on_host = [t for t in tensors if t.device.type == "cpu" and (t.dim() or whole)]
    if on_host and len(on_host) < len(tensors):
        return f"CPU and CUDA tensors in {name}"
    known_size = name == "aten::repeat_interleave" and kwargs.get("output_size") is not None
    if name in _READS and not known_size:
        return f"read by {name}"
    if name in _INDEXING and _has_mask(args):
        return f"read by {name} with a mask"
    return None


def _blocking_copy(name: str, args: Any, kwargs: Any) -> str | None:
    if name == "aten::copy_":
        target, source = args[0].device, args[1].device
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    else:
        source = args[0].device
        target = torch.device(kwargs.get("device") or source)
        waits = not kwargs.get("non_blocking")
    if waits and source.type != target.type:
        return f"blocking copy from {source.type} to {target.type} by {name}"
    return None


def _has_mask(args: Any) -> bool:
    """Whether the number of entries depends on device values, as with a mask. Filling with one number does not."""
    return not _fills(args) and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _fills(args: Any) -> bool:
    return len(args) > 2 and args[2].numel() == 1


def _place() -> str:
    """`file:line` of the innermost frame outside of torch and this file."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_AT_FAULT):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Blank(Weights):
    """Weights of any name and shape, without values."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__({}, dtype=dtype, device=device)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


class FakeCuda:
    """A fake device for the engines of one test; its fake tensors exist inside `watch`.

    faults: faults with their places. gpus: devices and their contexts.
    """

    def __init__(self, patch: pytest.MonkeyPatch, device: str = DEVICE, spec: ModelSpec = SPEC) -> None:
        self.gpus = Gpus(patch)
        self.watch = self._watch = self._make_watch()
        self._device, self._spec = device, spec
        self._random = np.random.default_rng(0)
        self._sent: list[list[tuple[str, int]]] = []
        self._launched: list[list[str]] = []
        self._replace_replays(patch)
        self._replace_loading(patch)
        self._replace_kernels(patch)
        self._replace_emission(patch)
        patch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
        patch.setattr(Engine, "step", torch.no_grad()(Engine.step.__wrapped__))  # type: ignore[attr-defined]

    def _make_watch(self) -> Watch:
        return Watch(self.gpus)

    def _replace_loading(self, patch: pytest.MonkeyPatch) -> None:
        _replace_loading(patch, self._spec)

    def _replace_kernels(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(TritonBackend, "unsupported_reason", lambda *_, **__: None)
        patch.setattr(JITFunction, "run", partialmethod(_launch, self.watch))

    @property
    def sent(self) -> list[list[tuple[str, int]]]:
        """By step of the last `run`: what the host sent to the device, with place and bytes."""
        return self._sent

    @property
    def launched(self) -> list[list[str]]:
        """By step of the last `run`: what the host launched, operators with their places, and "replay" for a graph."""
        return self._launched

    @property
    def faults(self) -> list[str]:
        """All faults, in the order in which they were found."""
        return list(self._watch.faults)

    @property
    def unaligned(self) -> list[str]:
        """Pointers that a kernel specialises on and that were not aligned to 16 bytes in a launch, with their places.

        For each of them that is aligned in another launch, the kernel is compiled twice.
        """
        return list(self._watch.unaligned)

    def make(self, **settings: Any) -> LLM:
        """An engine on the fake device. Its construction may wait, and is not recorded."""
        common: dict[str, Any] = {
            "device": self._device,
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "attention_backend": "triton",
            "cudagraph_backend": "eager",
            "cudagraph_mode": "NONE",
            "max_model_len": 64,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 24,
            "block_size": 8,
            "kv_cache_memory_bytes": 1 << 22,
        }
        with self._watch:
            return LLM(**(common | settings))

    def run(
        self, llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], max_steps: int = 60
    ) -> list[RequestOutput]:
        """Step until all requests have ended; returns them in the order in which they ended.

        An exception after a fault ends the run, and so do `max_steps`; any other exception is raised.
        """
        done: list[RequestOutput] = []
        self._sent, self._launched = [], []
        with self._watch:
            for prompt, each in zip(prompts, params, strict=True):
                llm.add_request({"prompt_token_ids": list(prompt)}, each)
            self._watch.in_step = True
            try:
                for _ in range(max_steps):
                    if not llm.has_unfinished_requests:
                        break
                    self._watch.sent, self._watch.launched = [], []
                    self._watch.pinned.clear()
                    done += llm.step()
                    self._sent.append(self._watch.sent)
                    self._launched.append(self._watch.launched)
            except Exception:
                if not self.faults:
                    raise
            finally:
                self._watch.in_step = False
        return done

    def _replace_replays(self, patch: pytest.MonkeyPatch) -> None:
        replay, watch = CapturedBody.replay, self._watch

        def one_launch(recording: Any, state: Any) -> Any:
            watch.launched.append("replay")
            watch.in_graph = True
            try:
                return replay(recording, state)
            finally:
                watch.in_graph = False

        patch.setattr(CapturedBody, "replay", one_launch)

    def _replace_emission(self, patch: pytest.MonkeyPatch) -> None:
        emit = OutputProcessor.emit

        def emit_invented(
            outputs: OutputProcessor, flight: StepInFlight, present: NDArray[np.bool_] | None
        ) -> EmittedTokens:
            arrays = self._invent(flight)
            shapes = flight.fetched.shapes  # type: ignore[union-attr]
            flight.fetched = SimpleNamespace(wait=lambda: arrays, shapes=shapes)  # type: ignore[assignment]
            return emit(outputs, flight, present)

        patch.setattr(OutputProcessor, "emit", emit_invented)
        patch.setattr(LogprobsProcessor, "append_prompt", _append_blank)
        patch.setattr(Fetch, "__init__", _queue_nothing)
        patch.setattr(Fetch, "wait", _drafts)
        pin = self._watch.pin
        patch.setattr("bateleur.runner.offload.host_memory.pinned_rows", self._watch.pin_for_ever)
        patch.setattr("bateleur.runner.offload.copies.CopyStream", partial(_OneStream, self.gpus))
        patch.setattr("bateleur.metadata._memory.pinned", pin)
        patch.setattr("bateleur.runner.sampling.grammar_masks.pinned", pin)
        patch.setattr("bateleur.runner.lora.adapter_manager.pinned", pin)

    def _invent(self, flight: StepInFlight) -> list[NDArray[Any]]:
        """The values that `StepInFlight.fetched` returns: counts, bad flags, tokens, drafts, and log probabilities."""
        (rows, columns), *shapes = flight.fetched.shapes  # type: ignore[union-attr]
        drawing, width = flight.batch.index.sampled, columns // 2
        most = np.where(drawing < flight.batch.num_decodes, 1 + flight.num_drafts[drawing], 1)
        counts = self._random.integers(1, most + 1)
        tokens = self._random.integers(1, self._spec.vocab_size, (rows, width))
        tokens[np.arange(width) >= counts[:, None]] = -1
        drafts = np.ones((rows, width - 1), np.int64)
        arrays: list[NDArray[Any]] = [np.column_stack((counts, np.zeros_like(counts), tokens, drafts))]
        if shapes:
            top_ids, top_values, sampled, rank = shapes
            ids = np.broadcast_to(np.arange(top_ids[1]), top_ids)
            arrays += [ids, np.full(top_values, -1.0), np.full(sampled, -1.0), np.ones(rank, np.int64)]
        return arrays


def _queue_nothing(fetch: Fetch, tensors: Sequence[Tensor]) -> None:
    """Replaces `Fetch.__init__`: queues no copies, because there is no pinned memory."""
    assert all(each.is_cuda for each in tensors), "the emission fetches what is not on the device"
    fetch.shapes = [tuple(each.shape) for each in tensors]  # type: ignore[attr-defined]


def _drafts(fetch: Fetch) -> list[NDArray[Any]]:
    """Replaces `Fetch.wait` if the host reads drafts."""
    return [np.ones(shape, np.int64) for shape in fetch.shapes]  # type: ignore[attr-defined]


def _append_blank(logprobs: LogprobsProcessor, scored: PendingPromptLogprobs) -> None:
    """Replaces `LogprobsProcessor.append_prompt`: adds as many values as there would be."""
    for request, count in scored.requests:
        request.output.prompt_logprobs += [{} for _ in range(count)]


def _replace_loading(patch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    def load_model(
        checkpoint: Any, *, dtype: torch.dtype, device: torch.device, ranks: Ranks, data_ranks: Ranks
    ) -> HybridDecoder:
        assert ranks.alone
        assert data_ranks.alone
        return HybridDecoder(checkpoint.spec, dtype=dtype, device=device)

    patch.setattr("bateleur.runner.engine.setup.resolve_device", torch.device)
    fields = {"spec": spec, "overrides": {}, "dequantize": False}
    patch.setattr(
        "bateleur.runner.engine.setup.open_checkpoint", lambda path, *_, **__: SimpleNamespace(path=path, **fields)
    )
    patch.setattr("bateleur.runner.engine.setup.with_end_tokens", lambda checkpoint, tokenizer: checkpoint)
    patch.setattr("bateleur.runner.engine.setup.load_model", load_model)
    patch.setattr("bateleur.runner.spec_decode.draft_head.load_head", blank_head(HEAD))


def blank_head(spec: HeadSpec) -> Callable[..., tuple[Head, LoadReport]]:
    """Replaces `load_head`: an EAGLE-3 head of these sizes, without values."""

    def load(
        path: Path, target: TargetInfo, *, dtype: torch.dtype, device: torch.device, **_: object
    ) -> tuple[Head, LoadReport]:
        weights = _Blank(dtype, device)
        lm_head = weights.take("lm_head.weight", spec.draft_vocab_size, spec.hidden_size)
        vocabulary = Vocabulary(target.embedding, weights.project(lm_head, None), lm_head.dtype)
        target_ids = torch.arange(spec.draft_vocab_size, device=device) * 2
        report = LoadReport(Path(path), "eagle", spec.kind, (), (), ())
        return Eagle3Head(spec, weights, vocabulary, target_ids), report

    return load
