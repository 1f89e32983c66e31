"""Validates prompts and parameters, and creates requests from them."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from numbers import Integral
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.config.limits import EngineLimits
from bateleur.runner.errors import ContextLengthExceeded
from bateleur.runner.lora.adapter_manager import LoRARequest
from bateleur.runner.models.spec import ModelSpec
from bateleur.runner.outputs import RequestOutputKind
from bateleur.runner.requests.request import OutputState, Request
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.structured.grammar import Grammars
from bateleur.runner.structured.matcher import Matcher
from bateleur.runner.structured_outputs import StructuredOutputsParams
from bateleur.runner.text.detokenizer import IncrementalDetokenizer
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer, bad_words_token_ids, special_token_ids, tag_tokens
from bateleur.runner.utils.arguments import (
    TEXTS_AND_BYTES,
    Check,
    Integer,
    Several,
    maybe,
    refuse,
    require_unicode,
    shown,
    text,
)
from bateleur.runner.utils.json_file import errors_in

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt`, `prompt_token_ids` or both; then the ids run, and the text is shown."""
OneOrMoreAdapters = LoRARequest | Sequence[LoRARequest | None] | None
"""LoRA adapter of all prompts, or of each; None for the base model."""

_PRIORITY = Integer(-(1 << 63), (1 << 63) - 1, rule="an integer of 64 bits")


class InputProcessor:
    """Creates requests from prompts. It checks all rules, so the engine can rely on its requests.
    Requests without a seed get one, computed from the engine's seed and the request's number. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec, limits: EngineLimits, config: EngineConfig) -> None:
        self._tokenizer, self._spec, self._limits = tokenizer, spec, limits
        self._seed, self._enable_lora = config.model.seed, config.lora.enable_lora
        self._by_priority = config.scheduler.scheduling_policy == "priority"
        self.grammars = Grammars(tokenizer, spec.vocab_size, spec.eos_token_ids)
        self._tags = tag_tokens(tokenizer)
        special = special_token_ids(tokenizer)
        self._special = {text: token for token, text in self._tags.items() if token in special}
        """Special tokens by their text. A stop string with such a text is a stop token."""
        self.default_params = SamplingParams()
        self._lock = Lock()
        """Guards the attributes below."""
        self._num_admitted = 0
        self._names = map("request-{}".format, count(1))  # a signal in the frame of a generator would end it

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        kind: RequestOutputKind | None = None,
        priority: int = 0,
        taken: Container[str] = (),
        lora_request: LoRARequest | None = None,
    ) -> RequestGroup:
        """Make a request. Raises ValueError, naming argument, value and rule, if it could never run.
        params: None means `default_params`. kind: output kind; None means the kind of the parameters. request_id: None
        creates an id that is not in `taken`, the ids in use.
        """
        params = self.default_params if params is None else _checked_params("sampling_params", params)
        if request_id is not None:
            text("request_id", request_id)
        if lora_request is not None and checked_adapter("lora_request", lora_request) and not self._enable_lora:
            raise ValueError(f"lora_request is {shown(lora_request)}; it must be None without enable_lora=True")
        params = self._counted(params)
        if (priority := _PRIORITY("priority", priority)) and not self._by_priority:
            refuse("priority", priority, "0 under scheduling_policy 'fcfs'; with 'priority' lower numbers go first")
        words, ids = self._tokens_of(prompt)
        ids = self._cut(ids, params)
        ends = () if params.ignore_eos else self._spec.eos_token_ids
        special = (self._special[text] for text in params.stop if text in self._special)
        stop_ids = frozenset((*params.stop_token_ids, *ends, *special))
        limit = self._admit(ids, params, stop_ids)
        bad_words = bad_words_token_ids(params.bad_words, self._tokenizer, self._spec.vocab_size, limit - len(ids))
        matchers = self._matchers(params, stop_ids)
        with self._lock:
            name = next(each for each in self._names if each not in taken) if request_id is None else request_id
            first = self._num_admitted + 1
            self._num_admitted += params.n
        if params.seed is None:
            seeds = tuple(_mix(self._seed, first + index) for index in range(params.n))
        else:
            seeds = tuple(wrapped_seed(params.seed + index) for index in range(params.n))
        kind = params.output_kind if kind is None else kind
        group = RequestGroup(name, words, ids, params, kind, priority, stop_ids, limit, bad_words, seeds, lora_request)
        self._add_members(group, matchers)
        return group

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        taken: Container[str],
        kind: RequestOutputKind | None = None,
        priority: Sequence[int] | int | None = None,
        lora_request: OneOrMoreAdapters = None,
    ) -> list[RequestGroup]:
        """Create a request for each prompt, see `request`. params, priority, lora_request: one value for all prompts,
        or a list with one for each.
        """
        listed = as_prompts(prompts)
        params = self.default_params if params is None else params
        each_params = _for_each(listed, "sampling_params", params, SamplingParams, _PARAMS)
        priorities = _for_each(listed, "priority", 0 if priority is None else priority, Integral, _PRIORITIES)
        adapters = _for_each(listed, "lora_request", lora_request, LoRARequest | None, _ADAPTERS)
        requests = []
        for index, (prompt, own, first, adapter) in enumerate(
            zip(listed, each_params, priorities, adapters, strict=True)
        ):
            with errors_in(f"prompts[{index}]"):
                request = self.request(prompt, own, kind=kind, priority=first, taken=taken, lora_request=adapter)
            requests.append(request)
        return requests

    def follow(self, group: RequestGroup) -> None:
        """Create the engine's requests of a group, one for each of its `n` continuations, in `group.members`.
        Ranks other than the first call this for a group that they receive; the first rank has checked it (`request`).
        """
        self._add_members(group, self._matchers(group.params, group.stop_token_ids, already_compiled=True))

    def _add_members(self, group: RequestGroup, matchers: Sequence[Matcher | None]) -> None:
        stream = group.kind is not RequestOutputKind.FINAL_ONLY
        ids, params = list(group.prompt_token_ids), group.params
        for index, (seed, matcher) in enumerate(zip(group.seeds, matchers, strict=True)):
            request = Request(
                group.request_id,
                ids,
                params,
                seed,
                group.stop_token_ids,
                group.max_total_tokens,
                group.bad_words,
                self._spec.rope_length(len(ids)),
                matcher=matcher,
                leader=group.members[0] if group.members else None,
                priority=group.priority,
                output=OutputState(index, stream, self._detokenizer(params, ids, stream=stream)),
            )
            group.members.append(request)

    def _detokenizer(self, params: SamplingParams, ids: list[int], *, stream: bool) -> IncrementalDetokenizer | None:
        if not params.detokenize or not (stream or params.stop or params.return_tags):
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            stop=params.stop,
            prompt_token_ids=ids,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            tags=self._tags if params.return_tags else {},
        )

    def _matchers(
        self, params: SamplingParams, stop_token_ids: frozenset[int], *, already_compiled: bool = False
    ) -> list[Matcher | None]:
        asked = params.structured_outputs
        if not isinstance(asked, StructuredOutputsParams):
            return [None] * params.n
        if params.allowed_token_ids is not None:  # other stop tokens never come
            stop_token_ids = stop_token_ids.intersection(params.allowed_token_ids)
        make = partial(self.grammars.matcher, asked, stop_token_ids, already_compiled=already_compiled)
        return [make() for _ in range(params.n)]

    def _counted(self, params: SamplingParams) -> SamplingParams:
        names = ("logprobs", "prompt_logprobs")  # -1 is all tokens
        all_tokens: dict[str, Any] = {name: self._spec.vocab_size for name in names if getattr(params, name) == -1}
        return replace(params, **all_tokens) if all_tokens else params

    def _cut(self, ids: list[int], params: SamplingParams) -> list[int]:
        most = params.truncate_prompt_tokens
        if most is None:
            return ids
        if most == -1:
            most = max(1, self._limits.max_model_len - (params.max_tokens or 1))
        return ids[-most:] if params.truncation_side == "left" else ids[:most]

    def _tokens_of(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Return the text of a prompt, or None, and its token ids. If both are given, the engine runs the ids."""
        name = "prompt"
        if isinstance(prompt, Mapping):
            if foreign := [each for each in ("multi_modal_data", "multi_modal_uuids") if prompt.get(each)]:
                raise ValueError(f"{foreign[0]} is given; models of text alone are served, and no images")
            if not prompt or prompt.keys() - {"prompt", "prompt_token_ids"}:
                refuse("prompt", prompt, "a mapping with prompt or prompt_token_ids, or both, and nothing else")
            words = prompt.get("prompt")
            if "prompt" in prompt and not isinstance(words, str):
                refuse(name, words, "text")
            if "prompt_token_ids" in prompt:
                return words, self._ids_of("prompt_token_ids", prompt["prompt_token_ids"])
            prompt = words
        if not isinstance(prompt, str):
            return None, self._ids_of(name, prompt)
        require_unicode("prompt", prompt)
        # An empty text is an empty prompt, even if the tokenizer adds a token to each text.
        ids = self._tokenizer.encode(prompt) if prompt else []
        if unknown := [i for i in ids if not 0 <= i < self._spec.vocab_size]:
            raise ValueError(
                f"prompt holds a word whose token is {unknown[0]}; the model has {self._spec.vocab_size} tokens"
            )
        return prompt, ids

    def _ids_of(self, name: str, given: Any) -> list[int]:
        ids, most = given.tolist() if _is_array(given) else given, self._spec.vocab_size
        if not isinstance(ids, Sequence) or isinstance(ids, TEXTS_AND_BYTES):
            rule = "text or a sequence of token ids" if name == "prompt" else "a sequence of token ids"
            refuse(name, ids, rule)
        for i, each in enumerate(ids):
            if not isinstance(each, Integral) or isinstance(each, bool) or not 0 <= int(each) < most:
                refuse(f"{name}[{i}]", each, f"a token id, an integer in [0, {most - 1}]")
        return [int(each) for each in ids]

    def _admit(self, ids: list[int], params: SamplingParams, stop_ids: frozenset[int]) -> int:
        """Check a prompt and its parameters. Return the length at which the request ends, prompt included: from
        `max_tokens`, or `max_model_len`.
        """
        if foreign := [each for each in self._spec.foreign_tokens if each[0] in ids]:
            token, name = foreign[0]
            raise ValueError(
                f"prompt holds token {token}, the checkpoint's {name}; its text model alone is served, which takes "
                "text and token ids"
            )
        if not ids:
            raise ValueError("prompt is empty; at least one token is needed")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            if wrong := [i for i in getattr(params, name) or () if not 0 <= i < self._spec.vocab_size]:
                named = ", ".join(map(str, wrong[:8]))
                raise ValueError(f"{name} holds {named}; ids must be in [0, {self._spec.vocab_size})")
        for name in ("logprobs", "prompt_logprobs"):
            if (number := getattr(params, name) or 0) > self._spec.vocab_size:
                raise ValueError(f"{name} is {number}; the vocabulary has {self._spec.vocab_size} tokens")
        if params.min_tokens and len(stop_ids) == self._spec.vocab_size:
            refuse("min_tokens", params.min_tokens, "0 where every token ends the request")
        if params.stop and isinstance(self._tokenizer, NoTokenizer):
            raise ValueError(f"stop is {params.stop}; without a tokenizer there is no text to find it in")
        longest = self._limits.max_model_len
        if len(ids) >= longest:
            raise ContextLengthExceeded(f"{len(ids)} tokens", longest)
        return longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens)


def _checked_params(name: str, value: object) -> SamplingParams:
    return value if isinstance(value, SamplingParams) else refuse(name, value, "SamplingParams")


def checked_adapter(name: str, value: object) -> LoRARequest:
    """Return the value if it is a LoRARequest. Else raise ValueError that names the argument."""
    return value if isinstance(value, LoRARequest) else refuse(name, value, "a LoRARequest")


_ADAPTERS = Several(maybe(checked_adapter), "a LoRARequest, None, or a list of them")
_PARAMS = Several(_checked_params, "SamplingParams, or a list of them")
_PRIORITIES = Several(Integer(), "an integer, or a list of them")


def _for_each(prompts: Sequence[Prompt], name: str, given: Any, kind: Any, several: Check) -> Sequence[Any]:
    """Return one value for each prompt. given: a value of type `kind` for all, or a list. several: check of the list.
    name: name of the argument, for errors. Raises ValueError if the list has another length than `prompts`.
    """
    listed: Sequence[Any] = (given,) * len(prompts) if isinstance(given, kind) else several(name, given)
    if len(listed) != len(prompts):
        raise ValueError(f"{name} has {len(listed)} entries for {len(prompts)} prompts")
    return listed


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, given one prompt or several. A sequence of integers is one prompt."""
    if isinstance(prompts, str | Mapping) or _is_array(prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, TEXTS_AND_BYTES):
        refuse("prompts", prompts, "text, token ids, or a sequence of these")
    if len(prompts) > 0 and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | Tensor) and value.ndim == 1


def wrapped_seed(seed: int) -> int:
    """Wrap a seed into an int64."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(seed: int, counter: int) -> int:
    """Return a 63-bit seed for the counter-th request of an engine (the splitmix64 finaliser)."""
    z = (seed * 0x9E3779B97F4A7C15 + counter) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
