"""A draft head for a target model: loading, KV caches, and the proposer that runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bateleur.cudagraph.backends import get_backend
from bateleur.eagle import DraftCache, DraftGraphs, EagleSpeculator, Rule
from bateleur.eagle.heads import Head, LoadReport, TargetInfo, load_head
from bateleur.eagle.heads.spec import shard_of
from bateleur.metadata import AttentionBackend, KVCacheGroup
from bateleur.runner.assets import shipped_draft
from bateleur.runner.cache.costs import DraftCosts
from bateleur.runner.cache.plan import CachePlan
from bateleur.runner.cache.tensors import kv_caches
from bateleur.runner.checkpoint.mtp import read_mtp
from bateleur.runner.checkpoint.open import Checkpoint
from bateleur.runner.checkpoint.quantized import Matrices, quantize_projections
from bateleur.runner.checkpoint.weights import check_weights, fill_weights
from bateleur.runner.config.engine_config import MTP
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.model_runner.graph_dispatcher import default_capture_sizes
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.attention import kv_scales_of
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.memory_report import weight_sizes
from bateleur.runner.models.sharding import WHOLE, shard_experts
from bateleur.runner.models.spec import AttentionLayer, ExpertsLayer, ModelSpec, parts_of
from bateleur.runner.spec_decode.mtp_head import DraftSync, MtpHead


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A loaded draft head, and the report of its loader."""

    head: Head
    report: LoadReport

    @classmethod
    def open(
        cls,
        path: str | Path,
        target: HybridDecoder,
        *,
        checkpoint: Checkpoint | None = None,
        shipped: bool = False,
        recorded: bool | None = None,
    ) -> Self:
        """Load a draft head for `target`, on its device and in its dtype.
        path: a folder, "mtp" for the head in the target's `checkpoint`, or "auto" for the head that is installed with
        the package's own model. shipped: whether the target is the package's own model. recorded: whether CUDA graphs
        will be captured, see `Projection.pack`; None packs no matrices. Raises ValueError for "auto" with another
        target, a folder or a checkpoint without a head, a head that does not fit, or a target without attention layers,
        whose blocks the head's keys and values would share.
        """
        if path == MTP:
            assert checkpoint is not None
            return cls._of_target(checkpoint, target, recorded)
        if path == "auto":
            if not shipped:
                raise ValueError("draft is 'auto'; the shipped head fits the shipped model only, name a folder")
            path = shipped_draft()
        spec = target.spec
        info = TargetInfo(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            embedding=target.embedding,
            lm_head=target.lm_head,
            output=target.output,
            shard=target.shard,
            embed=None if target.shard is None else target.embed,
        )
        made: list[Projection] = []

        def project(weight: Tensor, bias: Tensor | None) -> Projection:
            made.append(Projection(weight, bias))
            return made[-1]

        head, report = load_head(path, info, dtype=target.dtype, device=target.device, project=project)
        for projection in made if recorded is not None else ():
            projection.pack(recorded=bool(recorded))
        return cls(head, report)

    @classmethod
    def _of_target(cls, checkpoint: Checkpoint, target: HybridDecoder, recorded: bool | None) -> Self:
        """Load the MTP head in the target's files. On the device `meta` its weights are not loaded.
        recorded: see `open`.
        """
        module = read_mtp(checkpoint)
        spec, share, exchange = module.spec, WHOLE, target.exchange
        if exchange is not None and _ends_with_experts(spec):
            spec, share = shard_experts(spec, exchange.ranks)
        head = MtpHead(spec, target, None if share is WHOLE else exchange)
        blank = HybridDecoder(target.spec, dtype=target.dtype, device="meta")
        whole = MtpHead(module.spec, blank).weights()
        check_weights(checkpoint.path, "an MTP head of this target", whole, module.names, module.tensors)
        quantized: Matrices = {}
        if not checkpoint.dequantize:
            quantized = quantize_projections(head.matrices, module.names, module.tensors, share)
        weights = head.weights()
        if target.device.type != "meta":
            fill_weights(weights, module.names, module.tensors, share, quantized)
        sizes = weight_sizes(weights, head.matrices)
        if recorded is not None:
            head.pack(recorded=recorded)
        return cls(
            head,
            LoadReport(
                path=checkpoint.path,
                layout="target",
                kind=head.spec.kind,
                own=tuple(sorted(module.names)),
                shared=("embed_tokens", "lm_head"),
                unused=(),
                num_parameters=sum(each.numel for each in sizes.values()),
                num_bytes=sum(each.num_bytes for each in sizes.values()),
            ),
        )

    @property
    def sync(self) -> DraftSync | None:
        """Makes all data-parallel ranks run equally many draft passes; draft passes then run eagerly, on all ranks.
        None unless the head's experts are distributed over these ranks.
        """
        if isinstance(head := self.head, MtpHead) and head.exchange is not None:
            return DraftSync(head, head.exchange)
        return None

    def costs(self, dtype: torch.dtype, rule: Rule) -> DraftCosts:
        """Return the bytes that the head needs: keys and values in `dtype` per token, and stored logits per draft.
        rule: acceptance rule of the drafts; COUPLED stores no logits.
        """
        spec = self.head.spec
        shard = shard_of(self.head)
        width = spec.draft_vocab_size if shard is None else shard.widest  # equal on all ranks
        return DraftCosts(
            token_bytes=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
            logits_bytes=0 if rule is Rule.COUPLED else width * torch.float32.itemsize,
        )

    def speculator(
        self,
        plan: CachePlan,
        groups: Sequence[KVCacheGroup],
        backend: AttentionBackend,
        limits: EngineLimits,
        graphs: GraphOptions,
        target: HybridDecoder,
        rule: Rule,
    ) -> EagleSpeculator:
        """Create the EAGLE proposer, with CUDA graphs in their own memory pool.
        Its KV caches use the block tables of the target's first KV cache group. rule: acceptance rule of the drafts.
        """
        spec = self.head.spec
        heads = [(spec.num_kv_heads, spec.head_dim)] * spec.num_layers
        scales: tuple[Tensor | None, ...] = ()
        if isinstance(self.head, MtpHead) and plan.costs.kv_dtype == torch.float8_e4m3fn:
            scales = tuple(kv_scales_of(layer, target.device) for layer in self.head.module.attention)
        cache = DraftCache(kv_caches(plan, heads, target.device), groups, dtype=target.dtype, kv_scales=scales)
        own, drafts = get_backend(graphs.backend, target.device), limits.num_speculative_tokens
        if isinstance(self.head, MtpHead):
            self.head.reserve_positions(limits.max_model_len)
        captures = None
        if self.sync is None:
            captures = DraftGraphs(own, _chain_sizes(graphs.capture_sizes, limits), checks=graphs.checks)
        return EagleSpeculator(self.head, cache, backend, limits.buffers, drafts, graphs=captures, rule=rule)


def _ends_with_experts(spec: ModelSpec) -> bool:
    """Return whether the head has experts, and no attention after them. Then they process only the tokens from which a
    draft is predicted.
    """
    kinds = [{type(shard) for shard in parts_of(layer)} for layer in spec.layers]
    last = max(index for index, each in enumerate(kinds) if AttentionLayer in each)
    found = [index for index, each in enumerate(kinds) if ExpertsLayer in each]
    return bool(found) and min(found) > last


def _chain_sizes(capture_sizes: Sequence[int] | None, limits: EngineLimits) -> tuple[int, ...]:
    """Return batch sizes of graphs for draft passes with one token per request: those of the target's decode graphs.
    capture_sizes: numbers of tokens of the target's graphs; None for default batch sizes up to `max_num_seqs`.
    """
    most = limits.max_num_seqs
    if capture_sizes is None:
        return tuple(sorted({*default_capture_sizes(most), most}))
    width = limits.max_query_len
    rows = {*capture_sizes} | {size // width for size in capture_sizes if size % width == 0}
    return tuple(sorted(size for size in rows if size <= most))
