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

from bateleur.runner.utils.arguments import (
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
from bateleur.runner.utils.options import Checked, Option, option, options_of
from bateleur.runner.utils.vllm_names import ENGINE, in_our_names, without

if TYPE_CHECKING:
    import torch

    from bateleur.cudagraph import CudaGraphMode, ReplayChecks
    from bateleur.eagle import Drafter, DraftPolicy, Rule
    from bateleur.mamba import MambaCacheMode, PromptScan, StatePolicy

_DTYPES = OneOf(("auto", "float32", "bfloat16", "float16"))
_MODES = OneOf(("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"))
NGRAM, MTP = "ngram", "mtp"
"""Values of `draft` that are no folders: prompt lookup, and the head in the target's own files."""
_SIZES = Several(Integer(1), "a sequence of integers")


def _dtype(name: str, value: Any) -> str:
    spelled = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    return str(_DTYPES(name, spelled))


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


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        refuse(name, value, "a mapping from names to values, or None")
    return dict(value)


def _policy(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        sizes = {Integer(1)(f"{name}: a batch size", size): size for size in value}
        table = {size: Integer(0)(f"{name}[{size}]", value[key]) for size, key in sizes.items()}
        return table if 1 in table else refuse(name, value, "a mapping that has a number for 1 request")
    if isinstance(value, type) or not (value in ("fixed", "auto") or hasattr(value, "lengths")):
        refuse(
            name,
            value,
            "fixed, auto, a mapping of batch sizes to numbers, or a bateleur.eagle.DraftPolicy",
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """Which model, where, and in which dtype."""

    model: str | Path | None = option(None, maybe(folder))
    """Hugging Face checkpoint folder; None is the model that ships with the package."""
    dtype: str | torch.dtype = option("auto", _dtype)
    """Of weights and activations: "auto" (the checkpoint's own on CUDA; on a CPU float32, where matrices of a bfloat16
    checkpoint stay that in memory if kernels can be compiled, or bfloat16, where in it a token of that checkpoint has
    the same bits beside any, which `bateleur info` tells), "float32", "bfloat16" or "float16"."""
    device: str | torch.device = option("auto", _device)
    """Where it runs: "auto", "cpu", "cuda" or "cuda:N"."""
    max_model_len: int | None = option(None, maybe(Integer(2, why=", or None")))
    """Longest request in tokens, prompt and output; default: what the model was made for."""
    tokenizer: str | Path | None = option(None, maybe(folder))
    """Folder with the tokenizer's files, tokenizer.json or tiktoken.model (default: the model's folder)."""
    hf_overrides: Mapping[str, Any] | None = option(None, maybe(_object), hashed=False)
    """Fields in place of those of config.json; objects are merged field by field."""
    generation_config: str = option("auto", text)
    """Where default sampling parameters come from: "auto", the model's folder; "vllm", none; or another folder."""
    override_generation_config: Mapping[str, Any] | None = option(None, maybe(_object), hashed=False)
    """Default sampling parameters in place of those of `generation_config`, such as {"temperature": 0.6}."""
    skip_tokenizer_init: bool = option(False, flag)
    """Open a checkpoint without its tokenizer; prompts are token ids, and texts stay empty."""
    attention_backend: str = option("auto", text)
    """Name of a registered attention backend, or "auto"."""
    prompt_scan: PromptScan | str = option("own", OneOf(("own", "fla")))
    """Kernels for prompts of delta rules: "own", or "fla": those of fla-core (extra bateleur-mamba[fla]), on CUDA in
    bfloat16 or float16, in steps that keep no state inside a prompt. Tokens may then depend on where prompts are cut.
    """
    seed: int = option(0, Integer())
    """What the noise of requests without a seed of their own derives from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Checked):
    """How much runs in a step."""

    max_num_seqs: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Requests that run at once. Default: 256 on CUDA, or fewer, down to 64, if a step of so many would take more than
    a quarter of the memory; 64 on CPU. If memory for caches is short: as many as leave half of it, or what the longest
    request takes, for keys and values, with a warning."""
    max_num_batched_tokens: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Tokens of one step; longer prompts run in chunks. Default: 8192 on CUDA, or fewer, down to 2048, if a step of so
    many would take more than a quarter of the memory; 512 on CPU, where larger chunks do not fit its caches."""
    async_scheduling: bool | None = option(None, maybe(flag))
    """Prepare a step while the device is at the one before, from bounds of what that may come to; reports come a step
    later, and tokens are the same. Default: on CUDA, and not on CPU, where there is nothing to wait for."""
    scheduling_policy: str = option("fcfs", OneOf(("fcfs", "priority")))
    """Whose turn it is: "fcfs", first come, first served; "priority", the lowest `priority` first. Then a request may
    wait for ever behind ever new ones of lower numbers; one that runs is only interrupted where KV blocks run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Checked):
    """KV cache, Mamba states, and what requests share of them."""

    block_size: int = option(16, Integer(1))
    """Tokens of a KV-cache block."""
    kv_cache_memory_bytes: int | None = option(None, maybe(Integer(0, why=", or None")))
    """Budget for KV cache, Mamba states and logits of drafts together; default: all that could be used, up to a
    quarter of main memory on CPU, or what `gpu_memory_utilization` leaves beside the weights on CUDA."""
    gpu_memory_utilization: float = option(0.9, Number(0, 1, above=True))
    """Share of the GPU's memory for weights, caches and what steps need beside them."""
    enable_prefix_caching: bool = option(False, flag)
    """Let requests share what others computed of the same leading tokens."""
    mamba_cache_mode: MambaCacheMode | str | None = option(None, maybe(OneOf(("none", "align", "all"))))
    """Which Mamba states are kept for that: "all" (boundaries all along a request; the default with prefix caching),
    "align" (of each request the newest, and its prompt's last) or "none" (the default without)."""
    mamba_block_size: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Tokens between two boundaries at which states may be kept, a multiple of `block_size`; default: the largest
    `block_size` * 2**n up to 64 and to a quarter of `max_model_len`."""
    mamba_state_policy: StatePolicy | str | None = option(None, maybe(OneOf(("slots", "fold"))))
    """How a step keeps states it may have to return to: "fold" (one state and a ring of inputs per request) or "slots"
    (a state for each draft token); default: "fold", but "slots" without drafts on CPU and for delta rules on CUDA, and
    with drafts on CPU if prefixes are not shared."""
    mamba_retention: str | None = option(None, maybe(text))
    """Which of the states of `mamba_cache_mode` others may find: "all", "none", or some of "last", "prompt_end",
    "doubling" (after 1, 2, 4, ... blocks) and "every=N" (tokens) joined by "+"; default: what the mode says, but where
    a state costs more than the keys and values of a block, and `mamba_block_size` is not given, in mode "all" the
    first three, and every N tokens whose keys and values cost as much as a state."""
    mamba_ssm_cache_dtype: str | torch.dtype = option("auto", _dtype)
    """Of the SSM states: "auto" (the checkpoint's own, else float32), "float32", "bfloat16" or "float16"."""
    kv_offload_bytes: int = option(0, Integer(0))
    """Host memory for what is shared of prefixes and has no more room on the device, from which it comes back when a
    request asks for it; 0 for none. Of all ranks together."""

    kv_offload_path: str | Path | None = option(None, maybe(folder))
    """Folder for prefixes, which requests find again after a restart and in other engines of the same model: what a
    request leaves is written there, and read into host memory when one asks for it. What passes through takes
    `kv_offload_bytes`. Who may write there decides what requests find. Default: none."""
    kv_offload_disk_bytes: int | None = option(None, maybe(Integer(0, why=", or None")))
    """Of files in `kv_offload_path`, at most, those of other models included: what nobody asked for the longest goes
    first. Default: half of what is free there at the start, and what they take then."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            refuse("kv_offload_bytes", self.kv_offload_bytes, "0 without enable_prefix_caching")
        if self.kv_offload_path is not None and not self.kv_offload_bytes:
            refuse(
                "kv_offload_path",
                self.kv_offload_path,
                "None without kv_offload_bytes, through which files go",
            )
        if self.kv_offload_disk_bytes is not None and self.kv_offload_path is None:
            refuse("kv_offload_disk_bytes", self.kv_offload_disk_bytes, "None without kv_offload_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(Checked):
    """What proposes tokens that a step then verifies together."""

    draft: str | Path | None = option(None, maybe(folder))
    """Folder of a draft head (EAGLE-1 or EAGLE-3, see `bateleur.eagle.heads`), "mtp" for the one in the model's own
    files, "auto" for the one that is shipped with the shipped model, or "ngram" for prompt lookup, which needs none:
    what followed the last tokens of a request when they came in it before. The tokens stay those of plain decoding."""
    num_speculative_tokens: int | None = option(None, maybe(Integer(0, why=", or None")))
    """Drafts that a step verifies for each request, at most; default: 4 with `draft`, else 0."""
    prompt_lookup_min: int | None = option(None, maybe(Integer(1, why=", or None")))
    """With draft "ngram": last tokens that must have come before, at least; default: `prompt_lookup_max`, else 2."""
    prompt_lookup_max: int | None = option(None, maybe(Integer(1, why=", or None")))
    """With draft "ngram": last tokens that are looked for, at most; default: `prompt_lookup_min`, else 4."""
    drafter: Drafter | None = option(None, maybe(_drafter))
    """What proposes them in place of a head: anything that is a `bateleur.eagle.Drafter`."""
    draft_policy: str | DraftPolicy | Mapping[int, int] = option("fixed", _policy)
    """How many drafts each request's next step verifies: "fixed" (as many as there are), "auto" (as many as pay, by
    the times of the steps so far; none where none do), a mapping of batch sizes to numbers such as
    {1: 4, 8: 2, 32: 0}, or a `bateleur.eagle.DraftPolicy`."""
    speculative_rule: str | Rule = option("coupled", OneOf(("coupled", "ratio", "block")))
    """How drafts are tested: "coupled" (the tokens of plain decoding), or "ratio" or "block", which have the target's
    law; a head then keeps the logits of its drafts, max_num_seqs * drafts * draft vocabulary * 4 bytes, and a `drafter`
    that doesn't declare its law is shown greedy rows only. Greedy requests are the same under all."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.draft is not None and self.drafter is not None:
            refuse("drafter", self.drafter, f"None beside draft = {self.draft!r}: one of them proposes")
        if self.num_speculative_tokens and self.draft is None and self.drafter is None:
            refuse("num_speculative_tokens", self.num_speculative_tokens, "0 without a draft or a drafter")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if (length := getattr(self, name)) is not None and self.draft != NGRAM:
                refuse(name, length, f"None without draft = {NGRAM!r}")
        if (lengths := self.prompt_lookup)[0] > lengths[1]:
            refuse("prompt_lookup_min", lengths[0], f"at most prompt_lookup_max = {lengths[1]}")
        if isinstance(self.draft_policy, Mapping) and max(self.draft_policy.values()) > self.num_drafts:
            refuse("draft_policy", self.draft_policy, f"at most num_speculative_tokens = {self.num_drafts}")

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Tokens that prompt lookup looks for, at least and at most."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 2, most or least or 4

    @property
    def num_drafts(self) -> int:
        """K: drafts of a step for each request, at most."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return 4 if self.draft is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(Checked):
    """Which steps run on CUDA graphs."""

    cudagraph_mode: CudaGraphMode | str | None = option(None, maybe(_MODES))
    """Which steps run on CUDA graphs: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or "FULL_AND_PIECEWISE"; default:
    FULL_AND_PIECEWISE on CUDA, NONE on CPU. A mode that the model's parts can't support is lowered with a warning."""
    cudagraph_backend: str = option("auto", OneOf(("auto", "recorded", "cuda", "eager")))
    """What captures: "auto" (CUDA graphs on CUDA; on CPU the captured body runs eagerly), "recorded" (on CPU, with the
    semantics of CUDA graphs: for tests), "cuda" or "eager"."""
    cudagraph_capture_sizes: Sequence[int] | None = option(None, maybe(_SIZES))
    """Token counts to capture. Default: up to 512 tokens, and up to those of `max_num_seqs` requests with all their
    drafts, dense for small batches."""
    cudagraph_checks: str | ReplayChecks = option("CHEAP", OneOf(("OFF", "CHEAP", "ADDRESSES", "PARANOID")))
    """What each replay verifies: "OFF", "CHEAP", "ADDRESSES" or "PARANOID"."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.cudagraph_capture_sizes == ():
            refuse("cudagraph_capture_sizes", (), "None, or have a size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Checked):
    """How many processes run a model together."""

    tensor_parallel_size: int = option(1, Integer(1))
    """Ranks, processes that have a part of every layer each: on CUDA with a GPU each, on a CPU with their part of the
    threads. Under torchrun as many as it has started."""
    data_parallel_size: int = option(1, Integer(1))
    """Ranks of a model with experts, processes that have requests, caches and all layers of their own, but only some of
    the experts each: in every step they compute with those of each other."""
    rank_timeout: float = option(60.0, Number(0, above=True))
    """Seconds that a step of several ranks may take, before one of them counts as hung and the engine ends."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.tensor_parallel_size > 1 and self.data_parallel_size > 1:
            rule = f"1 with tensor_parallel_size = {self.tensor_parallel_size}"
            refuse("data_parallel_size", self.data_parallel_size, rule)

    @property
    def num_ranks(self) -> int:
        """Processes that run a model."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def size_name(self) -> str:
        """The option that says so."""
        return "data_parallel_size" if self.data_parallel_size > 1 else "tensor_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of it, by what it is about."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @classmethod
    def of(cls, /, **options: Any) -> EngineConfig:
        """From options by name, whichever part they belong to. Raises ValueError for a name that none has.

        Names of vLLM's pass where they ask for what there is.
        """
        options, parts = without(ENGINE, in_our_names(options)), {}
        for part, config in PARTS.items():
            names = [each.name for each in options_of(config) if each.name in options]
            parts[part] = config(**{name: options.pop(name) for name in names})
        for name in options:
            close = get_close_matches(name, [each.name for each in all_options()], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name} is no argument of LLM{meant}")
        return cls(**parts)


PARTS: dict[str, Any] = {part.name: part.default_factory for part in fields(EngineConfig)}
"""Configurations by the name of their field in `EngineConfig`."""


def all_options() -> tuple[Option, ...]:
    """Every option of an engine, in the order of the parts."""
    return tuple(each for config in PARTS.values() for each in options_of(config))
