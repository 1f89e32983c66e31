"""Fixtures: one engine shared by the tests of the server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from bateleur.runner import AsyncLLM
from bateleur.runner.replicas.engine_replica import EngineReplica
from bateleur.runner.replicas.frontend import ReplicaFrontend
from bateleur.runner.serve.app import build_app
from bateleur.runner.serve.config import ServeConfig
from scripted_model import write_scripted_model


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncLLM]:
    """The shipped model with small limits, drafts and prefix caching."""
    llm = AsyncLLM(
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_queued_requests=12,
        block_size=8,
        draft="auto",
        num_speculative_tokens=2,
        enable_prefix_caching=True,
    )
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait at the end of each test until the shared engine is idle."""
    yield
    if "engine" in request.fixturenames:
        llm: AsyncLLM = request.getfixturevalue("engine")
        left = asyncio.run(llm.inspect(lambda llm: list(llm.engine.requests)))
        assert not left
        assert not llm.num_unfinished


class Client:
    """Client of an app in this process; every call runs its own event loop."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.service = app.state.service

    def ask(self, path: str, body: Any = None, method: str = "", **options: Any) -> httpx.Response:
        """Return the whole reply; a POST if there is a body."""
        if body is not None:  # the standard library's json can also write NaN
            options |= {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
        kind = method or ("POST" if "content" in options else "GET")

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.request(kind, path, **options)

        return asyncio.run(call())

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream that ends without an error."""
        reply = self.ask(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, end, rest = reply.text.split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream with event names."""
        reply = self.ask(path, body | {"stream": True})
        assert reply.status_code == 200, reply.text
        *events, rest = reply.text.split("\n\n")
        assert rest == ""
        told = [json.loads(event.partition("\ndata: ")[2]) for event in events]
        assert [event.partition("\n")[0] for event in events] == [f"event: {each['type']}" for each in told]
        return told

    def openai(self) -> Any:
        """A client of OpenAI's library."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return AsyncOpenAI(api_key="-", base_url="http://here/v1", http_client=httpx.AsyncClient(transport=transport))

    def error(self, status: int, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Return the error of a request that is rejected with this status."""
        reply = self.ask(path, body, **options)
        assert reply.status_code == status, reply.text
        error: dict[str, Any] = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error


@pytest.fixture(scope="session")
def client_of() -> type[Client]:
    """Factory of clients for a given application."""
    return Client


def behind_a_front(engine: AsyncLLM, config: ServeConfig) -> FastAPI:
    """The frontend of replicas, with one replica in this process."""
    replica = EngineReplica("only", engine, replace(config, api_key=(), allowed_origins=()))

    async def metrics() -> dict[str, str]:
        return dict([await replica.metrics()])

    app = ReplicaFrontend(replica.answer, metrics, config).app()
    app.state.service = replica.app.state.service
    return app


@pytest.fixture(scope="session", params=[build_app, behind_a_front], ids=["alone", "behind a front"])
def make_client(request: pytest.FixtureRequest, engine: AsyncLLM) -> Callable[..., Client]:
    """A server in this process, with these fields of `ServeConfig`."""
    return lambda **options: Client(request.param(engine, ServeConfig(**options)))


TEXTS: dict[str, Any] = {
    "weather": [
        '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "<think>\nGood.\n</think>\n\nIt is 5 degrees.",
    ],
    "patch": '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>',
    "two": "First.\nstop here",
    "endless": "a b c " * 12,
    "long": ("one ", "two ", "three ", "four ", "five", "\n", "</think>", "\n\n", "Done.", "<|im_end|>"),
    "thinker": ("<think>", "one ", "two ", "three ", "four ", "five", "\n", "</think>", "\n\n", "Done.", "<|im_end|>"),
    "accents": (b"\xc3", b"\xa9", "t", b"\xc3", b"\xa9", "s \n", " ", "<|im_end|>"),
    "default": "Hello hello.",
}
"""Output of the scripted model, by the first user message."""


@pytest.fixture(scope="session")
def scripted_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """A model that writes `TEXTS`."""
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted") / "model", TEXTS)
    llm = AsyncLLM(folder, device="cpu", max_model_len=1024, max_num_seqs=4, enable_prefix_caching=True)
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(scope="session", params=[build_app, behind_a_front], ids=["alone", "behind a front"])
def make_scripted(request: pytest.FixtureRequest, scripted_engine: AsyncLLM) -> Callable[..., Client]:
    """A server of the scripted model in this process, with these fields of `ServeConfig`."""
    names: dict[str, Any] = {"served_model_name": ["scripted"], "tool_call_parser": "hermes"}
    return lambda **options: Client(request.param(scripted_engine, ServeConfig(**(names | options))))


@pytest.fixture(scope="session")
def scripted(make_scripted: Callable[..., Client]) -> Client:
    """Client of the scripted model's server with default options."""
    return make_scripted()


@pytest.fixture(scope="session")
def client(make_client: Callable[..., Client]) -> Client:
    """Client of the server with default options."""
    return make_client()


@pytest.fixture(scope="session")
def live_server() -> Iterator[str]:
    """Address of a server in its own process, which must exit with code 0."""
    call = [sys.executable, "-m", "bateleur.runner", "serve", "--port", "0", "--num-threads", "1"]
    call += ["--max-model-len", "512", "--max-num-seqs", "8", "--timeout-read", "1"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture
def aborted_at_once(scripted_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Abort the first request of the scripted model before it runs. The list gets the ids of all requests."""
    submit, asked = scripted_engine.submit, list[Any]()

    async def submit_and_abort(*args: Any, **options: Any) -> Any:
        asked.append(options["request_ids"])
        if len(asked) > 1:
            return await submit(*args, **options)
        aborted = threading.Event()
        held = asyncio.create_task(scripted_engine.inspect(lambda llm: aborted.wait(60)))
        await asyncio.sleep(0)  # the engine waits from now on
        reader = await submit(*args, **options)
        await scripted_engine.abort(asked[0][0])
        aborted.set()
        await held
        return reader

    monkeypatch.setattr(scripted_engine, "submit", submit_and_abort)
    return asked
