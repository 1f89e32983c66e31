"""`bateleur serve`: a model at an address."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from bateleur.runner.cli.console import say, write_text
from bateleur.runner.cli.options import ENGINE, given
from bateleur.runner.config.engine_config import EngineConfig
from bateleur.runner.options import options_of
from bateleur.runner.serve.address import address_of, bound, check_tls
from bateleur.runner.serve.config import ServeConfig


def run(args: argparse.Namespace) -> int:
    """Check the call and take the address, before torch and the model are loaded; then serve until a signal comes."""
    config = ServeConfig(**given(args, [option.name for option in options_of(ServeConfig)]))
    engine: dict[str, Any] = {
        "draft": "auto" if args.model is None else "none",
        "enable_prefix_caching": True,
    }
    engine |= given(args, {*ENGINE, "seed"})
    engine["draft"] = None if engine["draft"] == "none" else engine["draft"]
    EngineConfig.of(model=args.model, **engine)
    if getattr(args, "num_threads", 1) < 1:
        raise ValueError(f"--num-threads is {args.num_threads}; it must be at least 1")
    _check_installed()
    check_tls(config)
    with bound(config) as place:
        say("loading torch")
        import torch

        from bateleur.runner.async_llm import AsyncLLM
        from bateleur.runner.serve.server import run as run_server

        if "num_threads" in args:
            torch.set_num_threads(args.num_threads)
        say(f"opening {args.model or 'the shipped model'}")
        llm = AsyncLLM(args.model, max_queued_requests=config.max_queued_requests, **engine)
        llm.llm.prepare_structured_outputs()  # so that no request has to wait for it
        address = address_of(place, config)
        lived = run_server(llm, config, place, ready=lambda: write_text(f"{address}\n"))
    return 0 if lived else 1


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ValueError(f"serving needs {names}, not installed here: pip install 'bateleur-runner[serve]'")
