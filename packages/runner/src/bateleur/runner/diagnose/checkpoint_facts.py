"""Parameters and memory of a checkpoint, from its config and the headers of its weight files."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

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


def describe_checkpoint(path: str | Path, **options: Any) -> dict[str, Any]:
    """Return parameters and memory of a checkpoint folder for an engine with these options of `LLM`, as JSON values.

    The target's weights are not loaded. With several ranks, sizes are those of the first rank. With dtype "auto", sizes
    of weights and KV cache are for the stored dtype. `max_model_len` is the maximum of prompt and output tokens; on a
    GPU without `kv_cache_memory_bytes` it leaves out the limit by the KV cache, which an engine measures at start.
    Raises ValueError as `LLM` does.
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
        shipped, rule = checkpoint.path == shipped_model(), member_of(Rule, chosen.speculative_rule)
        head = DraftHead.open(chosen.draft, target, checkpoint=checkpoint, shipped=shipped)
        parts["draft head"] = _head_facts(head)
        caches = replace(caches, draft=head.costs(caches.kv_dtype or counted, rule))
        own = len(head.report.own) if chosen.draft == MTP else 0
    sharing = caches
    if not caches.share_prefixes:  # to describe hits
        sharing = replace(caches, share_prefixes=True, states=replace(caches.states, mode=MambaCacheMode.ALL))
    costs, hits = (CacheCosts.of(spec, counted, longest, each) for each in (caches, sharing))
    return {
        "path": str(path),
        "dtype": _name(counted),
        "kv_cache_dtype": _name(costs.kv_dtype),
        "ranks": config.parallel.num_ranks,
        # all-reduces of a step over tensor-parallel ranks, and their bytes per token; 0 for one rank
        "sums": 0 if target.ranks.alone else num_sums(spec),
        "sum_bytes_per_token": 0 if target.ranks.alone else sum_bytes(spec, counted.itemsize),
        **_weights(parts),
        # memory of the target's weights, in the layouts of this device's matrix products
        "held_bytes": _held(config, checkpoint, computed, device),
        "adapter_bytes": _adapter_bytes(config, checkpoint, counted),  # slots of LoRA; 0 without `enable_lora`
        "kv_bytes_per_token": costs.token_bytes,  # over all attention layers, including a draft head's
        # upper bound for activations, logits and block tables; an engine on a GPU measures it at start
        "workspace_bytes": workspace_bytes(target, limits, caches.block_size, graph_tokens),
        # prefix cache hits are multiples of this many tokens
        "hit_granularity": caches.block_size if hits.layout is None else hits.layout.block_size,
        "max_model_len": _fitting_length(config, spec, counted, limits, caches),
        **_files(checkpoint, own),
        **_states(costs, hits),
        "draft_logits_bytes_per_request": costs.logits_bytes_per_request,  # 0 if the acceptance rule needs none
        "draft_tokens_bytes_per_request": caches.draft.row_bytes,  # for prompt lookup; 0 without
        # chosen kernels, and why not preferred ones; None without such layers
        "prompt_scan": describe_scan(config.model.prompt_scan, spec, counted, device),
        "attention": describe_backend(config.model.attention_backend, spec, computed, device, caches.kv_dtype),
        # bytes of quantised matrices by kind of layer, then by scheme and kernel; {} if all are plain
        "quantized": count_schemes(target, device, computed),
        "cpu_kernels": describe_kernels(device),  # None on other devices
    }


def _weights(parts: dict[str, PartFacts]) -> dict[str, Any]:
    """Return parameters and bytes of the weights, as totals and by kind of layer (`parts`)."""
    return {
        # by kind: `mamba`, `delta`, `short conv`, `attention`, `mlp`, `experts`, `draft head`, `embeddings`
        "parts": {kind: asdict(part) for kind, part in parts.items()},
        "parameters": sum(part.parameters for part in parts.values()),
        "weight_bytes": sum(part.weight_bytes for part in parts.values()),
        # of the weights that one token uses; less than all if there are experts
        "active_bytes": sum(part.active_bytes for part in parts.values()),
    }


def _files(checkpoint: Checkpoint, num_used: int) -> dict[str, Any]:
    """Return the checkpoint's architecture, dtype, sizes and number of unused tensors.

    num_used: number of tensors that only the draft head uses. `unused_tensors` is the number of tensors in the files
    that neither the model nor this head needs.
    """
    spec, unused = checkpoint.spec, len(checkpoint.unused) - num_used
    sizes = {name: getattr(spec, name) for name in ("vocab_size", "hidden_size", "max_position_embeddings")}
    facts = {"architecture": spec.architecture, "stored_dtype": _name(checkpoint.dtype), **sizes}
    return facts | {"tied_embeddings": spec.tie_word_embeddings, "unused_tensors": unused}


def _states(costs: CacheCosts, hits: CacheCosts) -> dict[str, int]:
    """Return sizes of recurrent states by name. A page has the state and conv window of every recurrent layer.

    costs: memory for the user's options. hits: the same with prefix caching on, for the number of kept states.
    """
    return {  # a page is a state and its convolution window; a ring has the inputs of a request's last tokens
        # most memory of a running request over all recurrent layers (pages, ring and window), at any length
        "mamba_state_bytes_per_request": costs.state_bytes_per_request,
        "mamba_pages_per_request": costs.pages_per_request,
        "mamba_ring_bytes": costs.ring_bytes,
        "mamba_window_bytes": costs.window_bytes,
        "mamba_page_bytes": costs.page_bytes,  # what prefix caching keeps at a block boundary
        "mamba_state_bytes": costs.state_bytes,  # of one page, without the window
        "kept_states": hits.pages_to_share,  # of a request of `max_model_len` tokens, by prefix caching
    }


def checkpoint_table(facts: dict[str, Any]) -> str:
    """Return the facts of `describe_checkpoint` as a table for a terminal."""
    experts, total_layers = facts["active_bytes"] < facts["weight_bytes"], 0
    lines = [
        f"{facts['architecture']}  {facts['path']}",
        f"{facts['vocab_size']:,} tokens of vocabulary, hidden size {facts['hidden_size']:,}, "
        f"up to {facts['max_position_embeddings']:,} tokens per request",
        f"stored as {facts['stored_dtype']}, sizes in {facts['dtype']}, "
        f"{'tied' if facts['tied_embeddings'] else 'separate'} output embedding",
        *([f"numbers of the first of {facts['ranks']} ranks"] if facts["ranks"] > 1 else []),
        "",
        f"{'':<12}{'layers':>8}{'parameters':>18}{'weights':>12}" + (f"{'active':>12}" if experts else ""),
    ]
    for kind, part in {**facts["parts"], "total": facts}.items():
        layers = "" if kind == EMBEDDINGS else f"{part.get('layers', total_layers):,}"
        total_layers += part.get("layers", 0)
        active = f"{format_bytes(part['active_bytes']):>12}" if experts else ""
        weights = format_bytes(part["weight_bytes"])
        lines.append(f"{kind:<12}{layers:>8}{part['parameters']:>18,}{weights:>12}{active}")
    lines.append("")
    lines += [f"{row.label:<27}{row.number:>16,}{row.more}" for row in _rows(facts, experts=experts) if row.shown]
    texts = [("delta-rule prompt scan", facts["prompt_scan"]), ("attention", facts["attention"])]
    for kind, schemes in facts["quantized"].items():
        texts += [(f"quantised {kind}", f"{format_bytes(size)}, {scheme}") for scheme, size in schemes.items()]
    lines += [f"{label:<27}{text}" for label, text in (*texts, ("CPU kernels", facts["cpu_kernels"])) if text]
    if facts["unused_tensors"]:
        lines.append(f"{facts['unused_tensors']} known tensors in the files are not used")
    return "\n".join(lines)


class _Row(NamedTuple):
    label: str
    number: int
    more: str  # text after the number
    shown: bool = True


def _rows(facts: dict[str, Any], *, experts: bool) -> list[_Row]:
    """Return the table's rows of sizes. experts: whether the model has experts, so that a token uses a part of them."""
    page, window, pages = facts["mamba_page_bytes"], facts["mamba_window_bytes"], facts["mamba_pages_per_request"]
    logits, lookup = facts["draft_logits_bytes_per_request"], facts["draft_tokens_bytes_per_request"]
    adapters, sums, longest = facts["adapter_bytes"], facts["sums"], facts["max_model_len"]
    has_pages, has_window = page > 0, window > 0
    return [
        _Row("weights", facts["weight_bytes"], " bytes"),
        _Row("  of the model, in memory", facts["held_bytes"], " bytes, in this device's layout"),
        _Row("LoRA adapters, all slots", adapters, " bytes", shown=adapters > 0),
        _Row("active weights per token", facts["active_bytes"], " bytes", shown=experts),
        _Row("KV cache per token", facts["kv_bytes_per_token"], f" bytes, as {facts['kv_cache_dtype']}"),
        _Row("states per request", facts["mamba_state_bytes_per_request"], " bytes"),
        _Row("  pages", pages * page, f" bytes, {pages:,} of {page:,}", shown=has_pages),
        _Row("    state of a page", facts["mamba_state_bytes"], " bytes, without its window", shown=has_pages),
        _Row("  ring", facts["mamba_ring_bytes"], " bytes", shown=has_window),
        _Row("  convolution window", window, " bytes", shown=has_window),
        _Row("longest request", longest, " tokens, prompt and output"),
        _Row("workspace, about", facts["workspace_bytes"], " bytes at most, for steps and graphs"),
        _Row("prefix hit granularity", facts["hit_granularity"], " tokens"),
        _Row("all-reduces per step", sums, f", of {facts['sum_bytes_per_token']:,} bytes per token", shown=sums > 0),
        _Row("draft logits per request", logits, " bytes", shown=logits > 0),
        _Row("lookup tokens per request", lookup, " bytes", shown=lookup > 0),
        _Row("cached state page", page, f" bytes, {facts['kept_states']:,} per {longest:,} tokens", shown=has_pages),
    ]


def _fitting_length(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, limits: EngineLimits, caches: CacheOptions
) -> int:
    """Return `max_model_len` as an engine lowers it when it starts. Raises ValueError as `plan_caches` does."""
    device, num_ranks = resolve_device(config.model.device), config.parallel.num_ranks
    budget = unmeasured_budget(config.cache, device, num_ranks)
    if budget is None:
        return limits.max_model_len
    with warnings.catch_warnings(action="ignore"):  # only an engine should warn; here the number is part of the table
        rows, length = config.scheduler.max_num_seqs is not None, config.model.max_model_len is not None
        return plan_caches(spec, dtype, limits, caches, budget, rows_chosen=rows, length_chosen=length).max_model_len


def empty_model(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> HybridDecoder:
    """Return the model on the `meta` device; with several ranks, the part of the first rank."""
    parallel, ranks = config.parallel, {}
    if parallel.num_ranks > 1:
        name = "data_ranks" if parallel.data_parallel_size > 1 else "ranks"
        ranks = {name: Ranks(0, parallel.num_ranks, "none")}
    return describe_model(checkpoint, dtype, "meta", **ranks)[0]


def _held(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    recorded = GraphOptions.of(config.graphs, device).mode is not CudaGraphMode.NONE
    return packed_weight_bytes(empty_model(config, checkpoint, dtype), device, checkpoint.dtype, recorded=recorded)


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
