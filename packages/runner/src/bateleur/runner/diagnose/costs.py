"""What a checkpoint is and what it costs to run, from its configuration and the headers of its weights alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bateleur.mamba import MambaCacheMode
from bateleur.runner.cache.costs import CacheCosts, CacheOptions
from bateleur.runner.checkpoint import open_checkpoint, resolve_dtype
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.device import resolve_device
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import AttentionLayer, MambaLayer, MlpLayer, ModelSpec

_KINDS = {MambaLayer: "mamba", AttentionLayer: "attention", MlpLayer: "mlp"}
_EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class PartFacts:
    """All layers of one kind together; `embeddings` holds the final norm and the output projection as well."""

    layers: int
    parameters: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint in numbers. Sizes are bytes; those of weights and KV cache are for computing in `dtype`."""

    path: str
    architecture: str
    stored_dtype: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tied_embeddings: bool
    parts: dict[str, PartFacts]
    """By kind: `mamba`, `attention`, `mlp` (where there are any) and `embeddings`."""
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Keys and values of one token over all attention layers."""
    mamba_state_bytes_per_request: int
    """Pages, rings and live windows that a running request holds at most, over all Mamba layers, however long it is."""
    mamba_page_bytes: int
    """One Mamba state: what is kept for others at a block boundary."""
    hit_granularity: int
    """With prefix caching, hits are multiples of this many tokens."""
    kept_states: int
    """With prefix caching, Mamba states that others may find of a request of `max_model_len` tokens."""
    max_model_len: int
    unused_tensors: int
    """Tensors in the files that the model does not need."""

    def table(self) -> str:
        """The facts as lines of text for a terminal."""
        tied = "tied" if self.tied_embeddings else "separate"
        lines = [
            f"{self.architecture}  {self.path}",
            f"{self.vocab_size:,} tokens of vocabulary, hidden size {self.hidden_size:,}, "
            f"up to {self.max_position_embeddings:,} tokens a request",
            f"stored as {self.stored_dtype}, counted as {self.dtype}, {tied} output embedding",
            "",
            f"{'':<12}{'layers':>8}{'parameters':>18}{'weights':>12}",
        ]
        for kind, part in self.parts.items():
            layers = "" if kind == _EMBEDDINGS else f"{part.layers:,}"
            lines.append(f"{kind:<12}{layers:>8}{part.parameters:>18,}{format_bytes(part.weight_bytes):>12}")
        layers = f"{sum(part.layers for part in self.parts.values()):,}"
        lines += [
            f"{'total':<12}{layers:>8}{self.parameters:>18,}{format_bytes(self.weight_bytes):>12}",
            "",
            f"weights                    {self.weight_bytes:>16,} bytes",
            f"KV cache per token         {self.kv_bytes_per_token:>16,} bytes",
            f"Mamba state per request    {self.mamba_state_bytes_per_request:>16,} bytes",
            f"prefix hits in steps of    {self.hit_granularity:>16,} tokens",
        ]
        if self.mamba_page_bytes:
            kept = f"{self.kept_states:,} of {self.max_model_len:,} tokens"
            lines.append(f"Mamba state kept for hits  {self.mamba_page_bytes:>16,} bytes, {kept}")
        if self.unused_tensors:
            lines.append(f"{self.unused_tensors} tensors in the files are known and not used")
        return "\n".join(lines)


def describe(path: str | Path, **options: Any) -> CheckpointFacts:
    """Read what a checkpoint folder is and costs with these options of `LLM`; no weights are loaded.

    With dtype "auto" weights and KV cache are counted in the dtype that the weights are stored in.

    Raises:
        ValueError: the folder is no supported checkpoint, or an option is one that `LLM` refuses.
    """
    config = EngineConfig.of(model=path, **options)
    dtype = config.model.dtype
    checkpoint = open_checkpoint(path)
    spec, device = checkpoint.spec, resolve_device(config.model.device)
    counted = checkpoint.dtype if dtype == "auto" else resolve_dtype(dtype, checkpoint, device)
    longest = EngineLimits.of(config, spec, device).max_model_len
    caches = CacheOptions.of(config, device)
    costs = hits = CacheCosts.of(spec, counted, longest, caches)
    if not caches.share_prefixes:  # what hits would be like is told all the same
        states = replace(caches.states, mode=MambaCacheMode.ALL)
        shared = replace(caches, share_prefixes=True, states=states)
        hits = CacheCosts.of(spec, counted, longest, shared)
    parts = count_parts(spec, counted)
    return CheckpointFacts(
        path=str(path),
        architecture=spec.architecture,
        stored_dtype=_name(checkpoint.dtype),
        dtype=_name(counted),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_position_embeddings=spec.max_position_embeddings,
        tied_embeddings=spec.tie_word_embeddings,
        parts=parts,
        parameters=sum(part.parameters for part in parts.values()),
        weight_bytes=sum(part.weight_bytes for part in parts.values()),
        kv_bytes_per_token=costs.token_bytes,
        mamba_state_bytes_per_request=costs.state_bytes_per_request,
        mamba_page_bytes=costs.page_bytes,
        hit_granularity=caches.block_size if hits.layout is None else hits.layout.block_size,
        kept_states=hits.pages_to_share,
        max_model_len=longest,
        unused_tensors=len(checkpoint.unused),
    )


def count_parts(spec: ModelSpec, dtype: torch.dtype) -> dict[str, PartFacts]:
    """Layers, parameters and bytes of weights by kind, as the decoder would hold them in `dtype`."""
    layers: dict[str, int] = {}
    for layer in spec.layers:
        kind = _KINDS[type(layer)]
        layers[kind] = layers.get(kind, 0) + 1
    layers[_EMBEDDINGS] = 0
    parameters = dict.fromkeys(layers, 0)
    weight_bytes = dict.fromkeys(layers, 0)
    for name, weight in HybridDecoder(spec, dtype=dtype, device="meta").weights().items():
        place = name.split(".")
        kind = _KINDS[type(spec.layers[int(place[1])])] if place[0] == "layers" else _EMBEDDINGS
        parameters[kind] += weight.numel()
        weight_bytes[kind] += weight.numel() * weight.element_size()
    return {kind: PartFacts(layers[kind], parameters[kind], weight_bytes[kind]) for kind in layers}


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
