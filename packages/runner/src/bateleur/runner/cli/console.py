"""What the command says beside its output: progress and complaints go to stderr, text alone to stdout."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM


def say(text: str) -> None:
    """Print a line to stderr, at once."""
    print(f"bateleur: {text}", file=sys.stderr, flush=True)


@contextmanager
def waiting_for(what: str, every: float = 5.0) -> Iterator[None]:
    """While this block runs, say what it is about, and every few seconds for how long it has been running."""
    say(what)
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(every):
            say(f"{what}, {time.monotonic() - began:.0f} s so far")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def tell_of_graphs(llm: LLM) -> None:
    """Print the cost of an engine's CUDA graphs, if it captured any."""
    if llm.graph_costs.num_graphs:
        say(str(llm.graph_costs))


@contextmanager
def naming(place: object) -> Iterator[None]:
    """What is written in this block goes to `place`: an error of the operating system says so."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error


def write_text(text: str) -> None:
    """Write to stdout, at once; what its encoding lacks is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    with naming("stdout"):
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()


def leave_stdout() -> None:
    """Lose what stdout can't take, or the interpreter would complain of it once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Pace:
    """Tokens a second from the first token on: what comes before it warms up, or reads a prompt."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._began = 0.0
        self._first = 0

    def tick(self) -> None:
        """A step has ended."""
        if not self._first and (count := self._llm.get_metrics().num_emitted_tokens):
            self._first, self._began = count, time.perf_counter()

    def line(self) -> str:
        """What became of it all; to be called when the last step has ended."""
        stats = self._llm.get_metrics()
        count = stats.num_emitted_tokens
        parts = [f"{count} tokens"]
        if count > self._first:
            rate = (count - self._first) / (time.perf_counter() - self._began)
            parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
        if stats.num_dummy_steps:
            parts.append(f"{stats.num_dummy_steps} dummy steps")
        if rates := [f"{rate:.2f}" for rate in stats.acceptance_per_position if rate == rate]:
            parts.append(f"drafts accepted {' '.join(rates)}")
        return ", ".join(parts)
