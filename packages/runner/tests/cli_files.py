"""A file of requests, the command that runs them on an engine without a model, and the file of results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from bateleur.runner.cli import main


class Files:
    """`run` the command on a file of lines; `asked` is what reached the engine in the last run."""

    def __init__(self, folder: Path, fake: ModuleType) -> None:
        self.requests, self.results = folder / "in.jsonl", folder / "out.jsonl"
        self._fake = fake
        self.llm: Any = None
        self.each_step: Callable[[], None] = lambda: None

    def open(self, args: Any) -> Any:
        self.llm = self._fake.FakeLLM(self.each_step)
        return self.llm

    def write(self, *lines: Any) -> None:
        raw = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        self.requests.write_bytes(b"\n".join(raw))

    def run(self, *more: str) -> int:
        self.llm = None
        return main(["generate", "--prompt-file", str(self.requests), "--output", str(self.results), *more])

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.results.read_bytes().split(b"\n")[:-1]]

    @property
    def asked(self) -> list[str]:
        return [] if self.llm is None else self.llm.asked
