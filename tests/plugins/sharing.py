"""Engines with prefix caching, one of each kind with its own caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bateleur.runner import LLM
from scripted import RECURRENCES

KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "all": {"mamba_state_policy": "slots"},
    "align": {"mamba_cache_mode": "align"},
    "fold": {"mamba_state_policy": "fold"},
    **{name: {} for name in RECURRENCES if name != "mamba2"},
    "head": {"draft": "head", "num_speculative_tokens": 2},
    "head-slots": {"draft": "head", "num_speculative_tokens": 2, "mamba_state_policy": "slots"},
    "mtp": {"draft": "mtp", "num_speculative_tokens": 2},
}


def sharing(
    tiny: Callable[..., Path], head: Path, mtp: Path, kinds: dict[str, dict[str, Any]] = KINDS, **base: Any
) -> Callable[..., LLM]:
    """`make(kind, options)`: an engine that shares blocks of 4 tokens and states of 8; `base` are common options."""

    def make(kind: str = "all", **options: Any) -> LLM:
        family, overrides = RECURRENCES.get(kind, RECURRENCES["mamba2"])
        folder = tiny("llama") if kind == "attention" else tiny(family, **overrides)
        common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "block_size": 4}
        common |= {"skip_tokenizer_init": True, "enable_prefix_caching": True, "mamba_block_size": 8}
        common |= base | kinds[kind] | options
        if common.get("draft") == "head":
            common["draft"] = head
        return LLM(mtp if kind == "mtp" else folder, **common)

    return make
