"""What a user may choose about an engine: keyword arguments of `LLM`, and the flags of the command line.

Nothing here imports torch, so that a command can show its options at once. What depends on the device or the checkpoint
is decided later, by `EngineLimits`, `StateOptions` and `GraphOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bateleur.runner.arguments import (
    Check,
    Integer,
    Number,
    OneOf,
    Several,
    flag,
    folder,
    maybe,
    refuse,
    text,
)
from bateleur.runner.config.options import Option, options_of
from bateleur.runner.vllm_names import ENGINE, without

if TYPE_CHECKING:
    import torch

    from bateleur.cudagraph import Checks, CudaGraphMode
    from bateleur.eagle import Drafter, DraftPolicy, Rule
    from bateleur.mamba import MambaCacheMode, StatePolicy

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Dtypes of weights, activations and states."""
DEFAULT_DRAFTS = 4
"""Drafts for each request and step, unless the user says otherwise."""


def _dtype(name: str, value: Any) -> str:
    spelled = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    return str(OneOf(("auto", *DTYPE_NAMES))(name, spelled))


def _device(name: str, value: Any) -> str:
    spelled = str(value) if type(value).__module__ == "torch" else value
    return spelled if isinstance(spelled, str) else refuse(name, value, "auto, cpu, cuda or cuda:N")


def _drafter(name: str, value: Any) -> Any:
    """A `DraftHead` has a speculator instead, which becomes a drafter where the caches are."""
    parts = ("admit", "needs", "num_speculative_tokens", "propose")
    whole = all(hasattr(value, part) for part in parts) and callable(value.admit) and callable(value.propose)
    if isinstance(value, type) or not (whole or hasattr(value, "speculator")):
        refuse(name, value, f"a bateleur.eagle.Drafter, which has {', '.join(parts)}")
    return value


def _policy(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        sizes = {Integer(1)(f"{name}: a batch size", size): size for size in value}
        table = {size: Integer(0)(f"{name}[{size}]", value[key]) for size, key in sizes.items()}
        return table if 1 in table else refuse(name, value, "a mapping that has a number for 1 request")
    if isinstance(value, type) or not (value in ("fixed", "auto") or hasattr(value, "lengths")):
        refuse(
            name, value, "fixed, auto, a mapping of batch sizes to numbers, or a bateleur.eagle.DraftPolicy"
        )
    return value


_SIZES = Several(Integer(1), "a sequence of integers")
_CHECKS: dict[str, Check] = {
    "model": maybe(folder),
    "dtype": _dtype,
    "device": _device,
    "max_model_len": maybe(Integer(2, why=", or None")),
    "skip_tokenizer_init": flag,
    "attention_backend": text,
    "seed": Integer(),
    "max_num_seqs": Integer(1),
    "max_num_batched_tokens": maybe(Integer(1, why=", or None")),
    "block_size": Integer(1),
    "kv_cache_memory_bytes": maybe(Integer(0, why=", or None")),
    "gpu_memory_utilization": Number(0, 1, above=True),
    "enable_prefix_caching": flag,
    "mamba_cache_mode": maybe(OneOf(("none", "align", "all"))),
    "mamba_block_size": maybe(Integer(1, why=", or None")),
    "mamba_state_policy": maybe(OneOf(("slots", "fold"))),
    "mamba_retention": maybe(text),
    "mamba_ssm_cache_dtype": _dtype,
    "draft": maybe(folder),
    "num_speculative_tokens": maybe(Integer(0, why=", or None")),
    "drafter": maybe(_drafter),
    "draft_policy": _policy,
    "speculative_rule": OneOf(("coupled", "ratio", "block")),
    "cudagraph_mode": maybe(OneOf(("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"))),
    "cudagraph_backend": OneOf(("auto", "recorded", "cuda", "eager")),
    "cudagraph_capture_sizes": maybe(_SIZES),
    "cudagraph_checks": OneOf(("OFF", "CHEAP", "ADDRESSES", "PARANOID")),
}
"""What each option may be; how they go together is checked beside them."""


class _Checked:
    """A configuration whose fields are checked, and kept in their own types."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Checked):
    """Which model, where, and in which dtype."""

    model: str | Path | None = None
    """Hugging Face checkpoint folder; None is the model that ships with the package."""
    dtype: str | torch.dtype = "auto"
    """Of weights and activations: "auto" (float32 on CPU, the checkpoint's own on CUDA), "float32",
    "bfloat16" or "float16"."""
    device: str | torch.device = "auto"
    """Where it runs: "auto", "cpu", "cuda" or "cuda:N"."""
    max_model_len: int | None = None
    """Longest request in tokens, prompt and output; default: what the model was made for."""
    skip_tokenizer_init: bool = False
    """Open a checkpoint without its tokenizer; prompts are token ids, and texts stay empty."""
    attention_backend: str = "auto"
    """Name of a registered attention backend, or "auto"."""
    seed: int = 0
    """What the noise of requests without a seed of their own derives from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(_Checked):
    """How much runs in a step."""

    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step; longer prompts run in chunks. Default: 512 on CPU, where larger chunks only leave its caches,
    2048 on CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(_Checked):
    """KV cache, Mamba states, and what requests share of them."""

    block_size: int = 16
    """Tokens of a KV-cache block."""
    kv_cache_memory_bytes: int | None = None
    """Budget for KV cache, Mamba states and logits of drafts together; default: all that could be used, up to a
    quarter of main memory on CPU, or what `gpu_memory_utilization` leaves beside the weights on CUDA."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights and caches together."""
    enable_prefix_caching: bool = False
    """Let requests share what others computed of the same leading tokens."""
    mamba_cache_mode: MambaCacheMode | str | None = None
    """Which Mamba states are kept for that: "all" (boundaries all along a request; the default with prefix caching),
    "align" (of each request the newest, and its prompt's last) or "none" (the default without)."""
    mamba_block_size: int | None = None
    """Tokens between two boundaries at which states may be kept, a multiple of `block_size`; default: the largest
    `block_size` * 2**n up to 64 and to a quarter of `max_model_len`."""
    mamba_state_policy: StatePolicy | str | None = None
    """How a step keeps states it may have to return to: "fold" (one state and a ring of inputs per request) or "slots"
    (a state for each draft token); default: "fold", but "slots" on CPU without drafts, where it is faster."""
    mamba_retention: str | None = None
    """Which of the states of `mamba_cache_mode` others may find: "all", "none", or some of "last", "prompt_end",
    "doubling" (after 1, 2, 4, ... blocks) and "every=N" (tokens) joined by "+"; default: what the mode says, but where
    a state costs more than the keys and values of a block, and `mamba_block_size` is not given, in mode "all" the
    first three, and every N tokens whose keys and values cost as much as a state."""
    mamba_ssm_cache_dtype: str | torch.dtype = "auto"
    """Of the SSM states: "auto" (the checkpoint's own, else float32), "float32", "bfloat16" or "float16"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(_Checked):
    """What proposes tokens that a step then verifies together."""

    draft: str | Path | None = None
    """Folder of a draft head (EAGLE-1, EAGLE-3 or NemotronH's MTP, see `bateleur.eagle.heads`), or "auto" for the one
    that is shipped with the shipped model; the tokens stay those of plain decoding."""
    num_speculative_tokens: int | None = None
    """Drafts that a step verifies for each request, at most; default: 4 with `draft`, else 0."""
    drafter: Drafter | None = None
    """What proposes them in place of a head: anything that is a `bateleur.eagle.Drafter`."""
    draft_policy: str | DraftPolicy | Mapping[int, int] = "fixed"
    """How many drafts each request's next step verifies: "fixed" (as many as there are), "auto" (as many as pay, by the
    times of the steps so far; none where none do), a mapping of batch sizes to numbers such as {1: 4, 8: 2, 32: 0}, or
    a `bateleur.eagle.DraftPolicy`."""
    speculative_rule: str | Rule = "coupled"
    """How drafts are tested: "coupled" (the tokens of plain decoding), or "ratio" or "block", which have the target's
    law; a head then keeps the logits of its drafts, max_num_seqs * drafts * draft vocabulary * 4 bytes, and a `drafter`
    that doesn't declare its law is shown greedy rows only. Greedy requests are the same under all."""

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if self.draft is not None and self.drafter is not None:
            refuse("drafter", self.drafter, f"None beside draft = {self.draft!r}: one of them proposes")
        if self.num_speculative_tokens and self.draft is None and self.drafter is None:
            refuse("num_speculative_tokens", self.num_speculative_tokens, "0 without a draft or a drafter")
        if isinstance(self.draft_policy, Mapping) and max(self.draft_policy.values()) > self.num_drafts:
            refuse("draft_policy", self.draft_policy, f"at most num_speculative_tokens = {self.num_drafts}")

    @property
    def num_drafts(self) -> int:
        """K: drafts of a step for each request, at most."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return DEFAULT_DRAFTS if self.draft is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(_Checked):
    """Which steps run on CUDA graphs."""

    cudagraph_mode: CudaGraphMode | str | None = None
    """Which steps run on CUDA graphs: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or "FULL_AND_PIECEWISE"; default:
    FULL_DECODE_ONLY on CUDA, NONE on CPU. A mode that the model's parts can't support is lowered with a warning."""
    cudagraph_backend: str = "auto"
    """What captures: "auto" (CUDA graphs on CUDA; on CPU the captured body runs eagerly), "recorded" (on CPU, with the
    semantics of CUDA graphs: for tests), "cuda" or "eager"."""
    cudagraph_capture_sizes: Sequence[int] | None = None
    """Token counts to capture; default: up to 512, dense for small batches."""
    cudagraph_checks: str | Checks = "CHEAP"
    """What each replay verifies: "OFF", "CHEAP", "ADDRESSES" or "PARANOID"."""

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if self.cudagraph_capture_sizes == ():
            refuse("cudagraph_capture_sizes", (), "None, or have a size")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of it, by what it is about."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)

    @classmethod
    def of(cls, /, **options: Any) -> EngineConfig:
        """From options by name, whichever part they belong to. Raises ValueError for a name that none has.

        Names of vLLM's pass where they ask for what there is.
        """
        options = without(ENGINE, options)
        parts = {}
        for each in fields(cls):
            part = PARTS[each.name]
            names = [option.name for option in options_of(part) if option.name in options]
            parts[each.name] = part(**{name: options.pop(name) for name in names})
        for name in options:
            close = get_close_matches(name, [option.name for option in all_options()], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name} is no argument of LLM{meant}")
        return cls(**parts)


PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "speculative": SpeculativeConfig,
    "graphs": GraphConfig,
}
"""Configurations by the name of their field in `EngineConfig`."""


def all_options() -> tuple[Option, ...]:
    """Every option of an engine, in the order of the parts."""
    return tuple(option for part in PARTS.values() for option in options_of(part))
