"""A transformers language model as the target of a speculative loop."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bateleur.eagle.drafter import TargetNeeds

_NORMS = ("norm", "norm_f", "final_layernorm", "ln_f")


class CausalLM:
    """A transformers causal language model with one sequence in its cache, as a `bateleur.eagle.loop.CachedTarget`.

    The last of transformers' own `hidden_states` is the state after the final norm. A hook on the norm captures the one
    before it, for heads that read it.

    Args:
        model: with its language head, on its device. Every layer must be attention with an MLP, because a recurrent
            state cannot be truncated.
        needs: hidden states that the head reads, `head.spec.needs`.

    Raises `ValueError` for other models, or layer boundaries (taps) that the model does not have.
    """

    def __init__(self, model: Any, needs: TargetNeeds = TargetNeeds()) -> None:  # noqa: B008 (frozen)
        config, decoder = model.config.get_text_config(), model.get_decoder()
        kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
        if any("attention" not in kind or "linear" in kind for kind in kinds):
            raise ValueError(f"model: layers are {sorted(set(kinds))}; all must be attention")
        if max(needs.taps, default=0) > len(decoder.layers):
            raise ValueError(f"needs.taps is {needs.taps}; the model has {len(decoder.layers)} layers")
        self.device: torch.device = model.device
        self._model, self._needs, self._norm = model, needs, _final_norm(decoder)
        self._cache: Any = None
        self.reset()

    def reset(self) -> None:
        """Drop the cached sequence, so that another one can start."""
        from transformers import DynamicCache

        self._cache = DynamicCache()

    def __call__(self, ids: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Append the tokens `ids` (n,); return their logits (n, V) and (n, width) for each hidden state of `needs`."""
        last: list[Tensor] = []
        hook = self._norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
        try:
            output = self._model(
                input_ids=ids[None], past_key_values=self._cache, use_cache=True, output_hidden_states=True
            )
        finally:
            hook.remove()
        *boundaries, final = (state[0] for state in output.hidden_states)
        boundaries += last
        return output.logits[0], [boundaries[tap] for tap in self._needs.taps] + [final] * self._needs.hidden

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens from the cache."""
        if surplus := self._cache.get_seq_length() - length:
            self._cache.crop(-surplus)


def _final_norm(decoder: Any) -> Any:
    for name in _NORMS:
        if hasattr(decoder, name):
            return getattr(decoder, name)
    raise ValueError(f"model: its decoder has none of {', '.join(_NORMS)}, so its final norm is not known")
