"""Speculative decoding: keyed random numbers, lossless verification, draft heads, and the EAGLE proposer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bateleur.eagle.adaptive import AdaptiveDrafts
from bateleur.eagle.borrow import BorrowError, borrow_violations
from bateleur.eagle.drafter import BoundedDrafter, DraftContext, Drafter, SamplingDrafter, TargetNeeds, distribution_of
from bateleur.eagle.ngram import NGramDrafter
from bateleur.eagle.noise import HashedVocab, Keys, Role, bits, gumbel, uniform
from bateleur.eagle.policy import (
    ByBatchSize,
    BySurvival,
    DraftPolicy,
    FixedDrafts,
    ObservingPolicy,
    PolicyRows,
    StepCost,
    StepTime,
    UniformPolicy,
)
from bateleur.eagle.rejection_sampler import draw_draft, verify
from bateleur.eagle.rules import Coupled, DraftDistribution, Drafts, Logits, OneHot, RejectionOutput, Rows, Rule
from bateleur.eagle.sample import SampledTokens, argmax, draw, sample
from bateleur.eagle.sampling_metadata import Penalties, SamplingMetadata
from bateleur.eagle.stats import AcceptanceEstimates, AcceptStats
from bateleur.eagle.vocab_shard import ShardCollectives, VocabShard

if TYPE_CHECKING:
    from bateleur.eagle.buffers import DraftCache
    from bateleur.eagle.managers import DecodeEagleCudaGraphManager, DraftGraphs, PrefillEagleCudaGraphManager
    from bateleur.eagle.speculator import EagleSpeculator

_LAZY = {
    "DecodeEagleCudaGraphManager": "managers",
    "DraftCache": "buffers",
    "DraftGraphs": "managers",
    "EagleSpeculator": "speculator",
    "PrefillEagleCudaGraphManager": "managers",
}
"""Modules of names that are imported at first use, because they need graphs and heads."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bateleur.eagle.{_LAZY[name]}"), name)


__all__ = [
    "AcceptStats", "AcceptanceEstimates", "AdaptiveDrafts", "BorrowError", "BoundedDrafter", "ByBatchSize",
    "BySurvival", "Coupled", "DecodeEagleCudaGraphManager", "DraftCache", "DraftContext", "DraftDistribution",
    "DraftGraphs", "DraftPolicy", "Drafter", "Drafts", "EagleSpeculator", "FixedDrafts", "HashedVocab", "Keys",
    "Logits", "NGramDrafter", "ObservingPolicy", "OneHot", "Penalties", "PolicyRows", "PrefillEagleCudaGraphManager",
    "RejectionOutput", "Role", "Rows", "Rule", "SampledTokens", "SamplingDrafter", "SamplingMetadata",
    "ShardCollectives", "StepCost", "StepTime", "TargetNeeds", "UniformPolicy", "VocabShard", "argmax", "bits",
    "borrow_violations", "distribution_of", "draw", "draw_draft", "gumbel", "sample", "uniform", "verify",
]  # fmt: skip
