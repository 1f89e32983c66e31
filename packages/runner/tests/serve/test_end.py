"""Shutdown of the server, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import uvicorn

from bateleur.runner.serve.server import Connection, Server

ENDING = """
import gc, json, os, signal, threading
import httpx
from bateleur.runner.cli import main, serve

BODY = {"prompt": "def f(", "ignore_eos": True, "stream": True}
TOKENS = {"drained": 100, "limited": 2000}
SMALL = ["--port", "0", "--num-threads", "1", "--max-model-len", "2048", "--max-num-seqs", "2", "--draft", "none"]
told, threads = {}, []

def ask(address, kind):
    with httpx.Client(base_url=address, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": TOKENS[kind]}) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                *_, last, done = [line for line in lines if line]
                told[kind] = done, json.loads(last[6:])["choices"][0]["finish_reason"]
            except httpx.HTTPError:
                told[kind] = "cut"
        try:
            then = client.post("/v1/completions", json=BODY).status_code
        except httpx.HTTPError:
            then = 503  # it no longer accepts requests
        told[kind + ", then"] = then

def run(kind, *options):
    def ready(address):
        told["frozen"] = gc.get_freeze_count() > 50_000
        threads.append(threading.Thread(target=ask, args=(address.strip(), kind)))
        threads[-1].start()
    serve.write_text = ready
    told[kind + " exits with"] = main(["serve", *SMALL, *options])
    threads[-1].join()

run("drained")
run("limited", "--shutdown-timeout", "0")
told["frozen at the end"] = gc.get_freeze_count()
told["threads"] = sorted(thread.name for thread in threading.enumerate())
print(json.dumps(told))
"""


def test_what_runs_ends_and_nothing_is_left(fresh: Callable[[str], str]) -> None:
    *_, told = fresh(ENDING).splitlines()
    assert json.loads(told) == {
        "drained exits with": 0,
        "drained": ["data: [DONE]", "length"],
        "drained, then": 503,
        "limited exits with": 0,
        "limited": ["data: [DONE]", "abort"],
        "limited, then": 503,
        "frozen": True,
        "frozen at the end": 0,
        "threads": ["MainThread"],
    }


def test_the_second_signal_is_the_systems() -> None:
    before = signal.getsignal(signal.SIGTERM)
    service: Any = SimpleNamespace(stopping=False)
    server = Server(uvicorn.Config(app="unused"), service, ready=lambda: None)
    with server.capture_signals():
        signal.raise_signal(signal.SIGTERM)
        assert (server.should_exit, service.stopping) == (True, True)
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_reads_nothing_is_cut_off_unless_he_begins_again() -> None:
    class Transport(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    async def write(resumes: bool) -> bool:
        config = uvicorn.Config(app=lambda: None, log_config=None)
        state, seconds = uvicorn.server.ServerState(), {"timeout_read": 60.0, "timeout_write": 0.02}
        connection = Connection(config=config, server_state=state, app_state={}, **seconds)
        transport = Transport()
        connection.connection_made(transport)
        connection.pause_writing()
        if resumes:
            connection.resume_writing()
        await asyncio.sleep(0.1)
        connection.connection_lost(OSError())
        return transport.aborted

    assert asyncio.run(write(False))
    assert not asyncio.run(write(True))
