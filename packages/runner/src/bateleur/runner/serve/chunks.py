"""A reply in parts: a chunk for each continuation that has grown in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from bateleur.runner.engine_thread import Reader
from bateleur.runner.openai.requests import Asked
from bateleur.runner.outputs import CompletionOutput, RequestOutput
from bateleur.runner.serve.service import Service, raise_failure
from bateleur.runner.serve.usage import Usage


class Chunks(ABC):
    """What the families of endpoints share: who reads, what is counted, what stands in every chunk."""

    def __init__(self, service: Service, asked: Asked, head: dict[str, Any]) -> None:
        self._service, self._asked, self._head = service, asked, head
        self._usage = Usage()

    @abstractmethod
    def parts(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        """Fields of the chunk that tells what is new of a continuation, `choices` and others; None if nothing is."""

    def count(self, output: RequestOutput) -> None:
        """Take a report into the usage."""
        self._usage.count(output)

    async def events(self, reader: Reader) -> AsyncGenerator[dict[str, Any], None]:
        """Every chunk, with the usage behind them if it is asked for."""
        try:
            while outputs := await reader.read():
                for output in outputs:
                    raise_failure(output)
                    self.count(output)
                    for completion in output.outputs:
                        if (parts := self.parts(output, completion)) is not None:
                            yield self._chunk(parts)
            if self._asked.include_usage:
                yield self._chunk({"choices": []}) | {"usage": self._usage.told()}
        finally:
            self._service.llm.leave(reader)

    def _chunk(self, parts: dict[str, Any]) -> dict[str, Any]:
        if self._asked.continuous_usage:
            return {**self._head, **parts, "usage": self._usage.told()}
        return {**self._head, **parts, **({"usage": None} if self._asked.include_usage else {})}
