"""`bateleur generate`: one prompt streamed, or a file of prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.assets import default_drafts, shipped_model
from bateleur.runner.cli.batch import Result, Run, run_file, run_here
from bateleur.runner.cli.console import Pace, say, tell_of_graphs, write_text
from bateleur.runner.cli.line_forms import BatchForm, OwnForm
from bateleur.runner.cli.options import DEFAULTS, ENGINE, FOR_SILENT_MODELS, follows_another, given
from bateleur.runner.cli.request_file import RequestFile
from bateleur.runner.generation_config import recommended_sampling
from bateleur.runner.replicas.config import ReplicaConfig
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.serve.openai.names import served_names
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.options import options_of

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM


def run(args: argparse.Namespace) -> int:
    """Check the call, before torch and the model are loaded; then open the model, and write."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give either a prompt or --prompt-file")
    recommended = recommended_sampling(
        args.model or shipped_model(),
        getattr(args, "generation_config", "auto"),
        getattr(args, "override_generation_config", None),
    )
    defaults = DEFAULTS | (recommended or FOR_SILENT_MODELS) | given(args, SamplingParams.names())
    params = SamplingParams.from_dict(defaults)
    if args.overwrite and args.output is None:
        raise ValueError("--overwrite needs --output")
    if getattr(args, "num_threads", 1) < 1:
        raise ValueError(f"--num-threads is {args.num_threads}; it must be at least 1")
    if follows_another(args):
        _open(args)
    if args.prompt_file is not None:
        spoken = {"seed": defaults["seed"], **recommended, **given(args, SamplingParams.names())}
        parsers = ParserOptions(**given(args, [each.name for each in options_of(ParserOptions)]))
        batch = BatchForm(spoken, served_names(args.model, args.served_model_name), parsers)
        return run_file(args, OwnForm(defaults), batch, _runner(args))
    if args.output is not None:
        raise ValueError("--output needs --prompt-file; the text of a single prompt goes to stdout")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} needs --prompt-file; of a single prompt only the text is written")
    return _stream(args, params)


def batch(args: argparse.Namespace) -> int:
    """`bateleur batch`: a file of prompts alone, on as many engines as are asked for."""
    args.prompt = None
    return run(args)


def _runner(args: argparse.Namespace) -> Run:
    """What runs a file of requests: an engine here, or several on Ray."""
    replicas = ReplicaConfig(**given(args, ("replicas", "ray_address")))
    if replicas.alone:
        return partial(run_here, open_llm=lambda: _open(args))
    if find_spec("ray") is None:
        raise ValueError("several replicas need ray, not installed here: pip install 'bateleur-runner[ray]'")
    if args.prompt_file == "-":
        refuse("input", "-", "a file with replicas: each of them reads it")

    def run_on_ray(requests: RequestFile, has: Callable[[int], bool], count: int) -> Iterator[Result]:
        say("starting Ray")
        from bateleur.runner.cli.ray_batch import results_on_ray
        from bateleur.runner.replicas.application import Plan

        engine = {"model": args.model, **_engine(args)}
        threads = getattr(args, "num_threads", None)
        with tqdm(total=count, unit="request", disable=None) as bar:
            for result in results_on_ray(
                requests, has, Plan(engine=engine, replicas=replicas, num_threads=threads)
            ):
                yield result
                bar.update(1)

    return run_on_ray


def _open(args: argparse.Namespace) -> LLM:
    say("loading torch")
    import torch

    from bateleur.runner.llm import LLM

    single = args.prompt is not None
    if "num_threads" in args or (single and args.model is None):
        # A step of one request of the shipped model is too short to be shared: beside other work, threads that wait
        # for each other take ten times as long.
        torch.set_num_threads(getattr(args, "num_threads", 1))
    say(f"opening {args.model or 'the shipped model'}")
    llm = LLM(args.model, **_engine(args))
    tell_of_graphs(llm)
    return llm


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine but for the model; "none" is no draft."""
    engine = given(args, ENGINE)
    engine |= default_drafts(engine | {"model": args.model}, alone=args.prompt is not None)
    return engine | {"draft": None} if engine.get("draft") == "none" else engine


def _stream(args: argparse.Namespace, params: SamplingParams) -> int:
    """Echo the prompt and write its continuation as it grows."""
    llm = _open(args)
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
