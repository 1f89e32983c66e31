"""`bateleur serve`: start an OpenAI-compatible server."""

import argparse
import asyncio
from importlib.util import find_spec
from typing import Any

from bateleur.runner.cli.console import print_graph_costs, print_status, write_text
from bateleur.runner.cli.options import ENGINE_OPTIONS, check_num_threads, check_ray, given_options, is_follower_rank
from bateleur.runner.cli.vllm_flags import check_vllm_flags
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.replicas.config import NOT_OF_RAY, ReplicaConfig
from bateleur.runner.serve.address import bound_socket, check_tls, client_url
from bateleur.runner.serve.config import ServeConfig, served_engine
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.options import options_of


def run(args: argparse.Namespace) -> int:
    """Check arguments, bind the address, load torch and the model, serve until a signal; return the exit code."""
    check_vllm_flags(args)
    if args.named_model is not None:
        if args.model is not None:
            raise ValueError(f"--model {args.named_model}: must be left out if MODEL ({args.model}) is given")
        args.model = args.named_model
    config = ServeConfig(**given_options(args, ServeConfig))
    replicas = ReplicaConfig(**given_options(args, ReplicaConfig))
    names = {*ENGINE_OPTIONS, "seed", "enforce_eager", "speculative_config"}
    engine = served_engine({"model": args.model, **given_options(args, names)})
    lora = EngineConfig.of(**engine).lora
    if config.lora_modules and not lora.enable_lora:
        refuse("lora_modules", config.lora_modules, "left out without enable_lora")
    check_num_threads(args)
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise ValueError(
            f"the server needs {', '.join(missing)}, not installed here: pip install 'bateleur-runner[serve]'"
        )
    check_tls(config)
    if not replicas.is_single:
        if lora.enable_lora:
            refuse("enable_lora", True, "false with replicas, which do not load adapters together")
        return _run_replicas(args, engine, config, replicas)
    if is_follower_rank(args):
        from bateleur.runner.llm import LLM

        LLM(**engine)
    with bound_socket(config) as listener:
        print_status("loading torch")
        import torch

        from bateleur.runner.async_llm import AsyncLLM
        from bateleur.runner.lora.adapter_manager import LoRARequest
        from bateleur.runner.serve.server import run as run_server

        if "num_threads" in args:
            torch.set_num_threads(args.num_threads)
        print_status(f"loading {args.model or 'the shipped model'}")
        del engine["model"]
        llm = AsyncLLM(args.model, max_queued_requests=config.max_queued_requests, **engine)
        print_graph_costs(llm.llm)
        for name, folder in config.lora_modules:
            asyncio.run(llm.add_lora(LoRARequest(name, lora_path=folder)))
        llm.llm.prepare_structured_outputs()  # now, so that no request has to wait for it
        address = client_url(listener, config)
        engine_alive = run_server(llm, config, listener, ready=lambda: write_text(f"{address}\n"))
    return 0 if engine_alive else 1


def _run_replicas(
    args: argparse.Namespace, engine: dict[str, Any], config: ServeConfig, replicas: ReplicaConfig
) -> int:
    """Serve with Ray Serve. Its own HTTP proxy listens, so the address is only checked here."""
    check_ray()
    for option in options_of(ServeConfig):
        if option.name in NOT_OF_RAY and (value := getattr(config, option.name)) != option.default:
            refuse(option.name, value, "left out with replicas: Ray's HTTP proxy has no such option")
    with bound_socket(config) as listener:
        address, port = client_url(listener, config), listener.getsockname()[1]
    print_status("starting Ray")
    from bateleur.runner.replicas.application import DeploymentPlan
    from bateleur.runner.replicas.server import run as run_replicas

    plan = DeploymentPlan(engine=engine, server=config, replicas=replicas, num_threads=check_num_threads(args))
    run_replicas(plan, port, ready=lambda: write_text(f"{address}\n"))
    return 0
