"""`bateleur generate`: one prompt streamed, or a file of prompts."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.assets import shipped_model
from bateleur.runner.cli.console import Pace, say, write_text
from bateleur.runner.cli.options import DEFAULTS, ENGINE, FOR_SILENT_MODELS, given
from bateleur.runner.cli.request_file import LineRequest, read_requests
from bateleur.runner.cli.result_file import ResultFile, ResultStream
from bateleur.runner.generation_config import recommended_sampling
from bateleur.runner.sampling_params import SamplingParams

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM
    from bateleur.runner.outputs import RequestOutput

_DECIDING = ("dtype", "max_model_len", "mamba_ssm_cache_dtype", "skip_tokenizer_init", "speculative_rule")
"""Arguments of the engine that may change a token, beside the model."""


def run(args: argparse.Namespace) -> int:
    """Check the call, before torch and the model are loaded; then open the model, and write."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give either a prompt or --prompt-file")
    recommended = recommended_sampling(args.model or shipped_model()) or FOR_SILENT_MODELS
    defaults = DEFAULTS | recommended | given(args, SamplingParams.names())
    params = SamplingParams.from_dict(defaults)
    if args.overwrite and args.output is None:
        raise ValueError("--overwrite needs --output")
    if getattr(args, "num_threads", 1) < 1:
        raise ValueError(f"--num-threads is {args.num_threads}; it must be at least 1")
    if args.prompt_file is not None:
        return _run_file(args, defaults)
    if args.output is not None:
        raise ValueError("--output needs --prompt-file; the text of a single prompt goes to stdout")
    if params.logprobs is not None:
        raise ValueError("--logprobs needs --prompt-file; of a single prompt only the text is written")
    return _stream(args, params)


def _open(args: argparse.Namespace, temperature: float) -> LLM:
    say("loading torch")
    import torch

    from bateleur.runner.llm import LLM

    single = args.prompt is not None
    if "num_threads" in args or (single and args.model is None):
        # A step of one request of the shipped model is too short to be shared: beside other work, threads that wait
        # for each other take ten times as long.
        torch.set_num_threads(getattr(args, "num_threads", 1))
    say(f"opening {args.model or 'the shipped model'}")
    engine = given(args, ENGINE)
    return LLM(args.model, **(engine | {"draft": _draft(args, temperature)}))


def _draft(args: argparse.Namespace, temperature: float) -> str | None:
    """The folder of the draft head. Unless the user says otherwise, the shipped one drafts for the shipped model.

    But not drawn text on a CPU: 2.3 tokens a step do not pay for the drafts there (benchmarks/speculative.py).
    """
    from bateleur.runner.device import resolve_device

    if "draft" not in args:
        pays = temperature == 0 or resolve_device(getattr(args, "device", "auto")).type == "cuda"
        return "auto" if args.model is None and pays else None
    return None if args.draft == "none" else str(args.draft)


def _stream(args: argparse.Namespace, params: SamplingParams) -> int:
    """Echo the prompt and write its continuation as it grows."""
    llm = _open(args, params.temperature)
    outputs, pace = llm.stream(args.prompt, params), Pace(llm)
    write_text(args.prompt)
    written, completion = 0, None
    for output in outputs:
        pace.tick()
        completion = output.outputs[0]
        write_text(completion.text[written:])
        written = len(completion.text)
    write_text("\n")
    say(pace.line())
    if completion is not None and completion.finish_reason == "error":
        say(str(completion.stop_reason))
        return 1
    return 0


def _run_file(args: argparse.Namespace, defaults: dict[str, Any]) -> int:
    """Run the requests that have no result yet, and put all in order; the exit code says whether any failed."""
    config = (args.model or shipped_model()) / "config.json"
    model = config.read_text("utf-8", "replace") if config.is_file() else None
    requests = read_requests(args.prompt_file, defaults, {"model": model, **given(args, _DECIDING)})
    results = ResultStream()
    if args.output is not None:
        results = ResultFile(args.output, args.prompt_file, overwrite=args.overwrite)
    with closing(results):
        if kept := results.kept(requests):
            say(f"{len(kept)} of {len(requests)} results are in {args.output} already")
        left = [request for request in requests if request.line not in kept]
        errors, num_ended = [], len(kept)
        try:
            for request, fields in _ended(args, defaults["temperature"], left):
                if "error" in fields:
                    errors.append(fields["error"])
                results.write({"line": request.line, "id": request.id, "request": request.digest} | fields)
                num_ended += 1
            results.finish()
        except KeyboardInterrupt as interrupt:
            hint = f"{num_ended} of {len(requests)} requests have ended"
            if args.output is not None:
                hint += f"; the same command goes on from {args.output}"
            raise KeyboardInterrupt(hint) from interrupt
    if errors:
        say(f"{len(errors)} of {len(requests)} requests failed; the first: {errors[0]}")
    return 1 if errors else 0


def _ended(
    args: argparse.Namespace, temperature: float, requests: list[LineRequest]
) -> Iterator[tuple[LineRequest, dict[str, Any]]]:
    """Lines that can't run, and then each request as it ends."""
    yield from ((request, {"error": request.error}) for request in requests if request.error is not None)
    if waiting := [request for request in requests if request.error is None]:
        llm = _open(args, temperature)
        pace = Pace(llm)
        yield from _run_batch(llm, waiting, pace)
        say(pace.line())


def _run_batch(
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
