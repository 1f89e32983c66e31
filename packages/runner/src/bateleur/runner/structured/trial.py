"""Compiles grammars in a separate process first, which can be killed and may crash.

A schema that intersects a dozen patterns takes minutes, and a chain of 20,000 rules overflows the stack.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from select import POLLIN, poll
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from bateleur.runner.structured.library import SPECIAL, library_tokenizer, parser_limits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_SECONDS = 5.0
"""Maximum processor time to compile a grammar. Wall time would refuse good grammars on a busy machine."""
_MAX_WAIT = 60.0
"""Maximum wall time in seconds, with the start of the child process."""
_TOKEN_ID = "<["
"""Start of a token id in the notation of llguidance."""
_MAX_BYTES = 4 << 30
_STACK_BYTES = 2 << 20
"""A quarter of the usual stack of a thread."""


class GrammarCompilers:
    """Child processes that compile grammars, one per concurrent call. They end with this process."""

    def __init__(self) -> None:
        self._idle: list[Popen[str]] = []

    def error(self, source: str, num_tokens: int) -> str:
        """Return the error of a grammar; empty if it compiles in `MAX_SECONDS`. num_tokens: size of the vocabulary."""
        child = self._take_child()
        pipe, answer, reply = child.stdin, child.stdout, ""
        assert pipe is not None
        assert answer is not None
        try:
            pipe.write(json.dumps([source, num_tokens, MAX_SECONDS]) + "\n")
            pipe.flush()
            waiting = poll()  # `select` takes only the first 1024 file descriptors of a process
            waiting.register(answer, POLLIN)
            if ended := bool(waiting.poll(1000 * _MAX_WAIT)):
                reply = answer.readline()
        except BrokenPipeError:
            ended = True
        finally:
            if reply:
                self._idle.append(child)
            else:
                _end(child)
        if reply:
            return str(json.loads(reply))
        if ended and child.returncode != -signal.SIGPROF:
            return "it is too large or too deep"
        return f"it takes more than {MAX_SECONDS:g} s to compile"

    def _take_child(self) -> Popen[str]:
        """Return an idle child that is alive, or a new one."""
        with suppress(IndexError):  # other threads take children, too
            while True:
                child = self._idle.pop()
                if child.poll() is None:
                    return child
                _end(child)
        command = [sys.executable, "-P", "-m", __name__]
        # In a session of its own it gets no Ctrl-C from the terminal.
        return Popen(command, stdin=PIPE, stdout=PIPE, text=True, encoding="utf-8", start_new_session=True)

    def close(self) -> None:
        """End the child processes."""
        while self._idle:
            _end(self._idle.pop())


def _end(child: Popen[str]) -> None:
    child.kill()
    with suppress(BrokenPipeError), child:  # closes the pipes and waits; a write may be left that nothing reads
        pass


@lru_cache(1)
def _tokenizer(num_tokens: int) -> LLTokenizer:
    """Return a vocabulary of the 256 bytes, padded to the model's size by tokens without text."""
    tokens = [*(bytes([i]) for i in range(256)), *[b""] * max(0, num_tokens - 256), SPECIAL]
    return library_tokenizer(tokens, [len(tokens) - 1])


def _try(source: str, num_tokens: int) -> str:
    from llguidance import LLMatcher

    tokenizer = _tokenizer(num_tokens if _TOKEN_ID in source else 0)
    parser = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
    if not parser.is_error():
        parser.compute_bitmask()
    return parser.get_error()


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        source, num_tokens, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process
        error = _try(source, num_tokens)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
