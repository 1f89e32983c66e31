"""A replica: an engine with the server's routes before it, asked by calls in place of a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from starlette.types import Message

from bateleur.runner.async_llm import AsyncLLM
from bateleur.runner.errors import EngineDead, ReplicaLost
from bateleur.runner.replicas.call import Call
from bateleur.runner.serve.app import build_app
from bateleur.runner.serve.config import ServeConfig

_WAITING = 8
"""Messages of a reply that wait to be sent on; where more come, the engine's reports are merged."""
_log = logging.getLogger(__name__)


class EngineReplica:
    """Answers calls as `bateleur serve` answers requests.

    name: what others know it by. config: of the server; who may come in was decided before.
    """

    def __init__(self, name: str, llm: AsyncLLM, config: ServeConfig) -> None:
        self.name, self.llm = name, llm
        self.app = build_app(llm, config)

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """What the application sends, as many messages at a time as there are; to leave it aborts the request.

        Raises ReplicaLost, before any message, if the engine is dead.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING)
        task = asyncio.ensure_future(self._run(call, sent))
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

    async def _run(self, call: Call, sent: asyncio.Queue[Message | None]) -> None:
        parts = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if not parts:
                await asyncio.Future()  # who leaves cancels all of it
            return parts.pop()

        try:
            await self.app(dict(call.scope), receive, sent.put)
        except Exception:
            _log.exception("an error inside the server")
        await sent.put(None)

    async def metrics(self) -> tuple[str, str]:
        """Its name, and what it tells Prometheus."""
        text: bytes = await self.app.state.service.metrics()
        return self.name, text.decode()

    async def check_health(self) -> None:
        """Raises EngineDead if no step will run any more; does not return while a step hangs."""
        await self.llm.inspect(lambda llm: None)
        if self.llm.error is not None:
            raise EngineDead(f"the engine died of {type(self.llm.error).__name__}: {self.llm.error}")

    async def close(self) -> None:
        """End the engine."""
        await self.llm.close()
