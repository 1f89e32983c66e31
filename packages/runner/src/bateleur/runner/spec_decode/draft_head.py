"""A draft head beside its target: loading it, its caches, and the speculator that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bateleur.cudagraph.backends import get_backend
from bateleur.eagle import DraftCache, DraftGraphs, EagleSpeculator, Rule
from bateleur.eagle.heads import Head, LoadReport, TargetInfo, load_head
from bateleur.metadata import AttentionBackend, KVGroup
from bateleur.runner.assets import shipped_draft
from bateleur.runner.cache.costs import DraftCosts
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.cache.tensors import kv_caches
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.model_runner.graph_dispatcher import default_capture_sizes
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.matrix import Projection


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A loaded head, and what its loader has to say."""

    head: Head
    report: LoadReport

    @classmethod
    def open(
        cls, path: str | Path, target: HybridDecoder, *, shipped: bool = False, pack: bool = False
    ) -> DraftHead:
        """Load a head for `target`, on its device and in its dtype, from a folder, or "auto" beside the shipped model.

        pack: see `Projection.pack`. Raises ValueError for "auto" unless the target is `shipped`, a folder that holds no
        head, one that does not fit, or a target without attention layers, whose blocks the head's keys and values would
        share.
        """
        if path == "auto":
            if not shipped:
                raise ValueError(
                    "draft is 'auto'; the shipped head fits the shipped model only, name a folder"
                )
            path = shipped_draft()
        spec = target.spec
        info = TargetInfo(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            embedding=target.embedding,
            lm_head=target.lm_head,
            output=target.output,
        )
        made: list[Projection] = []

        def project(weight: Tensor, bias: Tensor | None) -> Projection:
            made.append(Projection(weight, bias))
            return made[-1]

        head, report = load_head(path, info, dtype=target.dtype, device=target.device, project=project)
        for projection in made if pack else ():
            projection.pack()
        return cls(head, report)

    def costs(self, dtype: torch.dtype, rule: Rule) -> DraftCosts:
        """What the head keeps of running requests, with caches in `dtype`."""
        spec = self.head.spec
        return DraftCosts(
            token_bytes=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
            logits_bytes=0 if rule is Rule.COUPLED else spec.draft_vocab_size * torch.float32.itemsize,
        )

    def speculator(
        self,
        plan: CachePlan,
        groups: Sequence[KVGroup],
        backend: AttentionBackend,
        limits: EngineLimits,
        graphs: GraphOptions,
        target: HybridDecoder,
        rule: Rule,
    ) -> EagleSpeculator:
        """The drafter, with caches of its own in the blocks of the target's first group, and graphs in a pool apart."""
        spec = self.head.spec
        heads = [(spec.num_kv_heads, spec.head_dim)] * spec.num_layers
        cache = DraftCache(kv_caches(plan, heads, target.dtype, target.device), groups)
        own, drafts = get_backend(graphs.backend, target.device), limits.num_speculative_tokens
        captures = DraftGraphs(own, _chain_sizes(graphs.capture_sizes, limits), checks=graphs.checks)
        return EagleSpeculator(self.head, cache, backend, limits.buffers, drafts, graphs=captures, rule=rule)


def _chain_sizes(capture_sizes: Sequence[int] | None, limits: EngineLimits) -> tuple[int, ...]:
    """Rows of the chain's graphs: those of the target's decode graphs of so many tokens, with drafts or without."""
    most = limits.max_num_seqs
    if capture_sizes is None:
        return tuple(sorted({*default_capture_sizes(most), most}))
    width = limits.max_query_len
    rows = {*capture_sizes} | {size // width for size in capture_sizes if size % width == 0}
    return tuple(sorted(size for size in rows if size <= most))
