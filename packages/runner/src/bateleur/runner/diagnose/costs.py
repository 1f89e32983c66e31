"""What a checkpoint is and what it costs to run, from its configuration and the headers of its weights alone.

A draft head is read whole, tensor by tensor, to be told from what it shares with the target.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bateleur.cudagraph import CudaGraphMode
from bateleur.eagle import Rule
from bateleur.mamba import MambaCacheMode
from bateleur.runner.assets import shipped_model
from bateleur.runner.cache.costs import CacheCosts, CacheOptions
from bateleur.runner.cache.plan import plan_caches
from bateleur.runner.cache.workspace import workspace_bytes
from bateleur.runner.checkpoint.open import Checkpoint, open_checkpoint, resolve_dtype
from bateleur.runner.config.attention_backend import told as attends
from bateleur.runner.config.engine_config import MTP, NGRAM, EngineConfig, ParallelConfig
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.prompt_scan import told
from bateleur.runner.distributed.ranks import Ranks
from bateleur.runner.engine.setup import unmeasured_budget
from bateleur.runner.model_runner.step_graphs import largest_capture
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.experts import ROUTED
from bateleur.runner.models.memory_report import held_bytes
from bateleur.runner.models.native import describe_kernels
from bateleur.runner.models.sharding import num_sums, sum_bytes
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    LatentLayer,
    MambaLayer,
    MlpLayer,
    ModelSpec,
    ShortConvLayer,
    parts_of,
)
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.spec_decode.mtp_head import MtpHead
from bateleur.runner.spec_decode.prompt_lookup import lookup_costs
from bateleur.runner.utils.arguments import member_of
from bateleur.runner.utils.device import resolve_device

KINDS = {
    MambaLayer: "mamba",
    DeltaLayer: "delta",
    ShortConvLayer: "short conv",
    AttentionLayer: "attention",
    LatentLayer: "attention",
    MlpLayer: "mlp",
    ExpertsLayer: "experts",
}
EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class PartFacts:
    """All layers of one kind together; `embeddings` holds the final norm and the output projection as well."""

    layers: int
    parameters: int
    weight_bytes: int
    active_bytes: int
    """Of these weights, what one token is multiplied with: all, or of experts those that it goes to."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint in numbers. Sizes are bytes; those of weights and KV cache are for computing in `dtype`. Of several
    ranks, numbers of layers, parameters and bytes are those of the first."""

    path: str
    architecture: str
    stored_dtype: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    ranks: int
    sums: int
    """Of a step, over tensor-parallel ranks; 0 for one."""
    sum_bytes_per_token: int
    """That a token has in all of these."""
    parts: dict[str, PartFacts]
    """By kind: `mamba`, `attention`, `mlp`, `experts` and `draft head` (where there are any) and `embeddings`."""
    parameters: int
    weight_bytes: int
    held_bytes: int
    """Memory that the target's weights take on this device, in the layouts that products read."""
    active_bytes: int
    """Of the weights, what one token is multiplied with; less than all where there are experts."""
    kv_bytes_per_token: int
    """Keys and values of one token over all attention layers, those of a draft head included."""
    mamba_state_bytes_per_request: int
    """Pages, ring and live window that a running request holds at most, over all recurrent layers, at any length."""
    mamba_pages_per_request: int
    mamba_ring_bytes: int
    mamba_window_bytes: int
    mamba_page_bytes: int
    """One state with the window in front of it: what is kept for others at a block boundary."""
    mamba_state_bytes: int
    """Of a page, the state alone."""
    draft_logits_bytes_per_request: int
    """Logits of drafts that wait for their test, under a rule that looks at them."""
    draft_tokens_bytes_per_request: int
    """A request's own tokens, on the device, for prompt lookup."""
    workspace_bytes: int
    """Approximate upper bound of the memory that steps and graphs need in addition to weights and caches: activations,
    logits, tables of blocks and pages. On a GPU the start of an engine measures it."""
    hit_granularity: int
    """With prefix caching, hits are multiples of this many tokens."""
    kept_states: int
    """With prefix caching, Mamba states that others may find of a request of `max_model_len` tokens."""
    max_model_len: int
    """Tokens of the longest request that an engine with these options accepts, prompt and output together. On a GPU
    without `kv_cache_memory_bytes` it does not consider the KV cache, whose size the start of an engine measures."""
    prompt_scan: str | None
    """What scans the prompts of delta rules, and why nothing else does; None without any."""
    attention: str | None
    """Which backend attends, and why none before it; None without attention layers."""
    cpu_kernels: str | None
    """Whose kernels run on a CPU, and why no others; None elsewhere."""
    unused_tensors: int
    """Tensors in the files that the model does not need."""

    def table(self) -> str:
        """The facts as lines of text for a terminal."""
        tied = "tied" if self.tied_embeddings else "separate"
        experts = self.active_bytes < self.weight_bytes

        def row(kind: str, layers: str, parameters: int, weights: int, active: int) -> str:
            last = f"{format_bytes(active):>12}" if experts else ""
            return f"{kind:<12}{layers:>8}{parameters:>18,}{format_bytes(weights):>12}{last}"

        lines = [
            f"{self.architecture}  {self.path}",
            f"{self.vocab_size:,} tokens of vocabulary, hidden size {self.hidden_size:,}, "
            f"up to {self.max_position_embeddings:,} tokens a request",
            f"stored as {self.stored_dtype}, counted as {self.dtype}, {tied} output embedding",
            *([f"what the first of {self.ranks} ranks has"] if self.ranks > 1 else []),
            "",
            f"{'':<12}{'layers':>8}{'parameters':>18}{'weights':>12}"
            + (f"{'active':>12}" if experts else ""),
        ]
        for kind, part in self.parts.items():
            layers = "" if kind == EMBEDDINGS else f"{part.layers:,}"
            lines.append(row(kind, layers, part.parameters, part.weight_bytes, part.active_bytes))
        layers = f"{sum(part.layers for part in self.parts.values()):,}"
        lines += [
            row("total", layers, self.parameters, self.weight_bytes, self.active_bytes),
            "",
            f"weights                    {self.weight_bytes:>16,} bytes",
            f"  the model's in memory    {self.held_bytes:>16,} bytes, as laid out here",
            *([f"weights a token takes      {self.active_bytes:>16,} bytes"] if experts else []),
            f"KV cache per token         {self.kv_bytes_per_token:>16,} bytes",
            *self._states(),
            f"longest request            {self.max_model_len:>16,} tokens, prompt and output",
            f"beside all that, about     {self.workspace_bytes:>16,} bytes at most, of steps and graphs",
            f"prefix hits in steps of    {self.hit_granularity:>16,} tokens",
        ]
        if self.sums:
            lines.append(
                f"sums over ranks a step     {self.sums:>16,}, of {self.sum_bytes_per_token:,} bytes a token"
            )
        if self.draft_logits_bytes_per_request:
            lines.append(f"logits of drafts a request  {self.draft_logits_bytes_per_request:>15,} bytes")
        if self.draft_tokens_bytes_per_request:
            lines.append(f"tokens for lookup a request{self.draft_tokens_bytes_per_request:>16,} bytes")
        if self.mamba_page_bytes:
            kept = f"{self.kept_states:,} of {self.max_model_len:,} tokens"
            lines.append(f"a page, kept for hits      {self.mamba_page_bytes:>16,} bytes, {kept}")
        if self.prompt_scan:
            lines.append(f"prompts of delta rules     {self.prompt_scan}")
        if self.attention:
            lines.append(f"attention                  {self.attention}")
        if self.cpu_kernels:
            lines.append(f"kernels on this CPU        {self.cpu_kernels}")
        if self.unused_tensors:
            lines.append(f"{self.unused_tensors} tensors in the files are known and not used")
        return "\n".join(lines)

    def _states(self) -> list[str]:
        count, page, state = self.mamba_pages_per_request, self.mamba_page_bytes, self.mamba_state_bytes
        lines = [f"states of a request        {self.mamba_state_bytes_per_request:>16,} bytes"]
        if page:
            lines.append(f"  pages                    {count * page:>16,} bytes, {count:,} of {page:,}")
            lines.append(f"    a page's state         {state:>16,} bytes, before it a window")
        if self.mamba_window_bytes:
            lines.append(f"  ring                     {self.mamba_ring_bytes:>16,} bytes")
            lines.append(f"  live window              {self.mamba_window_bytes:>16,} bytes")
        return lines


def describe(path: str | Path, **options: Any) -> CheckpointFacts:
    """Read what a checkpoint folder is and costs with these options of `LLM`; none of its weights are loaded.

    With dtype "auto", weights and KV cache are counted in the stored dtype. Raises ValueError as `LLM` does.
    """
    config = EngineConfig.of(model=path, **options)
    device, chosen = resolve_device(config.model.device), config.speculative
    checkpoint = open_checkpoint(path, config.model.hf_overrides)
    computed = resolve_dtype(config.model.dtype, checkpoint, device)
    counted = checkpoint.dtype if config.model.dtype == "auto" else computed
    limits = EngineLimits.of(config, checkpoint.spec, device)
    caches = CacheOptions.of(config, checkpoint.spec, device)
    target, longest = empty_model(config, checkpoint, counted), limits.max_model_len
    graph_tokens = largest_capture(GraphOptions.of(config.graphs, device), limits)
    spec, parts, own = target.spec, count_parts(target), 0
    if chosen.draft == NGRAM:
        caches = replace(caches, draft=lookup_costs(longest))
    elif chosen.draft is not None:
        head = _head(chosen.draft, target, checkpoint)
        parts["draft head"] = _head_facts(head)
        caches = replace(caches, draft=head.costs(counted, member_of(Rule, chosen.speculative_rule)))
        own = len(head.report.own) if chosen.draft == MTP else 0
    costs, hits = (CacheCosts.of(spec, counted, longest, each) for each in (caches, _sharing(caches)))
    return CheckpointFacts(
        path=str(path),
        architecture=spec.architecture,
        stored_dtype=_name(checkpoint.dtype),
        dtype=_name(counted),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_position_embeddings=spec.max_position_embeddings,
        tied_embeddings=spec.tie_word_embeddings,
        ranks=config.parallel.num_ranks,
        parts=parts,
        sums=0 if target.ranks.alone else num_sums(spec),
        sum_bytes_per_token=0 if target.ranks.alone else sum_bytes(spec, counted.itemsize),
        parameters=sum(part.parameters for part in parts.values()),
        weight_bytes=sum(part.weight_bytes for part in parts.values()),
        held_bytes=_held(config, checkpoint, computed, device),
        active_bytes=sum(part.active_bytes for part in parts.values()),
        kv_bytes_per_token=costs.token_bytes,
        mamba_state_bytes_per_request=costs.state_bytes_per_request,
        mamba_pages_per_request=costs.pages_per_request,
        mamba_ring_bytes=costs.ring_bytes,
        mamba_window_bytes=costs.window_bytes,
        mamba_page_bytes=costs.page_bytes,
        mamba_state_bytes=costs.state_bytes,
        draft_logits_bytes_per_request=costs.logits_bytes_per_request,
        draft_tokens_bytes_per_request=caches.draft.row_bytes,
        workspace_bytes=workspace_bytes(target, limits, caches.block_size, graph_tokens),
        hit_granularity=caches.block_size if hits.layout is None else hits.layout.block_size,
        kept_states=hits.pages_to_share,
        max_model_len=_fitting_length(config, spec, counted, limits, caches),
        prompt_scan=told(config.model.prompt_scan, spec, counted, device),
        attention=attends(config.model.attention_backend, spec, computed, device),
        cpu_kernels=describe_kernels(device),
        unused_tensors=len(checkpoint.unused) - own,
    )


def _fitting_length(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, limits: EngineLimits, caches: CacheOptions
) -> int:
    """`max_model_len` as the start of an engine lowers it. Raises ValueError as `plan_caches`."""
    device, num_ranks = resolve_device(config.model.device), config.parallel.num_ranks
    budget = unmeasured_budget(config.cache, device, num_ranks)
    if budget is None:
        return limits.max_model_len
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine itself warns; here the number is part of the table
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
    """The model without memory, or what the first rank has of it."""
    return HybridDecoder(checkpoint.spec, dtype=dtype, device="meta", **_first_of(config.parallel))


def _sharing(caches: CacheOptions) -> CacheOptions:
    """What hits would be like is told where nothing is shared, too."""
    if caches.share_prefixes:
        return caches
    return replace(caches, share_prefixes=True, states=replace(caches.states, mode=MambaCacheMode.ALL))


def _first_of(config: ParallelConfig) -> dict[str, Ranks]:
    size = config.num_ranks
    if size == 1:
        return {}
    return {"data_ranks" if config.data_parallel_size > 1 else "ranks": Ranks(0, size, "none")}


def _head(draft: str | Path, target: HybridDecoder, checkpoint: Checkpoint) -> DraftHead:
    shipped = checkpoint.path == shipped_model()
    return DraftHead.open(draft, target, checkpoint=checkpoint, shipped=shipped)


def _held(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    recorded = GraphOptions.of(config.graphs, device).mode is not CudaGraphMode.NONE
    model = empty_model(config, checkpoint, dtype)
    return held_bytes(model, device, checkpoint.dtype, recorded=recorded)


def count_parts(model: HybridDecoder | MtpHead) -> dict[str, PartFacts]:
    """Layers, parameters and bytes of weights by kind."""
    spec = model.module if isinstance(model, MtpHead) else model.spec
    layers = [parts_of(layer) for layer in spec.layers]
    counts = Counter(KINDS[type(part)] for parts in layers for part in parts)
    found = {kind: [count, 0, 0, 0] for kind, count in counts.items()} | {EMBEDDINGS: [0, 0, 0, 0]}
    for name, weight in model.weights().items():
        kind, active = EMBEDDINGS, weight.nbytes
        where = name.split(".")  # a norm that several mixers read counts with the first
        if where[0] == "layers":
            layer = layers[int(where[1])][int(where[2]) if where[2].isdecimal() else 0]
            kind = KINDS[type(layer)]
            if isinstance(layer, ExpertsLayer) and where[-1] in ROUTED:
                active = active // layer.num_experts * layer.top_k
        part = found[kind]
        part[1] += weight.numel()
        part[2] += weight.nbytes
        part[3] += active
    return {kind: PartFacts(*part) for kind, part in found.items()}


def _head_facts(head: DraftHead) -> PartFacts:
    """A draft head as one part; of its experts, if it has any, those that a token goes to are active."""
    report, active = head.report, head.report.num_bytes
    if isinstance(head.head, MtpHead):
        active = sum(part.active_bytes for part in count_parts(head.head).values())
    return PartFacts(head.head.spec.num_layers, report.num_parameters, report.num_bytes, active)


def format_bytes(count: int) -> str:
    """A size for people, in powers of 1000: `16.2 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000.0:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000.0
    return f"{size:.1f} TB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
