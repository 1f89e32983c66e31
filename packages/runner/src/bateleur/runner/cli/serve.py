"""`bateleur serve`: a model at an address."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from bateleur.runner.cli.console import say, tell_of_graphs, write_text
from bateleur.runner.cli.options import ENGINE, follows_another, given
from bateleur.runner.cli.vllm_flags import check_vllm_flags
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.replicas.config import NOT_OF_RAY, ReplicaConfig
from bateleur.runner.serve.address import address_of, bound, check_tls
from bateleur.runner.serve.config import ServeConfig, served_engine
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.options import options_of


def run(args: argparse.Namespace) -> int:
    """Check the call and take the address, before torch and the model are loaded; then serve until a signal comes."""
    check_vllm_flags(args)
    if args.named_model is not None:
        if args.model is not None:
            raise ValueError(f"--model {args.named_model}: must be absent beside {args.model}")
        args.model = args.named_model
    config = ServeConfig(**given(args, [option.name for option in options_of(ServeConfig)]))
    replicas = ReplicaConfig(**given(args, [option.name for option in options_of(ReplicaConfig)]))
    engine = served_engine(
        {"model": args.model, **given(args, {*ENGINE, "seed", "enforce_eager", "speculative_config"})}
    )
    EngineConfig.of(**engine)
    if getattr(args, "num_threads", 1) < 1:
        raise ValueError(f"--num-threads is {args.num_threads}; it must be at least 1")
    _check_installed()
    check_tls(config)
    if not replicas.alone:
        return _run_replicas(args, engine, config, replicas)
    if follows_another(args):
        from bateleur.runner.llm import LLM

        LLM(**engine)
    with bound(config) as place:
        say("loading torch")
        import torch

        from bateleur.runner.async_llm import AsyncLLM
        from bateleur.runner.serve.server import run as run_server

        if "num_threads" in args:
            torch.set_num_threads(args.num_threads)
        say(f"opening {args.model or 'the shipped model'}")
        del engine["model"]
        llm = AsyncLLM(args.model, max_queued_requests=config.max_queued_requests, **engine)
        tell_of_graphs(llm.llm)
        llm.llm.prepare_structured_outputs()  # so that no request has to wait for it
        address = address_of(place, config)
        lived = run_server(llm, config, place, ready=lambda: write_text(f"{address}\n"))
    return 0 if lived else 1


def _run_replicas(
    args: argparse.Namespace, engine: dict[str, Any], config: ServeConfig, replicas: ReplicaConfig
) -> int:
    """The same on Ray. Its own HTTP listens, so the address is only looked at here."""
    if find_spec("ray") is None:
        raise ValueError("several replicas need ray, not installed here: pip install 'bateleur-runner[ray]'")
    for option in options_of(ServeConfig):
        if option.name in NOT_OF_RAY and (value := getattr(config, option.name)) != option.default:
            refuse(option.name, value, "left out with replicas: Ray listens, and has no such option")
    with bound(config) as place:
        address, port = address_of(place, config), place.getsockname()[1]
    say("starting Ray")
    from bateleur.runner.replicas.application import Plan
    from bateleur.runner.replicas.server import run as run_replicas

    plan = Plan(
        engine=engine, server=config, replicas=replicas, num_threads=getattr(args, "num_threads", None)
    )
    run_replicas(plan, port, ready=lambda: write_text(f"{address}\n"))
    return 0


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ValueError(f"serving needs {names}, not installed here: pip install 'bateleur-runner[serve]'")
