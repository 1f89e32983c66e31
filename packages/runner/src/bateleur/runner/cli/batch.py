"""`bateleur batch` and `bateleur generate --prompt-file`: the requests of a file, each result as it ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.assets import shipped_model
from bateleur.runner.cli.console import Pace, naming, say
from bateleur.runner.cli.line_forms import BatchForm, Form, LineRequest, OwnForm
from bateleur.runner.cli.options import given
from bateleur.runner.cli.parquet import is_parquet, write_results
from bateleur.runner.cli.request_file import RequestFile
from bateleur.runner.cli.result_file import ResultFile, ResultStream

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM
    from bateleur.runner.outputs import RequestOutput

_DECIDING = (
    *("dtype", "max_model_len", "mamba_ssm_cache_dtype", "skip_tokenizer_init", "speculative_rule"),
    *("chat_template", "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice"),
)
"""Arguments that may change a token, beside the model, or what is made of the text."""

Result = tuple[int, dict[str, Any], str | None]
"""A line, what is written of it, and what went wrong."""
Run = Callable[[RequestFile, Callable[[int], bool], int], Iterator[Result]]
"""Results of the requests of a file, of all lines but those that have one, which are so many."""


def run_file(args: argparse.Namespace, own: OwnForm, batch: BatchForm, run: Run) -> int:
    """Run the requests that have no result yet, and put all in order; the exit code says whether any failed.

    run: gives their results, each as it ends; asked when there is a first request.
    """
    deciding = {"model": _model_text(args), **given(args, _DECIDING)}
    with closing(RequestFile(args.prompt_file, own, batch, deciding)) as requests:
        results, lines = ResultStream(), args.output
        if lines is not None and is_parquet(lines):  # which can't grow: the lines beside it do
            lines = lines.with_name(f"{lines.name}.jsonl")
        if lines is not None:
            results = ResultFile(lines, args.prompt_file, overwrite=args.overwrite)
        with closing(results):
            requests.survey(results.folder)
            status = _run(args, requests, results, run)
        if lines != args.output:
            with naming(args.output):
                write_results(lines, args.output)
        return status


def _model_text(args: argparse.Namespace) -> str | None:
    config = (args.model or shipped_model()) / "config.json"
    return config.read_text("utf-8", "replace") if config.is_file() else None


def _run(args: argparse.Namespace, requests: RequestFile, results: ResultStream, run: Run) -> int:
    if num_ended := results.begin(requests):
        say(f"{num_ended} of {len(requests)} results are in {args.output} already")
    num_failed, first_error = 0, ""
    count = len(requests) - num_ended
    try:
        for line, record, error in run(requests, results.has, count) if count else ():
            results.write(line, record)
            num_ended += 1
            if error is not None:
                num_failed, first_error = num_failed + 1, first_error or error
        results.finish()
    except KeyboardInterrupt as interrupt:
        hint = f"{num_ended} of {len(requests)} requests have ended"
        if args.output is not None:
            hint += f"; the same command goes on from {args.output}"
        raise KeyboardInterrupt(hint) from interrupt
    if num_failed:
        say(f"{num_failed} of {len(requests)} requests failed; the first: {first_error}")
    return 1 if num_failed else 0


def run_here(
    requests: RequestFile, has: Callable[[int], bool], count: int, open_llm: Callable[[], LLM]
) -> Iterator[Result]:
    """Each request as it ends, in an engine of this process; lines that can't run when their turn comes."""
    waiting, form = requests.left(has), requests.form
    for request in waiting:
        if request.error is None:
            break
        count -= 1
        yield _failed(form, request, request.error)
    else:
        return
    llm = open_llm()
    runs, pace = _Runs(llm, form), Pace(llm)
    with tqdm(total=count, unit="request", disable=None) as bar:
        for result in _stepped(runs, chain([request], waiting), pace):
            yield result
            bar.update(1)
    say(pace.line())


def _stepped(runs: _Runs, waiting: Iterator[LineRequest], pace: Pace) -> Iterator[Result]:
    for request in waiting:
        yield from runs.start(request)
        while runs.full:
            yield from runs.step()
            pace.tick()
    while runs.any:
        yield from runs.step()
        pace.tick()


def _failed(form: Form, request: LineRequest, error: str) -> Result:
    return request.line, form.failed(request, error), error


@dataclass(slots=True)
class _Run:
    """A request that runs, and what its prompts have given so far."""

    request: LineRequest
    outputs: list[RequestOutput | None]


class _Runs:
    """The window of requests in the engine: twice as many as run at once, so that it always has another at hand."""

    def __init__(self, llm: LLM, form: Form) -> None:
        self._llm, self._form = llm, form
        self._running: dict[str, tuple[_Run, int]] = {}
        """By name in the engine, and which of the prompts it is."""

    @property
    def any(self) -> bool:
        """Whether anything runs."""
        return bool(self._running)

    @property
    def full(self) -> bool:
        """Whether the next request had better wait."""
        return len(self._running) >= 2 * self._llm.limits.max_num_seqs

    def start(self, request: LineRequest) -> Iterator[Result]:
        """Hand the prompts of a request to the engine, all of them or none; yields a result if it can't run."""
        asked = request.asked
        if asked is None:
            yield _failed(self._form, request, str(request.error))
            return
        names: list[str] = []
        try:
            for prompt, params in self._form.prepared(asked, self._llm.tokenizer):
                names.append(self._llm.add_request(prompt, params, priority=asked.priority))
        except ValueError as error:
            for name in names:
                self._llm.abort(name)
            yield _failed(self._form, request, f"{request.where}: {error}")
        else:
            run = _Run(request, [None] * len(names))
            self._running |= {name: (run, i) for i, name in enumerate(names)}

    def step(self) -> Iterator[Result]:
        """One step of the engine, and the requests that end with it."""
        for output in self._llm.step():
            run, place = self._running.pop(output.request_id)
            run.outputs[place] = output
            outputs = [each for each in run.outputs if each is not None]
            if len(outputs) == len(run.outputs):
                yield self._ended(run.request, outputs)

    def _ended(self, request: LineRequest, outputs: list[RequestOutput]) -> Result:
        ends = (each for output in outputs for each in output.outputs if each.finish_reason == "error")
        error = next((f"{request.where}: {each.stop_reason}" for each in ends), None)
        return request.line, self._form.ended(request, outputs, error, self._llm.tokenizer), error
