"""Options for the caching of Mamba states, with defaults filled in, and the resulting cache layout."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from bateleur.mamba import CacheLayout, MambaCacheMode, PrefixRetention, Recurrence, StatePolicy
from bateleur.runner.config.engine_config import CacheConfig
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.utils.arguments import member_of, refuse
from bateleur.runner.utils.device import DTYPES

_STATE_BLOCK = 64  # default tokens between boundaries with kept states; small, so that short shared prefixes are found
_RING = 16  # default number of tokens in a ring; a longer one costs more to read than it saves in folds


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Options for the caching of Mamba states, with defaults filled in.

    mode: states that are stored for later requests. policy: how a step keeps the states that rejected drafts may need.
    block_size: tokens between two kept states; None: chosen by `layout`. retention: states that stay in the prefix
    cache, see `PrefixRetention.parse`; None: by mode. ssm_dtype: dtype of SSM states; None: the checkpoint's.
    steps_ahead: steps that are planned before the results of earlier ones are known: 0, or 1 if async.
    """

    mode: MambaCacheMode = MambaCacheMode.NONE
    policy: StatePolicy = StatePolicy.FOLD
    block_size: int | None = None
    retention: str | None = None
    ssm_dtype: torch.dtype | None = None
    num_speculative_tokens: int = 0  # K, draft tokens of a step
    steps_ahead: int = 0

    @classmethod
    def of(cls, cache: CacheConfig, num_speculative_tokens: int, device: torch.device) -> Self:
        """Complete the user's options for a device.

        The default state policy is SLOTS (a state for every token of a step) without drafts, and with drafts on a CPU
        without prefix caching. In all other cases it is FOLD (one state and the inputs after it). On an H200 without
        drafts, recurrent layers were 12 to 78 % faster with SLOTS for up to 64 requests, and about as fast for 256
        (docs/gpu.md). With drafts, FOLD moves fewer bytes and was up to 40 % faster for 64 requests.

        Raises ValueError for `mamba_retention` in mode NONE.
        """
        default = MambaCacheMode.ALL if cache.enable_prefix_caching else MambaCacheMode.NONE
        mode = member_of(MambaCacheMode, cache.mamba_cache_mode or default)
        if cache.mamba_retention is not None and mode is MambaCacheMode.NONE:
            refuse("mamba_retention", cache.mamba_retention, "None in cache mode 'none', which keeps no states")
        slots = not num_speculative_tokens or (device.type == "cpu" and mode is MambaCacheMode.NONE)
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
        """Return the layout of a request's states, which are stored at ends of KV blocks of `kv_block_size` tokens.

        Raises ValueError unless `block_size` is a multiple of `kv_block_size` from 1 + drafts to `max_model_len` - 2.
        """
        name, drafts = "mamba_block_size", self.num_speculative_tokens
        ring = max(_RING, 2 + 2 * drafts)
        if self.mode is MambaCacheMode.NONE:
            return CacheLayout(self.mode, max_model_len, drafts, max_model_len, self.policy, ring)
        block_size, least = self.block_size, 1 + drafts
        if block_size is None:  # short requests have blocks too, a step fits into one, and scans have long chunks
            wanted, block_size = min(_STATE_BLOCK, max_model_len // 4), kv_block_size
            while block_size < least or 2 * block_size <= wanted:
                block_size *= 2
        elif block_size > max_model_len - 2:
            most = f"at most max_model_len - 2 = {max_model_len - 2}"
            refuse(name, block_size, f"{most}, or no request could start after a block and draw a token")
        if block_size < least:
            step = f"at least {least}, the tokens of a step that decodes"
            refuse(name, block_size, f"{step}, so that no step crosses two boundaries")
        if block_size % kv_block_size:
            multiple = f"a multiple of block_size = {kv_block_size}"
            refuse(name, block_size, f"{multiple}, so that KV blocks and states end at the same tokens")
        return CacheLayout(
            self.mode, block_size, drafts, max_model_len, self.policy, ring, steps_ahead=self.steps_ahead
        )

    def retained(self, layout: CacheLayout, page_bytes: int, token_bytes: int) -> PrefixRetention:
        """Return the rule for which states stay in the prefix cache: the user's, or the default of `mamba_retention`.

        page_bytes: bytes of one state of all recurrent layers. token_bytes: bytes of keys and values of one token.
        Raises ValueError for an unknown rule.
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
        """Return the recurrence of each recurrent layer, with its dtypes. dtype: the model's, also of conv windows."""
        drafts = self.num_speculative_tokens
        common: dict[str, Any] = {"conv_dtype": dtype, "policy": self.policy, "num_speculative_tokens": drafts}
        states = [layer.state for layer in spec.recurrent]
        return [replace(each, ssm_dtype=self.ssm_dtype or each.ssm_dtype, **common) for each in states]
