"""What requests will say, known from a plain run, and a drafter that is right as often as it is told to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from bateleur.runner import LLM, RequestOutput, SamplingParams
from eagle_doubles.drafters import ScriptedDrafter


class Texts:
    """What requests say in a plain engine: uncached, unchunked, alone, without drafts, a state for each request."""

    def __init__(self, plain: LLM) -> None:
        self.plain = plain
        self._texts: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.plain.engine.model.spec.vocab_size

    def of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Prompt and output."""
        name = f"{prompt} {params}"
        if name not in self._texts:
            (output,) = self.plain.generate([{"prompt_token_ids": prompt}], params)
            self._texts[name] = prompt + output.outputs[0].token_ids
        return self._texts[name]

    def __call__(self, tokens: list[int]) -> list[int]:
        """What follows these tokens in a text that is known."""
        known, end = self._texts.values(), len(tokens)
        return next((text[end:] for text in known if len(text) > end and text[:end] == tokens), [])


class Patterned(ScriptedDrafter):
    """How many drafts of each proposal are right: each request goes through `pattern`, from a place of its own."""

    def __init__(self, texts: Texts, k: int, pattern: Sequence[int]) -> None:
        super().__init__(texts, k, None, texts.vocab_size)
        self.pattern = list(pattern)
        self._turns: dict[int, Iterator[int]] = {}

    def admit(self, row: int, token_ids: list[int]) -> None:
        """See `Drafter`."""
        super().admit(row, token_ids)
        shift = (row + len(token_ids)) % len(self.pattern)
        self._turns[row] = cycle(self.pattern[shift:] + self.pattern[:shift])

    def _row(self, row: int, emitted: list[int], next_token: int) -> list[int]:
        if emitted:
            self._right = next(self._turns[row])
        return super()._row(row, emitted, next_token)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Prompt and output of each."""
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def asked(prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Prompts of token ids."""
    return [{"prompt_token_ids": prompt} for prompt in prompts]
