"""The decoder, and the context of a step (metadata and caches) that its layers read."""

from bateleur.runner.models.context import StepContext
from bateleur.runner.models.decoder import HybridDecoder

__all__ = ["HybridDecoder", "StepContext"]
