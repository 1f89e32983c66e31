"""Options of an engine: keyword arguments of `LLM` and flags of the command line.

Nothing here imports torch, so that `--help` is fast. `EngineLimits`, `StateOptions` and `GraphOptions` complete options
that depend on device or checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bateleur.runner.utils.arguments import Integer, Number, OneOf, Several, flag, folder, mapping, maybe, refuse, text
from bateleur.runner.utils.options import Checked, Option, option, options_of
from bateleur.runner.utils.vllm_names import ENGINE, drop_unsupported, translate_vllm_names

if TYPE_CHECKING:
    import torch

    from bateleur.cudagraph import CudaGraphMode, ReplayChecks
    from bateleur.eagle import Drafter, DraftPolicy, Rule
    from bateleur.mamba import MambaCacheMode, PromptScan, StatePolicy

_DTYPES = OneOf(("auto", "float32", "bfloat16", "float16"))
_KV_CACHE_DTYPES = OneOf(("auto", "fp8", "fp8_e4m3", "bfloat16", "float16", "float32"))
_MODES = OneOf(("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"))
DEQUANTIZE = "dequantize"
QUANTIZATION_METHODS = (
    *("fp8", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "gptq", "gptq_marlin"),
    *("awq", "awq_marlin", "auto-round", "inc", "mxfp4"),
)
"""Methods by vLLM's names: see `bateleur.runner.quantization.config`."""
NGRAM, MTP = "ngram", "mtp"
"""Values of `draft` that are not folders: prompt lookup, and the head in the target's own files."""
_OBJECT = partial(mapping, rule="a mapping from names to values, or None")


def _dtype(name: str, value: Any) -> str:
    spelled = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    return str(_DTYPES(name, spelled))


def _kv_cache_dtype(name: str, value: Any) -> str:
    spelled = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    return str(_KV_CACHE_DTYPES(name, "fp8" if spelled == "float8_e4m3fn" else spelled))


def _device(name: str, value: Any) -> str:
    spelled = str(value) if type(value).__module__ == "torch" else value
    return spelled if isinstance(spelled, str) else refuse(name, value, "auto, cpu, cuda or cuda:N")


def _drafter(name: str, value: Any) -> Any:
    """Return the value of option `drafter` if it is a `Drafter` or a `DraftHead` object. Raises ValueError otherwise.

    The engine makes the drafter of a `DraftHead` once caches exist. name: name of the option, for the error.
    """
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
        refuse(name, value, "fixed, auto, a mapping of batch sizes to numbers, or a bateleur.eagle.DraftPolicy")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """Options for the model, its device and its dtype; `bateleur serve --help` describes each field."""

    model: str | Path | None = option(None, maybe(folder))
    """Hugging Face checkpoint folder; None is the model that is shipped with the package."""
    dtype: str | torch.dtype = option("auto", _dtype)
    """Dtype of weights and activations: "auto" (the checkpoint's on CUDA, float32 on a CPU), "float32", "bfloat16" or
    "float16"."""
    quantization: str | None = option(None, maybe(OneOf((DEQUANTIZE, *QUANTIZATION_METHODS))))
    """"dequantize": convert quantised weights to `dtype` when they are loaded. Default: keep the weights as the
    checkpoint has them. The name of a method, such as "fp8", is checked against the checkpoint."""
    device: str | torch.device = option("auto", _device)
    """Device: "auto", "cpu", "cuda" or "cuda:N"."""
    max_model_len: int | None = option(None, maybe(Integer(2, why=", or None")))
    """Maximum tokens of a request, prompt and output together; default: the model's maximum."""
    tokenizer: str | Path | None = option(None, maybe(folder))
    """Folder with tokenizer.json or tiktoken.model (default: the model's folder)."""
    hf_overrides: Mapping[str, Any] | None = option(None, maybe(_OBJECT), hashed=False)
    """Fields that replace those of config.json; objects are merged field by field."""
    generation_config: str = option("auto", text)
    """Source of default sampling parameters: "auto" (the model's folder), "vllm" (none), or another folder."""
    override_generation_config: Mapping[str, Any] | None = option(None, maybe(_OBJECT), hashed=False)
    """Default sampling parameters that replace those of `generation_config`, such as {"temperature": 0.6}."""
    skip_tokenizer_init: bool = option(False, flag)
    """Do not load a tokenizer: prompts are token ids, and outputs have no text."""
    attention_backend: str = option("auto", text)
    """Name of a registered attention backend, or "auto"."""
    prompt_scan: PromptScan | str = option("own", OneOf(("own", "fla")))
    """Kernels for prompts of delta rules: "own", or "fla" for those of fla-core (extra bateleur-mamba[fla]), on CUDA in
    bfloat16 or float16, in steps that keep no state inside a prompt. With "fla", tokens may depend on how prompts are
    split into chunks."""
    seed: int = option(0, Integer())
    """Seed of the noise for requests without a seed."""

    @property
    def dequantizes(self) -> bool:
        """Whether quantised weights are converted when they are loaded."""
        return self.quantization == DEQUANTIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Checked):
    """Options for the size and order of steps; `bateleur generate --help` describes each field."""

    max_num_seqs: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Maximum number of running requests. Default: 64 on CPU; 256 on CUDA, or fewer (at least 64) if a step would take
    more than a quarter of the memory. If memory for caches is short: as many as leave half of it, or the longest
    request's share, to keys and values, with a warning."""
    max_num_batched_tokens: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Maximum tokens of one step; longer prompts run in chunks. Default: 512 on CPU, whose caches do not fit larger
    chunks; 8192 on CUDA, or fewer (at least 2048) if a step would take more than a quarter of the memory."""
    async_scheduling: bool | None = option(None, maybe(flag))
    """Prepare a step while the device runs the step before. Tokens stay the same; outputs come one step later. Default:
    on CUDA, not on CPU."""
    scheduling_policy: str = option("fcfs", OneOf(("fcfs", "priority")))
    """Order of waiting requests: "fcfs" (first come, first served) or "priority" (lowest `priority` first). With
    "priority", a request may wait forever if requests of lower values keep coming. Running requests are preempted only
    if KV blocks run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Checked):
    """Options for KV cache, Mamba states, prefix cache and KV offload; `bateleur generate --help` describes all."""

    block_size: int = option(16, Integer(1))
    """Tokens of a KV-cache block."""
    kv_cache_dtype: str | torch.dtype = option("auto", _kv_cache_dtype)
    """Dtype of keys and values in the cache: "auto" (the checkpoint's choice, else the dtype of the model), "fp8" or
    "fp8_e4m3" (8 bits, with the scales of the checkpoint, else 1.0), "bfloat16", "float16" or "float32". Queries attend
    to the rounded keys and values, so prefix caching, chunks and drafts do not change tokens."""
    kv_cache_memory_bytes: int | None = option(None, maybe(Integer(0, why=", or None")))
    """Memory for KV cache, Mamba states and logits of drafts together. Default: on CPU what is needed, up to a quarter
    of main memory; on CUDA what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = option(0.9, Number(0, 1, above=True))
    """Share of the GPU's memory for weights, caches and the memory of steps."""
    enable_prefix_caching: bool = option(False, flag)
    """Reuse what was computed for the same leading tokens of earlier requests."""
    mamba_cache_mode: MambaCacheMode | str | None = option(None, maybe(OneOf(("none", "align", "all"))))
    """Mamba states in the prefix cache: "all" (at boundaries all along a request; the default with prefix caching),
    "align" (a request's newest state and its prompt's last one) or "none" (the default without)."""
    mamba_block_size: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Distance in tokens of boundaries at which states may be kept, a multiple of `block_size`; default: the largest
    `block_size` * 2**n up to 64 and up to a quarter of `max_model_len`."""
    mamba_state_policy: StatePolicy | str | None = option(None, maybe(OneOf(("slots", "fold"))))
    """How a step keeps the states that rejected drafts may need: "fold" (one state and a ring of inputs per request) or
    "slots" (one state per draft token). Default: "slots" without drafts, and on a CPU that caches no prefixes; else
    "fold"."""
    mamba_retention: str | None = option(None, maybe(text))
    """States of `mamba_cache_mode` that stay in the prefix cache: "all", "none", or a sum by "+" of "last",
    "prompt_end", "doubling" (after 1, 2, 4, ... blocks) and "every=N" (tokens). Default: by mode. If a state costs more
    than the keys and values of a block and `mamba_block_size` is not given, mode "all" keeps "last+prompt_end+doubling"
    and every N tokens whose keys and values cost as much as a state."""
    mamba_ssm_cache_dtype: str | torch.dtype = option("auto", _dtype)
    """Dtype of SSM states: "auto" (the checkpoint's, else float32), "float32", "bfloat16" or "float16"."""
    kv_offload_bytes: int = option(0, Integer(0))
    """Host memory of all ranks together for cached prefixes that have no room on the device; 0 for none."""
    kv_offload_path: str | Path | None = option(None, maybe(folder))
    """Folder for cached prefixes, for use after a restart and by other engines of the same model. They pass through
    `kv_offload_bytes` of host memory. Anyone who can write there can change what requests compute. Default: none."""
    kv_offload_disk_bytes: int | None = option(None, maybe(Integer(0, why=", or None")))
    """Maximum size of the files in `kv_offload_path`, those of other models included; least recently used ones are
    removed. Default: half of the free space at start plus what the files take then."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            refuse("kv_offload_bytes", self.kv_offload_bytes, "0 without enable_prefix_caching")
        if self.kv_offload_path is not None and not self.kv_offload_bytes:
            rule = "None without kv_offload_bytes, because files are read and written through host memory"
            refuse("kv_offload_path", self.kv_offload_path, rule)
        if self.kv_offload_disk_bytes is not None and self.kv_offload_path is None:
            refuse("kv_offload_disk_bytes", self.kv_offload_disk_bytes, "None without kv_offload_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(Checked):
    """Options for source, number and verification of drafts; `bateleur generate --help` describes all but `drafter`."""

    draft: str | Path | None = option(None, maybe(folder))
    """Folder of a draft head (EAGLE-1 or EAGLE-3), "mtp" (the head in the model's own files), "auto" (the head shipped
    with the shipped model), or "ngram" (prompt lookup: what followed the last tokens earlier in the request). Tokens
    stay those of plain decoding."""
    num_speculative_tokens: int | None = option(None, maybe(Integer(0, why=", or None")))
    """Maximum number of drafts that a step verifies for each request; default: 4 with `draft`, else 0."""
    prompt_lookup_min: int | None = option(None, maybe(Integer(1, why=", or None")))
    """With draft "ngram": minimum number of last tokens that must match; default: `prompt_lookup_max`, else 2."""
    prompt_lookup_max: int | None = option(None, maybe(Integer(1, why=", or None")))
    """With draft "ngram": maximum number of last tokens that are looked up; default: `prompt_lookup_min`, else 4."""
    drafter: Drafter | None = option(None, maybe(_drafter))
    """A `bateleur.eagle.Drafter` instead of a draft head."""
    draft_policy: str | DraftPolicy | Mapping[int, int] = option("fixed", _policy)
    """Number of drafts that a request's next step verifies: "fixed" (all), "auto" (all or none, by measured step
    times), a mapping of batch sizes to numbers such as {1: 4, 8: 2, 32: 0}, or a `bateleur.eagle.DraftPolicy`."""
    speculative_rule: str | Rule = option("coupled", OneOf(("coupled", "ratio", "block")))
    """Acceptance rule of drafts: "coupled" (the tokens of plain decoding), or "ratio" or "block" (the target's
    distribution). With the latter, a head keeps its logits: max_num_seqs * drafts * draft vocabulary * 4 bytes; a
    `drafter` that does not declare its distribution drafts for greedy rows only. Greedy requests get the same tokens
    under all rules."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.draft is not None and self.drafter is not None:
            refuse("drafter", self.drafter, f"None with draft = {self.draft!r}: give one of them")
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
        """Minimum and maximum number of last tokens that prompt lookup matches."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 2, most or least or 4

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a request in one step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return 4 if self.draft is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(Checked):
    """Options for CUDA graphs; `bateleur generate --help` describes each field."""

    cudagraph_mode: CudaGraphMode | str | None = option(None, maybe(_MODES))
    """Steps that run on CUDA graphs: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or "FULL_AND_PIECEWISE"; default:
    FULL_AND_PIECEWISE on CUDA, NONE on CPU. A mode that the model does not support is lowered with a warning."""
    cudagraph_backend: str = option("auto", OneOf(("auto", "recorded", "cuda", "eager")))
    """Capture backend: "auto" (CUDA graphs on CUDA, eager on CPU), "recorded" (emulates CUDA graphs on a CPU, for
    tests), "cuda" or "eager"."""
    cudagraph_capture_sizes: Sequence[int] | None = option(None, maybe(Several(Integer(1), "a sequence of integers")))
    """Token counts to capture. Default: up to 512 tokens, or up to those of `max_num_seqs` requests with all their
    drafts, dense for small batches."""
    cudagraph_checks: str | ReplayChecks = option("CHEAP", OneOf(("OFF", "CHEAP", "ADDRESSES", "PARANOID")))
    """Checks of each replay: "OFF", "CHEAP", "ADDRESSES" or "PARANOID"."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.cudagraph_capture_sizes == ():
            refuse("cudagraph_capture_sizes", (), "None, or have at least one size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Checked):
    """Options for tensor and data parallelism; `bateleur generate --help` describes each field."""

    tensor_parallel_size: int = option(1, Integer(1))
    """Number of ranks (processes) that share every layer, each on its own GPU, or on a CPU with its part of the
    threads. Under torchrun: the number it started."""
    data_parallel_size: int = option(1, Integer(1))
    """Number of ranks (processes) that share the experts of a model; each has its own requests, caches and other
    layers, and all take part in every step."""
    rank_timeout: float = option(60.0, Number(0, above=True))
    """Seconds after which a rank in a step counts as hung, and the engine ends."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.tensor_parallel_size > 1 and self.data_parallel_size > 1:
            rule = f"1 with tensor_parallel_size = {self.tensor_parallel_size}"
            refuse("data_parallel_size", self.data_parallel_size, rule)

    @property
    def num_ranks(self) -> int:
        """Number of processes that run the model."""
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig(Checked):
    """Options for LoRA adapters, one per request; `bateleur generate --help` describes each field."""

    enable_lora: bool = option(False, flag)
    """Let requests name a LoRA adapter, a folder that PEFT wrote (`lora_request`)."""
    max_loras: int = option(1, Integer(1))
    """Maximum number of adapters on the device; each takes memory. A further adapter takes the place of one that no
    unfinished request uses."""
    max_lora_rank: int = option(16, Integer(1))
    """Largest rank of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine, by topic."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        if self.lora.enable_lora and self.parallel.data_parallel_size > 1:
            rule = f"false with data_parallel_size = {self.parallel.data_parallel_size}"
            refuse("enable_lora", self.lora.enable_lora, rule)

    @classmethod
    def of(cls, /, **options: Any) -> EngineConfig:
        """Return a configuration from options by name. Raises ValueError for an unknown name.

        Arguments of vLLM that do not exist here are accepted if their value matches the fixed behaviour.
        """
        options, parts = drop_unsupported(ENGINE, translate_vllm_names(options)), {}
        for part, config in PARTS.items():
            names = [each.name for each in options_of(config) if each.name in options]
            parts[part] = config(**{name: options.pop(name) for name in names})
        for name in options:
            close = get_close_matches(name, [each.name for each in all_options()], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name} is no argument of LLM{hint}")
        return cls(**parts)

    def runs_async(self, device: torch.device) -> bool:
        """Return whether scheduling is async: the user's choice, or by default only on CUDA."""
        wanted, backend = self.scheduler.async_scheduling, self.model.attention_backend
        impossible = self.speculative.num_drafts > 0 and backend == "flashinfer"
        if wanted and impossible:
            rule = "None or False with drafts and attention_backend 'flashinfer', which plans from exact lengths"
            refuse("async_scheduling", wanted, rule)
        return wanted if wanted is not None else device.type == "cuda" and not impossible


PARTS: dict[str, Any] = {part.name: part.default_factory for part in fields(EngineConfig)}
"""Configuration classes by their field in `EngineConfig`."""


def all_options() -> tuple[Option, ...]:
    """Return all options of an engine, in the order of the fields of `EngineConfig`."""
    return tuple(each for config in PARTS.values() for each in options_of(config))
