"""Terminal output: progress and errors go to stderr, results to stdout."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bateleur.runner.llm import LLM


def print_status(text: str) -> None:
    """Print a line to stderr and flush it."""
    print(f"bateleur: {text}", file=sys.stderr, flush=True)


@contextmanager
def announcing_compilation() -> Iterator[None]:
    """Print to stderr if the `with` block compiles C kernels, which happens once per machine and takes seconds."""
    logger, handler = logging.getLogger("bateleur.metadata.native"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("bateleur: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def progress_messages(what: str, interval: float = 5.0) -> Iterator[None]:
    """Print `what`; then print, every `interval` seconds, how long the `with` block has been running."""
    print_status(what)
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(interval):
            print_status(f"{what}, {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def print_graph_costs(llm: LLM) -> None:
    """Print time and memory of an engine's CUDA graph captures, if there were any."""
    if llm.graph_costs.num_graphs:
        print_status(str(llm.graph_costs))


@contextmanager
def name_in_errors(path: object) -> Iterator[None]:
    """Add the name `path` to OSErrors of a `with` block that writes there."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(text: str) -> None:
    """Write to stdout and flush. Characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    with name_in_errors("stdout"):
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()


def discard_stdout() -> None:
    """Discard buffered output that stdout cannot take, so that the interpreter does not report it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class DecodeRate:
    """Decode rate in tokens per second. Counts from the first token on, after compilation, warm-up and first prompt."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._began, self._num_first_tokens = llm, 0.0, 0

    def end_step(self) -> None:
        """Record the end of a step. The first step with tokens starts the clock."""
        if not self._num_first_tokens and (count := self._llm.get_metrics().num_emitted_tokens):
            self._num_first_tokens, self._began = count, time.perf_counter()

    def summary(self) -> str:
        """Return a summary: tokens, rate, tokens per step, acceptance rates. Call it right after the last step."""
        stats = self._llm.get_metrics()
        parts = [f"{(count := stats.num_emitted_tokens)} tokens"]
        if count > self._num_first_tokens:
            rate = (count - self._num_first_tokens) / (time.perf_counter() - self._began)
            parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"{stats.tokens_per_step:.2f} tokens per step")
        if stats.num_dummy_steps:
            parts.append(f"{stats.num_dummy_steps} dummy steps")
        if rates := [f"{rate:.2f}" for rate in stats.acceptance_per_position if rate == rate]:
            parts.append(f"drafts accepted {' '.join(rates)}")
        return ", ".join(parts)
