"""Who gets in: prompts become requests, and what could never run is refused here."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np

from bateleur.runner.arguments import require_unicode
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.scheduling.scheduler import Scheduler
from bateleur.runner.text.detokenizer import IncrementalDetokenizer
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""


class InputProcessor:
    """Makes requests of prompts. Every rule is checked here, so the engine can trust what it is given.

    Unseeded requests get a seed from `seed` and their number.
    """

    def __init__(
        self, tokenizer: Tokenizer, spec: ModelSpec, scheduler: Scheduler, limits: EngineLimits, *, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._scheduler = scheduler
        self._limits = limits
        self._seed = seed
        self._counter = 0
        self._names = (f"request-{i}" for i in count(1))

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        stream: bool = False,
        taken: Container[str] = (),
    ) -> Request:
        """A request that can run. ValueError, naming argument, value and rule, if it never could.

        taken: ids that are in use, and not given to a request that has none.
        """
        number = self._counter + 1
        if request_id is None:
            request_id = next(name for name in self._names if name not in taken)
        text, ids = self._tokens_of(prompt)
        limit = self._admit(ids, params)
        seed = _mix(self._seed, number) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else self._spec.eos_token_ids
        )
        detokenizer = None
        if stream or params.stop:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, stop=params.stop, prompt_token_ids=ids, min_tokens=params.min_tokens
            )
        self._counter = number
        return Request(request_id, text, ids, params, seed, stop_ids, limit, detokenizer, stream)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise ValueError(
                    f"prompt has the keys {sorted(prompt)}; exactly one of prompt, prompt_token_ids is needed"
                )
            prompt = next(iter(prompt.values()))
        if isinstance(prompt, str):
            require_unicode(prompt=prompt)
            # A tokenizer may put a token before every text; a text without content is empty all the same.
            return prompt, self._tokenizer.encode(prompt) if prompt else []
        if not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"prompt is {prompt!r}; it must be text or a sequence of integer token ids")
        wrong = [i for i in prompt if not isinstance(i, Integral) or isinstance(i, bool)]
        if wrong:
            raise ValueError(f"prompt holds {wrong[0]!r}; it must be text or a sequence of integer token ids")
        return None, [int(i) for i in prompt]

    def _admit(self, ids: list[int], params: SamplingParams) -> int:
        """The length at which the request ends; ValueError if it could never run."""
        if not ids:
            raise ValueError("prompt is empty; at least one token is needed")
        bad = [i for i in ids if not 0 <= i < self._spec.vocab_size]
        if bad:
            raise ValueError(f"prompt_token_ids holds {bad[0]}; ids must be in [0, {self._spec.vocab_size})")
        wrong = [i for i in params.stop_token_ids if not 0 <= i < self._spec.vocab_size]
        if wrong:
            raise ValueError(f"stop_token_ids holds {wrong[0]}; ids must be in [0, {self._spec.vocab_size})")
        if params.logprobs is not None and params.logprobs > self._spec.vocab_size:
            raise ValueError(
                f"logprobs is {params.logprobs}; the vocabulary has {self._spec.vocab_size} tokens"
            )
        if params.stop and isinstance(self._tokenizer, NoTokenizer):
            raise ValueError(f"stop is {params.stop}; without a tokenizer there is no text to find it in")
        longest = self._limits.max_model_len
        if len(ids) >= longest:
            raise ValueError(
                f"prompt has {len(ids)} tokens; max_model_len is {longest} and leaves room for {longest - 1} "
                "prompt tokens and one output token"
            )
        limit = longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens)
        pool = self._scheduler.pool
        # The last token drawn is never stored, but drafts of more tokens may be.
        ahead = self._limits.max_query_len - 2 + self._scheduler.lookahead_tokens
        stored = min(limit + ahead, longest)
        needed = self._scheduler.blocks_needed(stored)
        if pool is not None and needed > pool.capacity:
            raise ValueError(
                f"the request may grow to {limit} tokens and needs {needed} KV blocks; the cache has {pool.capacity}. "
                "Lower max_tokens or raise kv_cache_memory_bytes"
            )
        return limit


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list whose first entry is an integer is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts is {prompts!r}; expected text, token ids or a sequence of them")
    if len(prompts) > 0 and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _mix(seed: int, counter: int) -> int:
    """A 63-bit seed for the counter-th request of an engine (the splitmix64 finaliser)."""
    z = (seed * 0x9E3779B97F4A7C15 + counter) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
