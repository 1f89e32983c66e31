"""Runs a file of requests: as many at once as the engine takes, each result written as it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.cli.pace import Pace
from bateleur.runner.cli.request_file import LineRequest
from bateleur.runner.cli.result_file import ResultStream

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM
    from bateleur.runner.outputs import RequestOutput


class Batch:
    """The requests of a file on their way.

    Args:
        requests: those still to run.
        results: takes what becomes of them.

    `waiting` are those that the engine has not got yet; `num_ended` counts results, `errors` what failed.
    """

    def __init__(self, requests: Sequence[LineRequest], results: ResultStream) -> None:
        self.waiting = deque(requests)
        self.num_ended = 0
        self.errors: list[str] = []
        self._running: dict[str, LineRequest] = {}
        self._results = results

    def refuse(self) -> None:
        """Write what is wrong with the lines that can't run, ahead of all others."""
        requests, self.waiting = self.waiting, deque(each for each in self.waiting if each.error is None)
        for request in requests:
            if request.error is not None:
                self._put(request, {"error": request.error})

    def run(self, llm: LLM, pace: Pace) -> None:
        """Run the rest. Twice as many are queued as run at once, so that the engine always has another at hand."""
        with tqdm(total=len(self.waiting), unit="request", disable=None) as bar:
            before = self.num_ended
            while self.waiting or self._running:
                while self.waiting and len(self._running) < 2 * llm.limits.max_num_seqs:
                    self._add(llm, self.waiting.popleft())
                for output in llm.step():
                    request = self._running.pop(output.request_id)
                    self._put(request, _fields(request, output))
                pace.tick()
                bar.update(self.num_ended - before - bar.n)

    def _add(self, llm: LLM, request: LineRequest) -> None:
        try:
            self._running[llm.add_request(request.prompt, request.params)] = request
        except ValueError as error:
            self._put(request, {"error": f"{request.where}: {error}"})

    def _put(self, request: LineRequest, fields: dict[str, Any]) -> None:
        if "error" in fields:
            self.errors.append(fields["error"])
        head = {"line": request.line, "id": request.id, "request": request.digest}
        self._results.write(head | fields)
        self.num_ended += 1


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
