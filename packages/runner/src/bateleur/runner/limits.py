"""How much one step and one request may take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bateleur.metadata import Limits
from bateleur.runner.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much one step and one request may take."""

    max_model_len: int
    """Tokens of a request, prompt and output together."""
    max_num_seqs: int
    """Requests that run at once."""
    max_num_batched_tokens: int
    """Tokens of one step."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs = {self.max_num_seqs}, or a step could not decode every running request"
            )

    @classmethod
    def resolve(
        cls,
        spec: ModelSpec,
        device: torch.device,
        *,
        max_model_len: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int | None,
    ) -> EngineLimits:
        """Fill in what a user left open; see `LLM`. Raises ValueError for what the model or a step can't hold."""
        longest = spec.max_position_embeddings
        if max_model_len is not None:
            if not 2 <= max_model_len <= longest:
                raise ValueError(
                    f"max_model_len is {max_model_len}; it must be at least 2 and at most the model's {longest}"
                )
            longest = max_model_len
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(512 if device.type == "cpu" else 2048, max_num_seqs)
        return cls(longest, max_num_seqs, max_num_batched_tokens)

    @property
    def buffers(self) -> Limits:
        """The same, as the buffers of a step take them."""
        return Limits(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len)
