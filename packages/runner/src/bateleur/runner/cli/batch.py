"""Runs a file of requests: as many at once as the engine takes, each told as it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.cli.console import Pace
from bateleur.runner.cli.request_file import LineRequest

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM
    from bateleur.runner.outputs import RequestOutput


def run_batch(
    llm: LLM, requests: Sequence[LineRequest], pace: Pace
) -> Iterator[tuple[LineRequest, dict[str, Any]]]:
    """Each request as it ends, with what became of it; `error` among the fields says what went wrong.

    Twice as many are queued as run at once, so that the engine always has another at hand.
    """
    waiting, running = deque(requests), dict[str, LineRequest]()
    with tqdm(total=len(requests), unit="request", disable=None) as bar:
        while waiting or running:
            while waiting and len(running) < 2 * llm.limits.max_num_seqs:
                request = waiting.popleft()
                try:
                    running[llm.add_request(request.prompt, request.params)] = request
                except ValueError as error:
                    yield request, {"error": f"{request.where}: {error}"}
            for output in llm.step():
                request = running.pop(output.request_id)
                yield request, _fields(request, output)
            pace.tick()
            bar.update(len(requests) - len(waiting) - len(running) - bar.n)


def _fields(request: LineRequest, output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    fields: dict[str, Any] = {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [
            {token: asdict(each) for token, each in position.items()} for position in completion.logprobs
        ]
    if completion.finish_reason == "error":
        fields["error"] = f"{request.where}: {completion.stop_reason}"
    return fields
