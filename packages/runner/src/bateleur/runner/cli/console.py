"""What the command says beside its output: progress and complaints go to stderr, text alone to stdout."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


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
