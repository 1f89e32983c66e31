"""Comparison of the CUDA graphs of draft passes with eager runs."""

from __future__ import annotations

import torch
from torch import Tensor

from bateleur.cudagraph import VerifyReport
from bateleur.eagle import EagleSpeculator
from bateleur.eagle.passes import DraftState
from bateleur.metadata import movable
from bateleur.runner.model_runner.step_producer import bits_of


def written_by(drafter: EagleSpeculator, table: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a proposal may change besides its drafts. Waits for the device.

    table: block tables (R, columns) of the requests. The result has the keys and values in these blocks, a checksum of
    all other blocks, which must not change, and the logits of drafts.
    """
    found, blocks = {}, table.unique()
    for layer, caches in enumerate(drafter.kv):
        for name, whole in zip("kv", caches, strict=True):
            found[f"draft.{layer}.{name}"] = shard = movable(whole).index_select(0, blocks)
            found[f"draft.{layer}.{name} elsewhere"] = bits_of(whole) - bits_of(shard)
    if (logits := drafter.inputs.logits) is not None:
        found["draft logits"] = logits.lines[:-1]
    return found


def verify_passes(drafter: EagleSpeculator, fuzz: int) -> dict[str, VerifyReport]:
    """Check that replays of single draft passes equal eager runs on random steps; reports by name of the pass."""

    def also(state: DraftState) -> dict[str, Tensor]:
        return written_by(drafter, state.batch.block_tables[0])

    managers = {"first draft pass": drafter.prefill, "draft chain": drafter.decode}
    with torch.inference_mode():
        return {
            name: manager.verify(fuzz=fuzz, extra_tensors=also)
            for name, manager in managers.items()
            if manager is not None
        }
