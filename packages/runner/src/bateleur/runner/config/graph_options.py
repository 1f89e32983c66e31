"""Options for CUDA graph capture, from the user's options and the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from bateleur.cudagraph import CudaGraphMode, ReplayChecks
from bateleur.runner.config.engine_config import GraphConfig
from bateleur.runner.utils.arguments import member_of, refuse


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options for CUDA graph capture, with defaults filled in. mode: the requested one; attention backends may support
    less. backend: capture backend, see `bateleur.cudagraph.backends`. capture_sizes: token counts; None
    selects `default_capture_sizes`. checks: checks of each replay.
    """

    mode: CudaGraphMode = CudaGraphMode.NONE
    backend: str = "auto"  # one of "auto", "cuda", "recorded" or "eager"
    capture_sizes: Sequence[int] | None = None
    checks: ReplayChecks = ReplayChecks.CHEAP

    @classmethod
    def of(cls, config: GraphConfig, device: torch.device) -> Self:
        """Fill in the defaults of the user's options. Default mode: FULL_AND_PIECEWISE on CUDA, NONE on CPU.

        Raises ValueError for backend "recorded" on CUDA or "cuda" on CPU.
        """
        cuda = device.type == "cuda"
        default = CudaGraphMode.FULL_AND_PIECEWISE if cuda else CudaGraphMode.NONE
        wrong = "recorded" if cuda else "cuda"
        if config.cudagraph_backend == wrong:
            refuse("cudagraph_backend", wrong, f"another one on device {device.type}")
        mode = member_of(CudaGraphMode, config.cudagraph_mode or default)
        checks = member_of(ReplayChecks, config.cudagraph_checks)
        return cls(mode, config.cudagraph_backend, config.cudagraph_capture_sizes, checks)
