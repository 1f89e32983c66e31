"""Whether steps are prepared while the device is at the one before."""

from __future__ import annotations

import torch

from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.utils.arguments import refuse

_PLANS_ON_HOST = "flashinfer"
"""An attention backend that wants exact lengths on the host, which drafts in flight leave open."""


def choose_async(config: EngineConfig, device: torch.device) -> bool:
    """What a user chose, or what is best on the device: a CPU is itself at the step before.

    Raises ValueError where it is asked for and can't be.
    """
    wanted, drafts = config.scheduler.async_scheduling, config.speculative.num_drafts
    impossible = drafts > 0 and config.model.attention_backend == _PLANS_ON_HOST
    if wanted and impossible:
        rule = f"None or False with drafts and attention_backend {_PLANS_ON_HOST!r}, which plans from exact lengths"
        refuse("async_scheduling", wanted, rule)
    return wanted if wanted is not None else device.type == "cuda" and not impossible
