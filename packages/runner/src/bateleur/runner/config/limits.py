"""Limits of a step and of a request."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from bateleur.metadata import BatchLimits
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.arguments import refuse

DEFAULT_ROWS = {"cpu": 64, "cuda": 256}
"""Default of `max_num_seqs` by type of device. Less if memory is short, see `cache/plan.py` and `smaller`."""
DEFAULT_TOKENS = {"cpu": 512, "cuda": 8192}
"""Default of `max_num_batched_tokens` by type of device. Less if memory is short, see `smaller`.

On a CPU, larger chunks do not fit its caches. On CUDA, a step of a model with experts reads all their weights, so one
step of 8,192 tokens reads them once and four steps of 2,048 tokens read them four times.
"""
LEAST_ROWS, LEAST_TOKENS = 64, 2048  # lower bounds of the defaults on CUDA when memory is short


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of a step and of a request."""

    max_model_len: int  # maximum tokens of a request, prompt and output together
    max_num_seqs: int  # maximum number of running requests
    max_num_batched_tokens: int  # maximum tokens of one step
    num_speculative_tokens: int = 0  # K: maximum drafts that a step verifies for each request

    def __post_init__(self) -> None:
        if not 0 <= self.num_speculative_tokens < max(self.max_model_len - 1, 1):
            rule = f"at least 0, and below max_model_len - 1 = {self.max_model_len - 1}"
            refuse("num_speculative_tokens", self.num_speculative_tokens, rule)
        if self.max_num_batched_tokens < self.max_num_seqs * self.max_query_len:
            each = "" if self.max_query_len == 1 else f" of {self.max_query_len} tokens each"
            least = f"at least max_num_seqs = {self.max_num_seqs} rows{each}"
            rule = f"{least}, or a step could not decode all running requests"
            refuse("max_num_batched_tokens", self.max_num_batched_tokens, rule)

    @property
    def max_query_len(self) -> int:
        """Maximum tokens of a decoding request in one step: 1 + the maximum number of drafts."""
        return 1 + self.num_speculative_tokens

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, device: torch.device) -> Self:
        """Fill in the defaults of the user's options. Raises ValueError for a length that the model can't support."""
        longest, drafts = config.model.max_model_len or spec.max_position_embeddings, config.speculative.num_drafts
        if config.model.max_model_len is not None and not 2 <= longest <= spec.longest:
            refuse("max_model_len", longest, f"at least 2 and at most the model's {spec.longest}")
        rows = config.scheduler.max_num_seqs or DEFAULT_ROWS[device.type]
        num_tokens = config.scheduler.max_num_batched_tokens or max(DEFAULT_TOKENS[device.type], rows * (1 + drafts))
        return cls(longest, rows, min(num_tokens, rows * longest), drafts)  # a step can't have more tokens

    def smaller(self, *, rows: bool, tokens: bool) -> list[Self]:
        """Return a copy with half `max_num_seqs`, if `rows`, and one with half `max_num_batched_tokens`, if `tokens`.

        Copies below `LEAST_ROWS`, `LEAST_TOKENS`, or the tokens of a decode step of all requests are left out.
        """
        found, half_rows, half_tokens = [], self.max_num_seqs // 2, self.max_num_batched_tokens // 2
        if rows and half_rows >= LEAST_ROWS:
            found.append(replace(self, max_num_seqs=half_rows))
        if tokens and half_tokens >= max(LEAST_TOKENS, self.max_num_seqs * self.max_query_len):
            found.append(replace(self, max_num_batched_tokens=half_tokens))
        return found

    @property
    def buffers(self) -> BatchLimits:
        """The limits of the step's input buffers."""
        return BatchLimits(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len)
