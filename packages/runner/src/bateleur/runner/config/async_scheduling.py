"""Whether steps are prepared while the device is at the one before."""

from __future__ import annotations

import torch

from bateleur.runner.arguments import refuse
from bateleur.runner.config.engine_config import EngineConfig


def choose_async(config: EngineConfig, device: torch.device) -> bool:
    """What a user chose, or what is best on the device: a CPU is itself at the step before.

    Raises ValueError where it is asked for and can't be.
    """
    wanted, drafts = config.scheduler.async_scheduling, config.speculative.num_drafts
    if wanted and drafts:
        refuse(
            "async_scheduling", wanted, "None or False with a draft, whose lengths a step takes from the host"
        )
    return wanted if wanted is not None else device.type == "cuda" and not drafts
