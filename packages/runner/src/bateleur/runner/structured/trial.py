"""A grammar is tried in a process of its own before it is compiled among requests.

What a grammar costs can't be told from its text: a schema that intersects a dozen patterns takes minutes, a chain of
20,000 rules overflows the stack of its process. A process can be killed, and may crash.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import lru_cache
from select import select
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from bateleur.runner.structured.limits import parser_limits
from bateleur.runner.structured.vocabulary import SPECIAL

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_SECONDS = 5.0
"""That compiling a grammar may take there."""
_TOKEN_ID = "<["
"""Begins a token id in the notation of llguidance."""
_MOST_BYTES = 4 << 30
_STACK_BYTES = 2 << 20
"""A quarter of what threads have elsewhere."""


class Trials:
    """Processes that try grammars, as many as are asked at once. They end with this one, whose pipes they read."""

    def __init__(self) -> None:
        self._idle: list[Popen[str]] = []

    def error(self, source: str, num_tokens: int) -> str:
        """What is wrong with the text of a grammar; empty if nothing is. Waits for up to `MOST_SECONDS`.

        num_tokens: size of the vocabulary, whose token ids the grammar may name.
        """
        child = self._take()
        pipe, answer = child.stdin, child.stdout
        assert pipe is not None
        assert answer is not None
        told = ""
        try:
            pipe.write(json.dumps([source, num_tokens]) + "\n")
            pipe.flush()
            if ready := bool(select([answer], [], [], MOST_SECONDS)[0]):
                told = answer.readline()
        except BrokenPipeError:
            ready = True
        finally:
            if told:
                self._idle.append(child)
            else:
                _end(child)
        if told:
            return str(json.loads(told))
        return "it is too large or too deep" if ready else f"it takes more than {MOST_SECONDS:g} s to compile"

    def _take(self) -> Popen[str]:
        try:
            return self._idle.pop()
        except IndexError:
            command = [sys.executable, "-P", "-m", __name__]
            return Popen(command, stdin=PIPE, stdout=PIPE, text=True, encoding="utf-8")

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            _end(self._idle.pop())


def _end(child: Popen[str]) -> None:
    child.kill()
    with child:  # closes the pipes and waits
        pass


class _Bytes:
    """A vocabulary of bytes, with as many tokens without text as a model has more."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, num_tokens: int) -> None:
        more = max(0, num_tokens - 256)
        self.tokens = [*(bytes([i]) for i in range(256)), *[b""] * more, SPECIAL]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids: list[int] = []

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


@lru_cache(1)
def _tokenizer(num_tokens: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Bytes(num_tokens))  # type: ignore[arg-type]


def _try(source: str, num_tokens: int) -> str:
    from llguidance import LLMatcher

    tokenizer = _tokenizer(num_tokens if _TOKEN_ID in source else 0)
    parser = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
    if not parser.is_error():
        parser.compute_bitmask()
    return parser.get_error()


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(json.dumps(_try(*json.loads(line))), flush=True)


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
