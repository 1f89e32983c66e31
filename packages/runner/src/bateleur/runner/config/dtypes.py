"""The dtypes that a user may name."""

import torch

from bateleur.runner.config.engine_config import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""By name."""
