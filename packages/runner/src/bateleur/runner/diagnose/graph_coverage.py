"""What would run on which graph, for a checkpoint and limits: nothing is loaded, nothing is captured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bateleur.cudagraph import Ask, CapturePlan, Coverage
from bateleur.mamba import MambaMetadataBuilder
from bateleur.metadata import GraphSupport, get_backend
from bateleur.runner.checkpoint import open_checkpoint, resolve_dtype
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.graph_options import GraphOptions
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.device import resolve_device
from bateleur.runner.model_runner.graph_dispatcher import make_plan
from bateleur.runner.models.spec import MambaLayer, ModelSpec


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A plan and what it covers."""

    plan: CapturePlan
    reason: str | None
    """Why the mode is not the one asked for."""
    decode: Coverage
    """Steps of 1, 2, ... decoding requests."""
    prompts: Coverage
    """Steps of one prompt row with 1, 2, ... tokens; its spans count tokens."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.plan.mode.name,
            "reason": self.reason,
            "keys": [str(key) for key in self.plan.keys],
            **{
                name: {
                    "spans": [
                        {
                            "first": span.first,
                            "last": span.last,
                            "graph": None if span.descriptor is None else str(span.descriptor),
                            "why": str(span.why),
                        }
                        for span in coverage.spans
                    ],
                    "mean_padding": coverage.mean_waste,
                    "worst_padding": coverage.worst_waste,
                }
                for name, coverage in (("decode", self.decode), ("prompts", self.prompts))
            },
        }

    def table(self) -> str:
        """The same as lines of text for a terminal."""
        lines = [f"mode {self.plan.mode.name}, {len(self.plan.keys)} graphs"]
        if self.reason is not None:
            lines.append(f"not the mode asked for: {self.reason}")
        lines += ["", "decoding requests", self.decode.table(), "", f"{'tokens of a prompt':>20}  runs on"]
        for span in self.prompts.spans:
            size = str(span.first) if span.first == span.last else f"{span.first}-{span.last}"
            lines.append(f"{size:>20}  {span.why if span.descriptor is None else span.descriptor}")
        return "\n".join(lines)


def describe_graphs(path: str | Path, **options: Any) -> GraphFacts:
    """The graphs that `LLM` would capture with the same arguments. Raises ValueError as it would."""
    config = EngineConfig.of(model=path, **options)
    where = resolve_device(config.model.device)
    graphs = GraphOptions.of(config.graphs, where)
    checkpoint = open_checkpoint(path)
    limits = EngineLimits.of(config, checkpoint.spec, where)
    support = _graph_support(checkpoint.spec, resolve_dtype("auto", checkpoint, where), where)
    plan, reason = make_plan(graphs.mode, graphs.capture_sizes, limits.buffers, support)
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    prompts = [plan.decide(Ask(1, n, n, n, decode_only=False)) for n in range(1, longest + 1)]
    return GraphFacts(plan, reason, plan.coverage(limits.max_num_seqs, 1), Coverage.of(1, prompts))


def _graph_support(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> GraphSupport:
    """What the builders of the model's layers would support on this device."""
    attention = get_backend("auto", device=device, dtype=dtype, head_dim=spec.widest_head).builder()
    hybrid = any(isinstance(layer, MambaLayer) for layer in spec.layers)
    return min(attention.graph_support, MambaMetadataBuilder.supports(0) if hybrid else GraphSupport.ALWAYS)
