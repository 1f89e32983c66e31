"""`bateleur generate`: one prompt streamed, or a file of prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from bateleur.runner.device import resolve_device
from bateleur.runner.engine.input_processor import Prompt
from bateleur.runner.llm import LLM
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> int:
    """Check the call, open the model, write."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give either a prompt or --prompt-file")
    if args.output is not None and args.prompt_file is None:
        raise ValueError("--output needs --prompt-file; the text of a single prompt goes to the terminal")
    defaults = _sampling(args)
    SamplingParams.from_dict(defaults)  # a wrong flag should not wait for the model to load
    lines = None if args.prompt_file is None else args.prompt_file.read_text(encoding="utf-8").splitlines()
    llm = LLM(
        args.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        enable_prefix_caching=args.enable_prefix_caching,
        mamba_cache_mode=args.mamba_cache_mode,
        mamba_block_size=args.mamba_block_size,
        mamba_state_policy=args.mamba_state_policy,
        mamba_retention=args.mamba_retention,
        mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype,
        draft=_draft(args),
        num_speculative_tokens=args.num_speculative_tokens,
        draft_policy=args.draft_policy,
        speculative_rule=args.speculative_rule,
        cudagraph_mode=args.cudagraph_mode,
        cudagraph_backend=args.cudagraph_backend,
        cudagraph_capture_sizes=args.cudagraph_capture_sizes,
    )
    began = time.perf_counter()
    if lines is None:
        failures = _stream(llm, args.prompt, SamplingParams.from_dict(defaults))
        report = sys.stdout
    else:
        failures = _run_file(llm, lines, defaults, args.output)
        report = sys.stderr if args.output is None else sys.stdout
    print(_closing_line(llm, time.perf_counter() - began), file=report)
    return 1 if failures else 0


def _draft(args: argparse.Namespace) -> str | None:
    """The folder of the draft head. Unless the user says otherwise, the shipped one drafts for the shipped model.

    But not drawn text on a CPU: 2.3 tokens a step do not pay for the drafts there (benchmarks/speculative.py).
    """
    if args.draft is None:
        pays = args.temperature == 0 or resolve_device(args.device).type == "cuda"
        return "auto" if args.model is None and pays else None
    return None if args.draft == "none" else str(args.draft)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = SamplingParams.names()
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def _closing_line(llm: LLM, seconds: float) -> str:
    stats = llm.get_metrics()
    count = stats.num_emitted_tokens
    line = f"{count} tokens, {count / seconds:.1f} tokens/s, {stats.tokens_per_step:.2f} tokens per step"
    rates = [f"{rate:.2f}" for rate in stats.acceptance_per_position if rate == rate]
    return f"[{line}, drafts accepted {' '.join(rates)}]" if rates else f"[{line}]"


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> int:
    """Echo the prompt and write its continuation as it grows; the number of failures."""
    sys.stdout.write(prompt)
    written, output = 0, None
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        sys.stdout.write(text[written:])
        sys.stdout.flush()
        written = len(text)
    sys.stdout.write("\n")
    if output is not None and output.outputs[0].finish_reason == "error":
        print(f"bateleur: {output.outputs[0].stop_reason}", file=sys.stderr)
        return 1
    return 0


# --- files of requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the request file: a queued request, or why it could not be queued."""

    number: int
    request_id: str | None
    error: str | None


def _run_file(llm: LLM, lines: list[str], defaults: dict[str, Any], output: Path | None) -> int:
    """Run every line and write the results in order; a bad line gets its error, the others go on."""
    queued = [_queue(llm, number, line, defaults) for number, line in enumerate(lines, 1) if line.strip()]
    results: dict[str, RequestOutput] = {}
    failures = 0
    with _sink(output) as sink, tqdm(total=len(queued), unit="request", disable=None) as bar:
        for entry in queued:
            while entry.request_id is not None and entry.request_id not in results:
                for result in llm.step():
                    results[result.request_id] = result
                    bar.update(1)
            record = _record(entry, results)
            failures += "error" in record
            bar.update(entry.request_id is None)
            sink.write(json.dumps(record, ensure_ascii=False) + "\n")
    return failures


@contextmanager
def _sink(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8") as sink:
        yield sink


def _queue(llm: LLM, number: int, line: str, defaults: dict[str, Any]) -> _Line:
    try:
        prompt, params = _parse(line, defaults)
        return _Line(number, llm.add_request(prompt, params), None)
    except ValueError as error:
        return _Line(number, None, str(error))


def _parse(line: str, defaults: dict[str, Any]) -> tuple[Prompt, SamplingParams]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the line is a JSON {type(fields).__name__}; an object is needed")
    prompt = {key: fields.pop(key) for key in ("prompt", "prompt_token_ids") if key in fields}
    if len(prompt) != 1:
        raise ValueError("the line needs exactly one of prompt, prompt_token_ids")
    return prompt, SamplingParams.from_dict(defaults | fields)


def _record(entry: _Line, results: dict[str, RequestOutput]) -> dict[str, Any]:
    if entry.request_id is None:
        return {"line": entry.number, "error": entry.error}
    result = results.pop(entry.request_id)
    completion = result.outputs[0]
    record: dict[str, Any] = {
        "line": entry.number,
        "prompt": result.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = [
            {
                str(token): {"logprob": lp.logprob, "rank": lp.rank, "decoded_token": lp.decoded_token}
                for token, lp in e.items()
            }
            for e in completion.logprobs
        ]
    if completion.finish_reason == "error":
        record["error"] = completion.stop_reason
    return record
