"""Runs a file of requests (`bateleur batch`, `bateleur generate --prompt-file`). Writes results as requests end."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.assets import shipped_model
from bateleur.runner.cli.console import DecodeRate, name_in_errors, print_status
from bateleur.runner.cli.line_formats import LineFormat, LineRequest, NativeFormat, OpenAIBatchFormat
from bateleur.runner.cli.options import given_options
from bateleur.runner.cli.parquet import is_parquet, write_parquet
from bateleur.runner.cli.request_file import RequestFile
from bateleur.runner.cli.result_file import ResultFile, require_other_file

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM
    from bateleur.runner.lora.adapter_manager import LoRARequest
    from bateleur.runner.outputs import RequestOutput
    from bateleur.runner.text.tokenizer import Tokenizer

_DIGEST_OPTIONS = (
    *("dtype", "quantization", "kv_cache_dtype", "mamba_ssm_cache_dtype", "hf_overrides", "max_model_len"),
    *("tokenizer", "skip_tokenizer_init", "speculative_rule"),
    *("chat_template", "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "lora_modules"),
)
"""Options other than the model that may change a result. A result is reused only if they are equal."""

Result = tuple[int, dict[str, Any], str | None]  # line number, result record, and error message if the request failed
RunRequests = Callable[[RequestFile, Callable[[int], bool], int], Iterator[Result]]
"""run(requests, has_result, count): yields the results of the `count` lines for which `has_result` is False."""


def run_file(args: argparse.Namespace, native: NativeFormat, batch: OpenAIBatchFormat, run: RunRequests) -> int:
    """Run the requests that have no result yet, and sort the results. Returns exit code 1 if any failed, else 0.

    native, batch: the two formats that the file may have. run: yields the results of requests, see `RunRequests`.
    """
    config = (args.model or shipped_model()) / "config.json"
    contents = config.read_text("utf-8", "replace") if config.is_file() else None
    engine = {"model": contents, **given_options(args, _DIGEST_OPTIONS)}
    with closing(RequestFile(args.prompt_file, native, batch, engine)) as requests:
        lines = args.output
        require_other_file(lines, args.prompt_file)
        if lines is not None and is_parquet(lines):  # cannot be appended to: collect JSON lines in a file next to it
            lines = lines.with_name(f"{lines.name}.jsonl")
        with closing(ResultFile(lines, args.prompt_file, overwrite=args.overwrite)) as results:
            requests.scan(results.folder)
            status = _run(args, requests, results, run)
        if lines != args.output:
            with name_in_errors(args.output):
                write_parquet(lines, args.output)
        return status


def _run(args: argparse.Namespace, requests: RequestFile, results: ResultFile, run: RunRequests) -> int:
    if num_ended := results.resume(requests):
        print_status(f"resuming: {num_ended} of {len(requests)} results are in {args.output} already")
    num_failed, first_error = 0, ""
    count = len(requests) - num_ended
    try:
        for line, record, error in run(requests, results.has_result, count) if count else ():
            results.write(line, record)
            num_ended += 1
            if error is not None:
                num_failed, first_error = num_failed + 1, first_error or error
        results.finish()
    except KeyboardInterrupt as interrupt:
        hint = f"{num_ended} of {len(requests)} requests have ended"
        if args.output is not None:
            hint += f"; the same command resumes from {args.output}"
        raise KeyboardInterrupt(hint) from interrupt
    if num_failed:
        print_status(f"{num_failed} of {len(requests)} requests failed; the first: {first_error}")
    return 1 if num_failed else 0


def run_locally(
    requests: RequestFile,
    has: Callable[[int], bool],
    count: int,
    open_llm: Callable[[], LLM],
    adapters: Mapping[str, str],
) -> Iterator[Result]:
    """Run requests on an engine of this process; yields results as they end.

    has: whether a line has a result, so that it is not run. count: number of lines to run. open_llm: loads the engine;
    called at the first valid request. adapters: folders of LoRA adapters by name.
    """
    remaining, line_format = requests.remaining(has), requests.parser.format
    for request in remaining:
        if request.error is None:
            break
        count -= 1
        yield failed_result(line_format, request, request.error)
    else:
        return
    window = _RequestWindow(open_llm(), line_format, adapters)
    with tqdm(total=count, unit="request", disable=None) as bar:
        for result in window.run(chain([request], remaining)):
            yield result
            bar.update(1)
    print_status(window.rate.summary())


def failed_result(line_format: LineFormat, request: LineRequest, error: str) -> Result:
    """Return the result of a request that cannot run."""
    return request.line, line_format.error_result(request, error), error


def ended_result(
    line_format: LineFormat, request: LineRequest, outputs: list[RequestOutput], tokenizer: Tokenizer
) -> Result:
    """Return the result of a request that ran. outputs: one per prompt; some may have ended with an error."""
    errors = (each for output in outputs for each in output.outputs if each.finish_reason == "error")
    error = next((f"{request.where}: {each.stop_reason}" for each in errors), None)
    return request.line, line_format.result(request, outputs, error, tokenizer), error


def adapter_of(adapters: Mapping[str, str], name: str | None) -> LoRARequest | None:
    """Return the LoRA adapter `name`; None for the base model's name. adapters: folders by name."""
    if name is None or name not in adapters:
        return None
    from bateleur.runner.lora.adapter_manager import LoRARequest

    return LoRARequest(name, lora_path=adapters[name])


class _RequestWindow:
    """The requests of the file that are in the engine: up to 2 * max_num_seqs, so that its queue never runs empty."""

    def __init__(self, llm: LLM, line_format: LineFormat, adapters: Mapping[str, str]) -> None:
        self._llm, self._format, self._adapters, self.rate = llm, line_format, adapters, DecodeRate(llm)
        self._running: dict[str, tuple[LineRequest, list[RequestOutput | None], int]] = {}
        """By request id of the engine: the line, the outputs of all its prompts, and the index of this prompt."""

    def run(self, requests: Iterator[LineRequest]) -> Iterator[Result]:
        for request in requests:
            yield from self._add(request)
            while len(self._running) >= 2 * self._llm.limits.max_num_seqs:
                yield from self._step()
        while self._running:
            yield from self._step()

    def _add(self, request: LineRequest) -> Iterator[Result]:
        """Add all prompts of a request to the engine. If one is invalid, add none and yield an error result."""
        api_request = request.api_request
        if api_request is None:
            yield failed_result(self._format, request, str(request.error))
            return
        ids: list[str] = []
        try:
            for prompt, params in self._format.engine_inputs(api_request, self._llm.tokenizer):
                adapter = adapter_of(self._adapters, api_request.model)
                ids.append(self._llm.add_request(prompt, params, priority=api_request.priority, lora_request=adapter))
        except ValueError as error:
            for each in ids:
                self._llm.abort(each)
            yield failed_result(self._format, request, f"{request.where}: {error}")
        else:
            outputs: list[RequestOutput | None] = [None] * len(ids)
            self._running |= {each: (request, outputs, i) for i, each in enumerate(ids)}

    def _step(self) -> Iterator[Result]:
        """Run one engine step and yield the results of requests whose last prompt has ended."""
        for output in self._llm.step():
            request, outputs, index = self._running.pop(output.request_id)
            outputs[index] = output
            ended = [each for each in outputs if each is not None]
            if len(ended) == len(outputs):
                yield ended_result(self._format, request, ended, self._llm.tokenizer)
        self.rate.end_step()
