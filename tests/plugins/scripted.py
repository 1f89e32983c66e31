"""A tiny model of each recurrence, its texts, and drafters with a given number of right drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from random import Random
from typing import Any

import torch
from torch import Tensor

from bateleur.eagle import DraftContext
from bateleur.runner import LLM, RequestOutput, SamplingParams
from eagle_doubles.drafters import ScriptedDrafter


class Texts:
    """Texts of a plain engine: uncached, unchunked, alone, without drafts, with one state per request."""

    def __init__(self, plain: LLM) -> None:
        self.plain = plain
        self._texts: dict[str, list[int]] = {}
        self._states: dict[str, list[tuple[Tensor, Tensor | None]]] = {}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model."""
        return self.plain.engine.model.spec.vocab_size

    def of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Prompt and output tokens."""
        name = f"{prompt} {params}"
        if name not in self._texts:
            (output,) = self.plain.generate([{"prompt_token_ids": prompt}], params)
            self._texts[name] = prompt + output.outputs[0].token_ids
        return self._texts[name]

    def states(self, tokens: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        """The window of each recurrent layer, and its state if it has one, after these tokens."""
        name = str(tokens)
        if name not in self._states:
            self.plain.generate([{"prompt_token_ids": tokens}], SamplingParams(temperature=0, max_tokens=1))
            layers = self.plain.engine.caches.states
            self._states[name] = [
                (conv[1].clone(), None if state is None else state[1].clone()) for conv, state in layers
            ]
        return self._states[name]

    def __call__(self, tokens: list[int]) -> list[int]:
        """What follows these tokens in a known text."""
        known, end = self._texts.values(), len(tokens)
        return next((text[end:] for text in known if len(text) > end and text[:end] == tokens), [])


RECURRENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "gated_delta": (
        "qwen3_5_text",
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "kimi_delta": (
        "kimi_linear",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense"] * 3,
        },
    ),
    "short_conv": ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
}
"""A family for each recurrence, with config fields for a tiny checkpoint."""


class Script:
    """The texts of requests, from plain runs."""

    def __init__(self, outputs: Sequence[RequestOutput] = ()) -> None:
        self.texts: list[list[int]] = []
        self.add(outputs)

    def add(self, outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
        """Add and return these outputs."""
        self.texts += [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in outputs]
        return outputs

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """What follows these tokens."""
        found = (text[len(tokens) :] for text in self.texts if text[: len(tokens)] == list(tokens))
        return next(found, [])


class Partly(ScriptedDrafter):
    """Right up to a position that changes with every proposal: one of `places`, or any if it is empty."""

    def __init__(self, script: Script, k: int, vocab_size: int, places: Sequence[int] = ()) -> None:
        super().__init__(script, k, None, vocab_size)
        self._places, self._random = places or range(k + 1), Random(5)

    def propose(self, context: DraftContext) -> Tensor:
        """Returns (R, K) drafts."""
        self._right = self._random.choice(self._places)
        return super().propose(context)


class Patterned(ScriptedDrafter):
    """The number of right drafts follows `pattern`; each request starts at another place of it."""

    def __init__(self, texts: Texts, k: int, pattern: Sequence[int]) -> None:
        super().__init__(texts, k, None, texts.vocab_size)
        self.pattern = list(pattern)
        self._turns: dict[int, Iterator[int]] = {}
        self.strides: list[list[tuple[int, int, int, int]]] = []
        """By step, for rows after their prompts: row, tokens before the step, after it, and with rejected drafts."""

    def admit(self, row: int, token_ids: list[int]) -> None:
        """See `Drafter`."""
        super().admit(row, token_ids)
        shift = (row + len(token_ids)) % len(self.pattern)
        self._turns[row] = cycle(self.pattern[shift:] + self.pattern[:shift])

    def propose(self, context: DraftContext) -> Tensor:
        """Returns (R, K) drafts."""
        rows, batch = len(context.rows), context.batch
        before, start = batch.num_computed_tokens[:rows], batch.query_start_loc[: rows + 1]
        told = torch.stack((context.rows, before, before + context.num_valid, before + start[1:] - start[:-1]), 1)
        self.strides.append([tuple(each) for each in told[~batch.is_prefilling[:rows]].tolist()])
        return super().propose(context)

    def _row(self, row: int, emitted: list[int], next_token: int) -> list[int]:
        if emitted:
            self._right = next(self._turns[row])
        return super()._row(row, emitted, next_token)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Prompt and output tokens of each."""
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def asked(prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Prompts of token ids."""
    return [{"prompt_token_ids": prompt} for prompt in prompts]
