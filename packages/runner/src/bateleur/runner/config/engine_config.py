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
    require_bools,
    require_integers,
    require_integers_or_none,
    require_numbers,
    require_one_of,
    require_paths,
)
from bateleur.runner.config.options import Option, options_of

if TYPE_CHECKING:
    import torch

    from bateleur.cudagraph import Checks, CudaGraphMode
    from bateleur.eagle import Drafter, DraftPolicy, Rule
    from bateleur.mamba import MambaCacheMode, StatePolicy

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Dtypes of weights, activations and states."""
DEFAULT_DRAFTS = 4
"""Drafts for each request and step, unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
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

    def __post_init__(self) -> None:
        require_paths(model=self.model)
        require_integers_or_none(max_model_len=self.max_model_len)
        require_bools(skip_tokenizer_init=self.skip_tokenizer_init)
        require_integers(seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much runs in a step."""

    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step; longer prompts run in chunks. Default: 512 on CPU, where larger chunks only leave its caches,
    2048 on CUDA."""

    def __post_init__(self) -> None:
        require_integers(max_num_seqs=self.max_num_seqs)
        require_integers_or_none(max_num_batched_tokens=self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
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

    def __post_init__(self) -> None:
        require_integers(block_size=self.block_size)
        require_integers_or_none(
            kv_cache_memory_bytes=self.kv_cache_memory_bytes, mamba_block_size=self.mamba_block_size
        )
        require_numbers(gpu_memory_utilization=self.gpu_memory_utilization)
        require_bools(enable_prefix_caching=self.enable_prefix_caching)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if self.mamba_block_size is not None and self.mamba_block_size < 1:
            raise ValueError(f"mamba_block_size is {self.mamba_block_size}; it must be at least 1")
        require_one_of(("none", "align", "all", None), mamba_cache_mode=self.mamba_cache_mode)
        require_one_of(("slots", "fold", None), mamba_state_policy=self.mamba_state_policy)
        if not isinstance(self.mamba_retention, str | None):
            raise ValueError(
                f"mamba_retention is {self.mamba_retention!r}; it must be text such as 'last+every=1024'"
            )
        name = str(self.mamba_ssm_cache_dtype).removeprefix("torch.")
        if name not in ("auto", *DTYPE_NAMES):
            raise ValueError(
                f"mamba_ssm_cache_dtype is {self.mamba_ssm_cache_dtype!r}; it must be one of "
                f"{', '.join(('auto', *DTYPE_NAMES))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
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
        # A `DraftHead` becomes a drafter where the caches are.
        if self.drafter is not None and not any(hasattr(self.drafter, n) for n in ("propose", "speculator")):
            raise ValueError(
                f"drafter is {self.drafter!r}; it must be a bateleur.eagle.Drafter, with a method propose"
            )
        require_paths(draft=self.draft)
        require_integers_or_none(num_speculative_tokens=self.num_speculative_tokens)
        given = self.num_speculative_tokens or 0
        if given > 0 and self.draft is None and self.drafter is None:
            raise ValueError(
                f"num_speculative_tokens is {given}; there is no draft or drafter to propose them"
            )
        require_one_of(("coupled", "ratio", "block"), speculative_rule=self.speculative_rule)
        self._check_policy()

    def _check_policy(self) -> None:
        policy = self.draft_policy
        if isinstance(policy, Mapping):
            if (most := max(policy.values(), default=0)) > self.num_drafts:
                raise ValueError(
                    f"draft_policy is {policy}; num_speculative_tokens = {self.num_drafts} is less than {most}"
                )
        elif policy not in ("fixed", "auto") and not hasattr(policy, "lengths"):
            raise ValueError(
                f"draft_policy is {policy!r}; it must be fixed, auto, a mapping of batch sizes or a DraftPolicy"
            )

    @property
    def num_drafts(self) -> int:
        """K: drafts of a step for each request, at most."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return DEFAULT_DRAFTS if self.draft is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
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
        modes = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        require_one_of((*modes, None), cudagraph_mode=self.cudagraph_mode)
        require_one_of(("OFF", "CHEAP", "ADDRESSES", "PARANOID"), cudagraph_checks=self.cudagraph_checks)
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if not isinstance(sizes, Sequence):
            raise ValueError(f"cudagraph_capture_sizes is {sizes!r}; it must be a sequence of integers")
        require_integers(**{f"cudagraph_capture_sizes[{i}]": n for i, n in enumerate(sizes)})
        if not sizes or min(sizes) < 1:
            raise ValueError(f"cudagraph_capture_sizes is {list(sizes)}; it must have sizes of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of it, by what it is about."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """From options by name, whichever part they belong to. Raises ValueError for a name that none has."""
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
