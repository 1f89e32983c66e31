"""An engine with the API server's application. It gets requests from the frontend instead of a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from bateleur.runner.errors import EngineDead, ReplicaLost
from bateleur.runner.replicas.forwarded_request import ForwardedRequest
from bateleur.runner.serve.config import ServeConfig

if TYPE_CHECKING:
    from bateleur.runner.async_llm import AsyncLLM

_MAX_QUEUED_MESSAGES = 8
"""Messages of a response that wait to be sent. If it is full, the engine's outputs are merged meanwhile."""
_log = logging.getLogger(__name__)


def open_engine(options: Mapping[str, Any], num_threads: int | None, max_queued_requests: int) -> AsyncLLM:
    """Load the engine of a replica. options: those of `LLM`, `model` included. num_threads: None is torch's default."""
    import torch

    from bateleur.runner.async_llm import AsyncLLM

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    named = {"model": None, **options}
    return AsyncLLM(named.pop("model"), max_queued_requests=max_queued_requests, **named)


class EngineReplica:
    """Answers forwarded requests as `bateleur serve` does, without API keys, which the frontend checks."""

    def __init__(self, name: str, llm: AsyncLLM, config: ServeConfig) -> None:
        from bateleur.runner.serve.app import build_app  # imported late: it imports torch

        self.name, self.llm = name, llm
        self.app = build_app(llm, config)

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Yield the application's ASGI messages, each time a list of all that are available.

        Closing the generator aborts the request. Raises ReplicaLost, before any message, if the engine is dead.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_QUEUED_MESSAGES)
        task = asyncio.ensure_future(self._run(request, sent))
        try:
            ended = False
            while not ended:
                arrived = [await sent.get()]
                while not sent.empty():
                    arrived.append(sent.get_nowait())
                messages = [each for each in arrived if each is not None]
                ended = len(messages) < len(arrived)
                if self.llm.error is not None and any(each.get("status") == 503 for each in messages):
                    raise ReplicaLost(self.name)
                if messages:
                    yield messages
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, request: ForwardedRequest, sent: asyncio.Queue[Message | None]) -> None:
        body = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Future()  # a client that disconnects cancels the task instead
            return body.pop()

        try:
            await self.app(dict(request.scope), receive, sent.put)
        except Exception:
            _log.exception("internal error of the server")
        await sent.put(None)

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics in Prometheus format."""
        text: bytes = await self.app.state.service.metrics()
        return self.name, text.decode()

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has failed. Does not return while a step hangs."""
        await self.llm.inspect(lambda llm: None)
        if self.llm.error is not None:
            raise EngineDead(f"the engine died of {type(self.llm.error).__name__}: {self.llm.error}")

    async def close(self) -> None:
        """Stop the engine."""
        await self.llm.close()
