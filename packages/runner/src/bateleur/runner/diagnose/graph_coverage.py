"""Reports which batches run in which CUDA graph, for a checkpoint and options. No weights are loaded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bateleur.cudagraph import BatchExecutionDescriptor, Coverage, CudagraphDispatcher, CudaGraphMode, UnpaddedBatch
from bateleur.eagle import Rule
from bateleur.eagle.passes import refreshes_in_graph
from bateleur.mamba import MambaMetadataBuilder
from bateleur.runner.cache.costs import graph_bytes
from bateleur.runner.checkpoint.open import open_checkpoint, resolve_dtype
from bateleur.runner.config.engine_config import NGRAM, EngineConfig
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.config.resolve import choose_backend, choose_kv_cache_dtype
from bateleur.runner.diagnose.checkpoint_facts import empty_model
from bateleur.runner.engine.setup import policy_of
from bateleur.runner.model_runner.graph_dispatcher import gaps_of_drafts, make_dispatcher, query_lens_of
from bateleur.runner.sampling.rejection_sampler import KINDS
from bateleur.runner.sampling.step_end import variant_keys
from bateleur.runner.utils.device import resolve_device


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The CUDA graphs of an engine (forward pass, sampling, draft proposal), and the batches that run in them.

    notes: remarks for the user. decode: coverage of 1, 2, ... decoding requests: one entry without drafts, and one for
    each number of drafts per request that graphs are planned for. prompts: coverage of one prefill with 1, 2, ...
    tokens; its ranges count tokens. ends: graphs that sample or verify after a decode step. proposals: graphs in which
    a draft head proposes after a decode step. nbytes: approximate bytes of memory that all graphs share, without the
    memory that the driver keeps for each.
    """

    plan: CudagraphDispatcher
    notes: tuple[str, ...]
    decode: tuple[Coverage, ...]
    prompts: Coverage
    ends: tuple[BatchExecutionDescriptor, ...]
    proposals: tuple[BatchExecutionDescriptor, ...]
    nbytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as JSON values."""
        return {
            "mode": self.plan.mode.name,
            "notes": list(self.notes),
            "keys": [str(key) for key in self.plan.keys],
            "ends": [str(key) for key in self.ends],
            "proposals": [str(key) for key in self.proposals],
            "bytes": self.nbytes,
            "decode": [_as_dict(coverage) for coverage in self.decode],
            "prompts": _as_dict(self.prompts),
        }

    def table(self) -> str:
        """Return the facts as a table for a terminal."""
        lines = [f"mode {self.plan.mode.name}, {len(self.plan.keys)} graphs", *self.notes]
        if self.ends:
            proposals = f", {len(self.proposals)} that propose drafts" if self.proposals else ""
            lines.append(f"after decode graphs: {len(self.ends)} graphs that sample or verify{proposals}")
        if self.nbytes:
            lines.append(f"all graphs share about {self.nbytes:,} bytes; the driver keeps more for each")
        for coverage in self.decode:
            drafts = f", with {coverage.query_len - 1} drafts each" if coverage.query_len > 1 else ""
            lines += ["", f"decoding requests{drafts}", coverage.table()]
        lines += ["", f"{'tokens of a prompt':>20}  runs on"]
        for span in self.prompts.ranges:
            size = str(span.first) if span.first == span.last else f"{span.first}-{span.last}"
            lines.append(f"{size:>20}  {span.reason if span.descriptor is None else span.descriptor}")
        return "\n".join(lines)


def describe_graphs(path: str | Path, **options: Any) -> GraphFacts:
    """Describe the graphs that `LLM` captures with these options. Raises ValueError as `LLM` does."""
    config = EngineConfig.of(model=path, **options)
    where, notes = resolve_device(config.model.device), []
    graphs = GraphOptions.of(config.graphs, where)
    checkpoint = open_checkpoint(path, config.model.hf_overrides, dequantize=config.model.dequantizes)
    spec, dtype = checkpoint.spec, resolve_dtype(config.model.dtype, checkpoint, where)
    limits = EngineLimits.of(config, spec, where)
    if config.graphs.cudagraph_mode is None and graphs.mode is CudaGraphMode.NONE:
        graphs = replace(graphs, mode=CudaGraphMode.FULL_DECODE_ONLY)
        limits = EngineLimits.of(config, spec, torch.device("cuda"))
        notes.append(f"for a CUDA device: on {where} all steps run eagerly unless cudagraph_mode is given")
    drafts = limits.num_speculative_tokens
    kv_dtype = choose_kv_cache_dtype(str(config.cache.kv_cache_dtype), spec)
    backend = choose_backend(config.model.attention_backend, where, dtype, spec, kv_dtype)
    support = backend.builder().graph_support
    if spec.recurrent:
        support = min(support, MambaMetadataBuilder.supports(drafts))
    query_lens = query_lens_of(policy_of(config.speculative, Rule.COUPLED), drafts)
    plan, reason = make_dispatcher(graphs, limits.buffers, support, query_lens)
    gaps = gaps_of_drafts(plan, limits.max_num_seqs, max(query_lens))
    notes += [note for note in (reason, gaps) if note is not None]
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    prompts = [plan.dispatch(UnpaddedBatch(1, n, n, n, decode_only=False)) for n in range(1, longest + 1)]
    decode = tuple(plan.coverage(limits.max_num_seqs, length) for length in query_lens)
    largest = max((key.num_tokens for key in plan.keys), default=0)
    shared = graph_bytes(empty_model(config, checkpoint, dtype), limits, largest)
    proposals: tuple[BatchExecutionDescriptor, ...] = ()
    if config.speculative.draft not in (None, NGRAM) and refreshes_in_graph(backend.builder()):
        proposals = variant_keys(plan.keys, [length - 1 for length in reversed(query_lens)])
    covered, ends = Coverage.of(1, prompts), variant_keys(plan.keys, KINDS)
    return GraphFacts(plan, tuple(notes), decode, covered, ends, proposals, shared)


def _as_dict(coverage: Coverage) -> dict[str, Any]:
    spans = []
    for span in coverage.ranges:
        graph = None if span.descriptor is None else str(span.descriptor)
        spans.append({"first": span.first, "last": span.last, "graph": graph, "why": str(span.reason)})
    sizes = {name: getattr(coverage, name) for name in ("mean_padding", "worst_padding")}
    return {"query_len": coverage.query_len, "spans": spans, **sizes}
