"""Parameters and memory of a checkpoint, from its config and the headers of its weight files.

Only a draft head's tensors are read, to find which of them it shares with the target.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bateleur.cudagraph import CudaGraphMode
from bateleur.eagle import NGramDrafter, Rule
from bateleur.mamba import MambaCacheMode
from bateleur.runner.assets import shipped_model
from bateleur.runner.cache.costs import CacheCosts, CacheOptions, DraftCosts, workspace_bytes
from bateleur.runner.cache.plan import plan_caches
from bateleur.runner.checkpoint.open import Checkpoint, describe_model, open_checkpoint, resolve_dtype
from bateleur.runner.config.engine_config import MTP, NGRAM, EngineConfig
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.resolve import describe_backend, describe_scan
from bateleur.runner.diagnose.part_facts import EMBEDDINGS, PartFacts, count_parts, count_schemes
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.setup import unmeasured_budget
from bateleur.runner.lora.adapter_manager import AdapterPool
from bateleur.runner.model_runner.graph_dispatcher import largest_capture
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.memory_report import packed_weight_bytes
from bateleur.runner.models.native import describe_kernels
from bateleur.runner.models.sharding import num_sums, sum_bytes
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.spec_decode.mtp_head import MtpHead
from bateleur.runner.utils.arguments import member_of
from bateleur.runner.utils.device import resolve_device


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that the files of its checkpoint contain."""

    architecture: str
    stored_dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    unused_tensors: int
    """Number of tensors in the files that the model does not need."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Memory of recurrent states. Page: a state and its conv window. Ring: inputs of a request's last tokens."""

    mamba_state_bytes_per_request: int
    """Most state memory of a running request over all recurrent layers (pages, ring and window), at any length."""
    mamba_pages_per_request: int
    mamba_ring_bytes: int
    mamba_window_bytes: int
    mamba_page_bytes: int
    """One state and its convolution window: what prefix caching keeps at a block boundary."""
    mamba_state_bytes: int
    """The state of one page, without the window."""
    kept_states: int
    """Number of Mamba states that prefix caching keeps of a request of `max_model_len` tokens."""

    @classmethod
    def of(cls, costs: CacheCosts, hits: CacheCosts) -> StateFacts:
        """Return the memory of states. costs: costs of the engine's caches. hits: the same with prefix caching on."""
        return cls(
            mamba_state_bytes_per_request=costs.state_bytes_per_request,
            mamba_pages_per_request=costs.pages_per_request,
            mamba_ring_bytes=costs.ring_bytes,
            mamba_window_bytes=costs.window_bytes,
            mamba_page_bytes=costs.page_bytes,
            mamba_state_bytes=costs.state_bytes,
            kept_states=hits.pages_to_share,
        )


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Device memory for drafts, in bytes per request."""

    draft_logits_bytes_per_request: int
    """Logits of unverified drafts; 0 if the acceptance rule needs none."""
    draft_tokens_bytes_per_request: int
    """Token ids of the request on the device, for prompt lookup; 0 without."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Kernels that an engine would choose."""

    prompt_scan: str | None
    """Kernels that scan prompts in delta-rule layers, and why not others; None without these layers."""
    attention: str | None
    """Attention backend, and why not a preferred one; None without attention layers."""
    quantized: dict[str, dict[str, int]]
    """Bytes of quantised matrices by kind of layer, then by scheme and kernel; {} if all are plain."""
    cpu_kernels: str | None
    """Kernels on a CPU, and why not others; None on other devices."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Sizes of a checkpoint in an engine with weights of `dtype`. With several ranks, sizes on the first rank."""

    path: str
    model: ModelFacts
    states: StateFacts
    drafts: DraftFacts
    kernels: KernelFacts
    dtype: str
    kv_cache_dtype: str
    ranks: int
    sums: int
    """Number of all-reduces per step over tensor-parallel ranks; 0 for one rank."""
    sum_bytes_per_token: int
    """Bytes per token in all of these all-reduces."""
    parts: dict[str, PartFacts]
    """By kind: `mamba`, `delta`, `short conv`, `attention`, `mlp`, `experts`, `draft head`, `embeddings`."""
    parameters: int
    weight_bytes: int
    held_bytes: int
    """Memory of the target's weights on this device, in the layouts of its matrix products."""
    adapter_bytes: int
    """Slots of LoRA adapters; 0 without `enable_lora`."""
    active_bytes: int
    """Bytes of the weights that one token uses; less than all if there are experts."""
    kv_bytes_per_token: int
    """Keys and values of one token over all attention layers, including a draft head's."""
    workspace_bytes: int
    """Approximate upper bound of the memory of steps and graphs: activations, logits, block tables. An engine on a GPU
    measures it at start."""
    hit_granularity: int
    """Prefix cache hits are multiples of this many tokens."""
    max_model_len: int
    """Most tokens of a request, prompt and output. On a GPU without `kv_cache_memory_bytes`, the limit by the KV cache
    is not included, because an engine measures its size at start."""

    def as_dict(self) -> dict[str, Any]:
        """All facts as JSON values, in one object."""
        found = asdict(self)
        for group in ("model", "states", "drafts", "kernels"):
            found |= found.pop(group)
        return found

    def table(self) -> str:
        """Return the facts as a table for a terminal."""
        tied = "tied" if self.model.tied_embeddings else "separate"
        experts = self.active_bytes < self.weight_bytes

        def row(kind: str, layers: str, parameters: int, weights: int, active: int) -> str:
            last = f"{format_bytes(active):>12}" if experts else ""
            return f"{kind:<12}{layers:>8}{parameters:>18,}{format_bytes(weights):>12}{last}"

        lines = [
            f"{self.model.architecture}  {self.path}",
            f"{self.model.vocab_size:,} tokens of vocabulary, hidden size {self.model.hidden_size:,}, "
            f"up to {self.model.max_position_embeddings:,} tokens per request",
            f"stored as {self.model.stored_dtype}, sizes in {self.dtype}, {tied} output embedding",
            *([f"numbers of the first of {self.ranks} ranks"] if self.ranks > 1 else []),
            "",
            f"{'':<12}{'layers':>8}{'parameters':>18}{'weights':>12}" + (f"{'active':>12}" if experts else ""),
        ]
        for kind, part in self.parts.items():
            layers = "" if kind == EMBEDDINGS else f"{part.layers:,}"
            lines.append(row(kind, layers, part.parameters, part.weight_bytes, part.active_bytes))
        layers = f"{sum(part.layers for part in self.parts.values()):,}"
        lines += [
            row("total", layers, self.parameters, self.weight_bytes, self.active_bytes),
            "",
            f"weights                    {self.weight_bytes:>16,} bytes",
            f"  of the model, in memory  {self.held_bytes:>16,} bytes, in this device's layout",
            *([f"LoRA adapters, all slots   {self.adapter_bytes:>16,} bytes"] if self.adapter_bytes else []),
            *([f"active weights per token   {self.active_bytes:>16,} bytes"] if experts else []),
            f"KV cache per token         {self.kv_bytes_per_token:>16,} bytes, as {self.kv_cache_dtype}",
            *self._states(),
            f"longest request            {self.max_model_len:>16,} tokens, prompt and output",
            f"workspace, about           {self.workspace_bytes:>16,} bytes at most, for steps and graphs",
            f"prefix hit granularity     {self.hit_granularity:>16,} tokens",
        ]
        if self.sums:
            lines.append(
                f"all-reduces per step       {self.sums:>16,}, of {self.sum_bytes_per_token:,} bytes per token"
            )
        if self.drafts.draft_logits_bytes_per_request:
            lines.append(f"draft logits per request   {self.drafts.draft_logits_bytes_per_request:>16,} bytes")
        if self.drafts.draft_tokens_bytes_per_request:
            lines.append(f"lookup tokens per request  {self.drafts.draft_tokens_bytes_per_request:>16,} bytes")
        if self.states.mamba_page_bytes:
            kept = f"{self.states.kept_states:,} per {self.max_model_len:,} tokens"
            lines.append(f"cached state page          {self.states.mamba_page_bytes:>16,} bytes, {kept}")
        if self.kernels.prompt_scan:
            lines.append(f"delta-rule prompt scan     {self.kernels.prompt_scan}")
        if self.kernels.attention:
            lines.append(f"attention                  {self.kernels.attention}")
        lines += [
            f"{f'quantised {kind}':<27}{format_bytes(size)}, {scheme}"
            for kind, schemes in self.kernels.quantized.items()
            for scheme, size in schemes.items()
        ]
        if self.kernels.cpu_kernels:
            lines.append(f"CPU kernels                {self.kernels.cpu_kernels}")
        if self.model.unused_tensors:
            lines.append(f"{self.model.unused_tensors} known tensors in the files are not used")
        return "\n".join(lines)

    def _states(self) -> list[str]:
        states = self.states
        count, page, state = states.mamba_pages_per_request, states.mamba_page_bytes, states.mamba_state_bytes
        lines = [f"states per request         {states.mamba_state_bytes_per_request:>16,} bytes"]
        if page:
            lines.append(f"  pages                    {count * page:>16,} bytes, {count:,} of {page:,}")
            lines.append(f"    state of a page        {state:>16,} bytes, without its window")
        if states.mamba_window_bytes:
            lines.append(f"  ring                     {states.mamba_ring_bytes:>16,} bytes")
            lines.append(f"  convolution window       {states.mamba_window_bytes:>16,} bytes")
        return lines


def describe_checkpoint(path: str | Path, **options: Any) -> CheckpointFacts:
    """Describe a checkpoint folder for an engine with these options of `LLM`. The target's weights are not loaded.

    With dtype "auto", sizes of weights and KV cache are for the stored dtype. Raises ValueError as `LLM` does.
    """
    config = EngineConfig.of(model=path, **options)
    device, chosen = resolve_device(config.model.device), config.speculative
    checkpoint = open_checkpoint(path, config.model.hf_overrides, dequantize=config.model.dequantizes)
    computed = resolve_dtype(config.model.dtype, checkpoint, device)
    counted = checkpoint.dtype if config.model.dtype == "auto" else computed
    limits, caches = EngineLimits.of(config, checkpoint.spec, device), CacheOptions.of(config, checkpoint.spec, device)
    target, longest = empty_model(config, checkpoint, counted), limits.max_model_len
    graph_tokens = largest_capture(GraphOptions.of(config.graphs, device), limits)
    spec, parts, own = target.spec, count_parts(target), 0
    if chosen.draft == NGRAM:
        caches = replace(caches, draft=DraftCosts(row_bytes=NGramDrafter.token_bytes(longest)))
    elif chosen.draft is not None:
        head, rule = _head(chosen.draft, target, checkpoint), member_of(Rule, chosen.speculative_rule)
        parts["draft head"] = _head_facts(head)
        caches = replace(caches, draft=head.costs(caches.kv_dtype or counted, rule))
        own = len(head.report.own) if chosen.draft == MTP else 0
    costs, hits = (CacheCosts.of(spec, counted, longest, each) for each in (caches, _sharing(caches)))
    return CheckpointFacts(
        path=str(path),
        model=ModelFacts(
            architecture=spec.architecture,
            stored_dtype=_name(checkpoint.dtype),
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_position_embeddings=spec.max_position_embeddings,
            tied_embeddings=spec.tie_word_embeddings,
            unused_tensors=len(checkpoint.unused) - own,
        ),
        states=StateFacts.of(costs, hits),
        kernels=KernelFacts(
            prompt_scan=describe_scan(config.model.prompt_scan, spec, counted, device),
            attention=describe_backend(config.model.attention_backend, spec, computed, device, caches.kv_dtype),
            quantized=count_schemes(target, device, computed),
            cpu_kernels=describe_kernels(device),
        ),
        dtype=_name(counted),
        kv_cache_dtype=_name(costs.kv_dtype),
        ranks=config.parallel.num_ranks,
        parts=parts,
        sums=0 if target.ranks.alone else num_sums(spec),
        sum_bytes_per_token=0 if target.ranks.alone else sum_bytes(spec, counted.itemsize),
        parameters=sum(part.parameters for part in parts.values()),
        weight_bytes=sum(part.weight_bytes for part in parts.values()),
        held_bytes=_held(config, checkpoint, computed, device),
        adapter_bytes=_adapter_bytes(config, checkpoint, counted),
        active_bytes=sum(part.active_bytes for part in parts.values()),
        kv_bytes_per_token=costs.token_bytes,
        drafts=DraftFacts(costs.logits_bytes_per_request, caches.draft.row_bytes),
        workspace_bytes=workspace_bytes(target, limits, caches.block_size, graph_tokens),
        hit_granularity=caches.block_size if hits.layout is None else hits.layout.block_size,
        max_model_len=_fitting_length(config, spec, counted, limits, caches),
    )


def _fitting_length(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, limits: EngineLimits, caches: CacheOptions
) -> int:
    """Return `max_model_len` as an engine lowers it when it starts. Raises ValueError as `plan_caches` does."""
    device, num_ranks = resolve_device(config.model.device), config.parallel.num_ranks
    budget = unmeasured_budget(config.cache, device, num_ranks)
    if budget is None:
        return limits.max_model_len
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # only an engine should warn; here the number is part of the table
        plan = plan_caches(
            spec,
            dtype,
            limits,
            caches,
            budget,
            rows_chosen=config.scheduler.max_num_seqs is not None,
            length_chosen=config.model.max_model_len is not None,
        )
    return plan.max_model_len


def empty_model(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> HybridDecoder:
    """Return the model on the `meta` device; with several ranks, the part of the first rank."""
    parallel, ranks = config.parallel, {}
    if parallel.num_ranks > 1:
        name = "data_ranks" if parallel.data_parallel_size > 1 else "ranks"
        ranks = {name: Ranks(0, parallel.num_ranks, "none")}
    return describe_model(checkpoint, dtype, "meta", **ranks)[0]


def _sharing(caches: CacheOptions) -> CacheOptions:
    """Return the options with prefix caching on, to describe its hits."""
    if caches.share_prefixes:
        return caches
    return replace(caches, share_prefixes=True, states=replace(caches.states, mode=MambaCacheMode.ALL))


def _head(draft: str | Path, target: HybridDecoder, checkpoint: Checkpoint) -> DraftHead:
    shipped = checkpoint.path == shipped_model()
    return DraftHead.open(draft, target, checkpoint=checkpoint, shipped=shipped)


def _held(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    recorded = GraphOptions.of(config.graphs, device).mode is not CudaGraphMode.NONE
    model = empty_model(config, checkpoint, dtype)
    return packed_weight_bytes(model, device, checkpoint.dtype, recorded=recorded)


def _adapter_bytes(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    if not config.lora.enable_lora:
        return 0
    model, lora = empty_model(config, checkpoint, dtype), config.lora
    return AdapterPool(model, checkpoint.names, lora.max_loras, lora.max_lora_rank, max_num_tokens=1).num_bytes


def _head_facts(head: DraftHead) -> PartFacts:
    report, active = head.report, head.report.num_bytes
    if isinstance(head.head, MtpHead):
        active = sum(part.active_bytes for part in count_parts(head.head).values())
    return PartFacts(head.head.spec.num_layers, report.num_parameters, report.num_bytes, active)


def format_bytes(count: int) -> str:
    """Return a size as text in powers of 1000, for example `16.2 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000.0:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000.0
    return f"{size:.1f} TB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
