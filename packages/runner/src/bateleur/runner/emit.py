"""From drawn token ids to what the caller sees: stop conditions, log probabilities, text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bateleur.runner.detokenizer import decode_all
from bateleur.runner.outputs import Logprob
from bateleur.runner.request import Request
from bateleur.runner.sampler import Sampled
from bateleur.runner.stats import EngineStats
from bateleur.runner.tokenizer import Tokenizer


class Emitter:
    """Appends drawn tokens to their requests and ends those that are done."""

    def __init__(self, tokenizer: Tokenizer, stats: EngineStats) -> None:
        self._tokenizer = tokenizer
        self._stats = stats

    def emit(self, requests: Sequence[Request], sampled: Sampled) -> tuple[list[int], list[Request]]:
        """Copy the ids to the host (the step's only wait for the device) and apply them.

        Returns the ids, and the requests that have something to report: those that ended and those that stream. A
        row whose logits held a NaN has no token (-1): its request ends with `finish_reason` "error".
        """
        tokens: list[int] = torch.where(sampled.bad, -1, sampled.token_ids).tolist()
        if sampled.logprobs is not None:
            self._add_logprobs(requests, sampled, tokens)
        reports = []
        for request, token in zip(requests, tokens, strict=True):
            if self._apply(request, token) or request.stream:
                reports.append(request)
        self._stats.num_sampled_rows += len(tokens)
        self._stats.num_emitted_tokens += len(tokens) - tokens.count(-1)
        return tokens, reports

    def _apply(self, request: Request, token: int) -> bool:
        """Append a token to its request; whether that ends it."""
        if token < 0:
            request.finish_reason, request.stop_reason = "error", "the model's logits are not numbers (NaN)"
            return True
        output = request.output_token_ids
        output.append(token)
        if request.detokenizer is not None and self._text_stops(request, token):
            return True
        if token in request.stop_token_ids:
            request.finish_reason = "stop"
            request.stop_reason = token if token in request.params.stop_token_ids else None
            return True
        if len(request.prompt_token_ids) + len(output) >= request.max_total_tokens:
            request.finish_reason = "length"
            return True
        return False

    def _text_stops(self, request: Request, token: int) -> bool:
        """Feed the detokeniser; True if a stop string is complete."""
        detokenizer = request.detokenizer
        assert detokenizer is not None
        if token in request.stop_token_ids:
            return False  # a stop token is not part of the text
        detokenizer.push(token)
        if detokenizer.stopped is None:
            return False
        request.finish_reason, request.stop_reason = "stop", detokenizer.stopped
        return True

    def close(self, request: Request) -> None:
        """Settle the final text of a request that has ended."""
        if request.detokenizer is not None:
            request.detokenizer.finish()
            request.text = request.detokenizer.text
            return
        ids = request.output_token_ids
        if ids and request.finish_reason == "stop" and ids[-1] in request.stop_token_ids:
            ids = ids[:-1]
        request.text = decode_all(self._tokenizer, ids, prompt_token_ids=request.prompt_token_ids)

    def _add_logprobs(self, requests: Sequence[Request], sampled: Sampled, tokens: Sequence[int]) -> None:
        assert sampled.logprobs is not None
        top_ids, top_values = sampled.logprobs.top_ids.tolist(), sampled.logprobs.top_values.tolist()
        values, ranks = sampled.logprobs.sampled.tolist(), sampled.logprobs.rank.tolist()
        for i, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            wanted = request.params.logprobs
            if wanted is None or token < 0:
                continue
            entry = {token: self._logprob(token, values[i], ranks[i])}
            for rank in range(wanted):
                entry.setdefault(
                    top_ids[i][rank], self._logprob(top_ids[i][rank], top_values[i][rank], rank + 1)
                )
            request.logprobs.append(entry)

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, self._tokenizer.decode([token], skip_special_tokens=False))
