"""Engines of published sizes with random weights, made on the device.

The checkpoint has the published `config.json`; its file of weights is a hole that is not read.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from performance.published import MODELS, NARROW
from torch import Tensor

from bateleur.runner import LLM
from bateleur.runner.checkpoint import open as opening
from bateleur.runner.models import HybridDecoder
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.spec_decode import draft_head
from blank_checkpoint import write_blank

from .job import Job

QUICK_LAYERS = {"Llama-3.1-8B": 2, "Nemotron-3-Nano-30B-A3B": 7, "Qwen3.5-9B": 4}
"""The fewest layers that have one of each kind."""
MTP = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
"""Fields of a Qwen3.5 with an MTP head."""


def fields_of(name: str, layers: int, narrow: bool) -> dict[str, Any]:
    """Return the `config.json` of a published model, cut to its first layers, and to small ones if `narrow`."""
    fields = dict(MODELS[name])
    if "layers_block_type" in fields:
        fields["layers_block_type"] = fields["layers_block_type"][:layers]
    else:
        fields["num_hidden_layers"] = layers
    if narrow:
        fields |= NARROW[fields["model_type"]] | {"vocab_size": 512}
    return fields


def layers_of(job: Job, name: str, layers: int | None = None) -> int:
    """Return how many layers an engine gets: all, or the first `layers`; in a quick job the fewest with all kinds."""
    if job.quick:
        return QUICK_LAYERS[name]
    whole = MODELS[name]
    return layers or whole.get("num_hidden_layers") or len(whole["layers_block_type"])


@contextmanager
def engine(job: Job, name: str, layers: int | None = None, *, mtp: bool = False, **options: Any) -> Iterator[LLM]:
    """Open an engine of a published model with random weights, and close it at the end.

    layers: see `layers_of`; in a quick job they are small. mtp: give the checkpoint an MTP head, for `draft="mtp"`.
    options: of `LLM`.
    """
    gc.collect()  # an engine that was open before
    if job.cuda:
        torch.cuda.empty_cache()
    fields = fields_of(name, layers_of(job, name, layers), job.quick) | (MTP if mtp else {})
    options = {"device": job.device, "skip_tokenizer_init": True} | options
    if job.quick:
        options |= {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 512}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(opening, "fill_weights", _random),
        patch.object(draft_head, "fill_weights", _random),
    ):
        llm = LLM(write_blank(Path(folder), fields, torch.bfloat16, mtp=mtp), **options)
    try:
        yield llm
    finally:
        llm.close()


def described(llm: LLM) -> HybridDecoder:
    """Return the engine's model without memory, for counts of bytes and operations."""
    spec: ModelSpec = llm.spec
    return HybridDecoder(spec, dtype=llm.dtype, device="meta")


def check_captures(job: Job, name: str, llm: LLM) -> dict[str, Any]:
    """Record whether every planned graph was captured, and return what captures took: graphs, seconds, gigabytes."""
    managers = {"forward": llm.engine.runner.graphs.manager, "end": llm.engine.runner.ends.manager}
    facts: dict[str, Any] = {}
    for part, manager in managers.items():
        if manager is not None:
            report = manager.report
            failed = [f"{note.key}: {note.reason}" for note in report.failures]
            why = f"{len(failed)} of {report.num_planned} captures failed; the first: {' '.join(failed[:1])}"
            job.record.check(f"{name}: captures, {part}", not failed, why)
            graphs = sum(row.num_graphs for row in report.captured)
            facts[part] = {"graphs": graphs, "s": round(report.seconds, 2), "GB": report.nbytes / 1e9}
    return facts


def _random(weights: Mapping[str, Tensor], *_: object) -> None:
    """Stand in for `fill_weights`: numbers of a size that keeps activations near 1 through all layers."""
    torch.manual_seed(0)
    for name, weight in weights.items():
        kind = name.rpartition(".")[2]
        if kind == "A":
            weight.uniform_(-1.0, -0.05)
        elif kind in ("dt_bias", "correction", "D"):
            weight.uniform_(-0.5, 0.5)
        elif "norm" in kind:
            weight.fill_(1.0)
        elif weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        else:
            weight.normal_(0, 0.02)
