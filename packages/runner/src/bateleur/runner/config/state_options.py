"""How Mamba states are kept, as a user asks for it, and the layout that follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, PrefixRetention, Recurrence, StatePolicy
from bateleur.runner.config.engine_config import CacheConfig
from bateleur.runner.models.spec import DeltaLayer, ModelSpec
from bateleur.runner.utils.arguments import member_of
from bateleur.runner.utils.device import DTYPES

_STATE_BLOCK = 64
"""Tokens between two boundaries at which Mamba states may be kept, unless the user says otherwise or requests are
short: what two prompts share need not be long to be found."""
_RING = 16
"""Tokens in a ring: folding every dozen tokens costs little, and reading more of them costs more than it saves."""


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How Mamba states are kept.

    mode: which of them outlive the step that made them.
    policy: how a step keeps those it may have to return to.
    block_size: tokens between two that may be kept; None is _STATE_BLOCK, or a quarter of short requests.
    retention: which boundaries others may find, see `PrefixRetention.parse`; None is what the mode says.
    ssm_dtype: of the SSM matrices; None is the checkpoint's own.
    num_speculative_tokens: K, draft tokens of a step.
    steps_ahead: as in `CacheLayout`.
    """

    mode: MambaCacheMode = MambaCacheMode.NONE
    policy: StatePolicy = StatePolicy.FOLD
    block_size: int | None = None
    retention: str | None = None
    ssm_dtype: torch.dtype | None = None
    num_speculative_tokens: int = 0
    steps_ahead: int = 0

    @classmethod
    def of(
        cls, cache: CacheConfig, spec: ModelSpec, num_speculative_tokens: int, device: torch.device
    ) -> StateOptions:
        """Complete what a user chose, for a model and a device.

        The default policy is FOLD, which moves fewer bytes, with these exceptions:

        * On CUDA, SLOTS for delta rules without drafts.
        * On CPU, SLOTS without drafts, because its step has fewer operators and is a fifth faster; with drafts, SLOTS
          unless prefixes are shared.

        Raises ValueError for a retention where nothing is kept.
        """
        default = MambaCacheMode.ALL if cache.enable_prefix_caching else MambaCacheMode.NONE
        mode = member_of(MambaCacheMode, cache.mamba_cache_mode or default)
        if cache.mamba_retention is not None and mode is MambaCacheMode.NONE:
            raise ValueError(
                f"mamba_retention is {cache.mamba_retention!r}; in cache mode 'none' nothing is kept"
            )
        drafts = num_speculative_tokens > 0
        if device.type == "cpu":
            slots = not drafts or mode is MambaCacheMode.NONE
        else:
            # SLOTS moves twice the bytes of FOLD, by a simple kernel. The replay kernel has more instructions to issue
            # for each byte, and no GPU has shown yet that it keeps up with memory.
            slots = not drafts and any(isinstance(each, DeltaLayer) for each in spec.recurrent)
        policy = cache.mamba_state_policy or (StatePolicy.SLOTS if slots else StatePolicy.FOLD)
        return cls(
            mode=mode,
            policy=member_of(StatePolicy, policy),
            block_size=cache.mamba_block_size,
            retention=cache.mamba_retention,
            ssm_dtype=DTYPES.get(str(cache.mamba_ssm_cache_dtype)),
            num_speculative_tokens=num_speculative_tokens,
        )

    def layout(self, kv_block_size: int, max_model_len: int) -> CacheLayout:
        """Where the states of a request lie; KV blocks of `kv_block_size` tokens end at the same ones.

        Raises ValueError for a block size that no KV block ends with, that a step with drafts could cross twice, or
        that no request is long enough for.
        """
        drafts = self.num_speculative_tokens
        ring = max(_RING, 2 + 2 * drafts)
        if self.mode is MambaCacheMode.NONE:
            return CacheLayout(self.mode, max_model_len, drafts, max_model_len, self.policy, ring)
        block_size, least = self.block_size, 1 + drafts
        if block_size is None:  # short requests hit as well, a step fits, and scans have long chunks
            wanted, block_size = min(_STATE_BLOCK, max_model_len // 4), kv_block_size
            while block_size < least or 2 * block_size <= wanted:
                block_size *= 2
        elif block_size > max_model_len - 2:
            raise ValueError(
                f"mamba_block_size is {block_size}; it must be at most max_model_len - 2 = {max_model_len - 2}, or no "
                "request could begin behind it and draw a token"
            )
        if block_size < least:
            raise ValueError(
                f"mamba_block_size is {block_size}; it must be at least {least}, the tokens of a step that decodes, so "
                "that no step crosses two boundaries"
            )
        if block_size % kv_block_size:
            raise ValueError(
                f"mamba_block_size is {block_size}; it must be a multiple of block_size = {kv_block_size}, so that "
                "KV blocks and states end at the same tokens"
            )
        return CacheLayout(
            self.mode, block_size, drafts, max_model_len, self.policy, ring, steps_ahead=self.steps_ahead
        )

    def kept(self, layout: CacheLayout, page_bytes: int, token_bytes: int) -> PrefixRetention:
        """Which boundaries others may find, where a page costs `page_bytes`, and keys and values `token_bytes` a token.

        Unless the user chose block size or rules, mode ALL has no pages that cost more than the keys and values between
        them, but for a few: the newest, the prompt's last, and those of beginnings that prompts may share, at 1, 2,
        4, ... blocks.

        Raises ValueError for a rule that is not known.
        """
        if self.retention is not None:
            try:
                return PrefixRetention.parse(self.retention, layout.block_size)
            except ValueError as error:
                rule = str(error).partition("; ")[2]
                raise ValueError(f"mamba_retention is {self.retention!r}; {rule}") from None
        every, size = layout.block_size, layout.block_size
        if self.mode is MambaCacheMode.ALL and self.block_size is None:
            while every * token_bytes < page_bytes and every < layout.max_model_len:
                every *= 2
        if every == size:
            return PrefixRetention.of(layout)
        return PrefixRetention(size, every, last=True, prompt_end=True, doubling=True)

    def specs(self, spec: ModelSpec, dtype: torch.dtype) -> list[Recurrence]:
        """The state of each recurrent layer; the conv window, which holds raw inputs, has the model's dtype."""
        return [
            replace(
                layer.state,
                conv_dtype=dtype,
                ssm_dtype=self.ssm_dtype or layer.state.ssm_dtype,
                policy=self.policy,
                num_speculative_tokens=self.num_speculative_tokens,
            )
            for layer in spec.recurrent
        ]
