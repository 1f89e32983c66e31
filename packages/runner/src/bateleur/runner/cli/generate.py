"""`bateleur generate` and `bateleur batch`: stream one prompt, or run a file of requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bateleur.runner.assets import default_drafts, shipped_model
from bateleur.runner.cli import options
from bateleur.runner.cli.batch import Result, RunRequests, adapter_of, run_file, run_locally
from bateleur.runner.cli.console import DecodeRate, print_graph_costs, print_status, write_text
from bateleur.runner.cli.line_formats import NativeFormat, OpenAIBatchFormat
from bateleur.runner.cli.options import ENGINE_OPTIONS, given_options
from bateleur.runner.cli.request_file import RequestFile
from bateleur.runner.replicas.config import ReplicaConfig
from bateleur.runner.sampling_params import SamplingParams, recommended_sampling
from bateleur.runner.serve.config import ServeConfig, served_names
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.utils.arguments import refuse

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM


def run(args: argparse.Namespace) -> int:
    """Check all arguments before torch and the model are loaded; then generate. Returns the exit code."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give either a prompt or --prompt-file")
    options.check_num_threads(args)
    source, override = getattr(args, "generation_config", "auto"), getattr(args, "override_generation_config", None)
    recommended = recommended_sampling(args.model or shipped_model(), source, override)
    given = given_options(args, SamplingParams.names())
    defaults = options.SAMPLING_DEFAULTS | (recommended or options.FALLBACK_SAMPLING) | given
    params = SamplingParams.from_dict(defaults)
    if args.overwrite and args.output is None:
        raise ValueError("--overwrite needs --output")
    adapters = _adapters(args)
    if options.is_follower_rank(args):
        _open(args)
    if args.prompt_file is not None:
        parsers = ParserOptions(**given_options(args, ParserOptions))
        names = served_names(args.model, args.served_model_name)
        batch = OpenAIBatchFormat({"seed": defaults["seed"], **recommended, **given}, names, parsers, adapters)
        return run_file(args, NativeFormat(defaults, (*names, *adapters)), batch, _request_runner(args, adapters))
    if args.output is not None:
        raise ValueError("--output needs --prompt-file; the text of a single prompt goes to stdout")
    for name in ("logprob_token_ids", "logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} needs --prompt-file; for a single prompt only the text is printed")
    if len(adapters) > 1:
        refuse("lora_modules", list(adapters), "one adapter for a single prompt")
    return _stream(args, params, adapters)


def _adapters(args: argparse.Namespace) -> dict[str, str]:
    """Return the folders of the LoRA adapters of --lora-modules, by name."""
    modules = ServeConfig(**given_options(args, ("lora_modules",))).lora_modules
    if modules and not getattr(args, "enable_lora", False):
        refuse("lora_modules", modules, "left out without enable_lora")
    names = [*served_names(args.model, args.served_model_name), *(name for name, _ in modules)]
    for name, _ in modules:
        if names.count(name) > 1:
            refuse("lora_modules", modules, f"a name for each adapter that no other model has; {name!r} is taken")
    return dict(modules)


def _request_runner(args: argparse.Namespace, adapters: Mapping[str, str]) -> RunRequests:
    replicas = ReplicaConfig(**given_options(args, ("replicas", "ray_address")))
    if replicas.is_single:
        return partial(run_locally, open_llm=lambda: _open(args), adapters=adapters)
    if adapters:
        refuse("lora_modules", list(adapters), "left out with replicas, which do not load adapters together")
    options.check_ray()
    source = Path(args.prompt_file)
    if args.prompt_file == "-" or (source.exists() and not source.is_file()):
        rule = "a regular file if replicas is given, because each replica reads it; write the requests to a file first"
        refuse("input", args.prompt_file, rule)

    def run_on_replicas(requests: RequestFile, has: Callable[[int], bool], count: int) -> Iterator[Result]:
        print_status("starting Ray")
        from bateleur.runner.cli.ray_batch import run_on_ray
        from bateleur.runner.replicas.application import DeploymentPlan

        engine = {"model": args.model, **_engine_options(args)}
        plan = DeploymentPlan(engine=engine, replicas=replicas, num_threads=getattr(args, "num_threads", None))
        with tqdm(total=count, unit="request", disable=None) as bar:
            for result in run_on_ray(requests, has, plan):
                yield result
                bar.update(1)

    return run_on_replicas


def _open(args: argparse.Namespace) -> LLM:
    print_status("loading torch")
    import torch

    from bateleur.runner.llm import LLM

    if "num_threads" in args or (args.prompt is not None and args.model is None):
        # One step of the shipped model is too short for several threads: on a loaded machine threads that wait for each
        # other made it ten times slower.
        torch.set_num_threads(getattr(args, "num_threads", 1))
    print_status(f"loading {args.model or 'the shipped model'}")
    llm = LLM(args.model, **_engine_options(args))
    print_graph_costs(llm)
    return llm


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `LLM` except the model. The draft "none" becomes None."""
    engine = given_options(args, ENGINE_OPTIONS)
    engine |= default_drafts(engine | {"model": args.model}, alone=args.prompt is not None)
    return engine | {"draft": None} if engine.get("draft") == "none" else engine


def _stream(args: argparse.Namespace, params: SamplingParams, adapters: Mapping[str, str]) -> int:
    """Print the prompt, then the output as it is generated. adapters: none, or one to use. Returns the exit code."""
    llm = _open(args)
    adapter = adapter_of(adapters, next(iter(adapters), None))
    outputs, rate = llm.stream(args.prompt, params, lora_request=adapter), DecodeRate(llm)
    write_text(args.prompt)
    written, completion = 0, None
    for output in outputs:
        rate.end_step()
        completion = output.outputs[0]
        write_text(completion.text[written:])
        written = len(completion.text)
    write_text("\n")
    print_status(rate.summary())
    if completion is not None and completion.finish_reason == "error":
        print_status(str(completion.stop_reason))
        return 1
    return 0
