"""Processes with one engine each that share a folder of prefixes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from rank_pool import PRELOADED

Tokens = list[int]


class Used(NamedTuple):
    """Result of a process."""

    said: list[Tokens]
    disk_hit_tokens: int
    refused: dict[str, int]
    written_bytes: int


def _use(options: dict[str, Any], prompts: list[Tokens], order: list[int], link: Connection) -> None:
    """Run prompts in this order once all processes are ready, looking at the folder in every step."""
    from bateleur.runner import LLM, SamplingParams
    from bateleur.runner.offload import disk_tier

    torch.set_num_threads(1)
    disk_tier._SCAN_SECONDS = 0.0
    params, said = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), []
    with LLM(**options) as llm:
        link.send("ready")
        link.recv()
        for number in order:
            (output,) = llm.generate([{"prompt_token_ids": prompts[number]}], params)
            said.append(output.outputs[0].token_ids)
            llm.engine.operate("flush_disk")
    stats = llm.get_metrics().offload
    assert stats is not None
    link.send(Used(said, stats.disk_hit_tokens, dict(stats.refused), stats.written_bytes))


def at_once(options: dict[str, Any], prompts: list[Tokens], orders: Sequence[list[int]]) -> list[Used]:
    """Run one process per order; all start together after all have loaded."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    links, processes = [], []
    for order in orders:
        near, far = multiprocessing.Pipe()
        processes.append(context.Process(target=_use, args=(options, prompts, order, far), daemon=True))
        processes[-1].start()
        far.close()
        links.append(near)
    for link in links:
        link.recv()
    for link in links:
        link.send("go")
    used = [link.recv() for link in links]
    for process in processes:
        process.join()
    return used
