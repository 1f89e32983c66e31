"""An engine without a model, for tests of the command line: each request ends after `max_tokens` steps.

Run as a program it is the `bateleur` command on that engine.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bateleur.runner.cli import generate, main
from bateleur.runner.outputs import CompletionOutput, RequestOutput


class FakeLLM:
    """What the command line uses of `LLM`. Text is the prompt's first letter again and again."""

    def __init__(self, each_step: Callable[[], None] = lambda: None) -> None:
        self._each_step = each_step
        self.limits = SimpleNamespace(max_num_seqs=2)
        self.tokenizer = SimpleNamespace(
            decode=lambda ids, **_: "".join(map(chr, ids)),
            encode=lambda text, **_: list(map(ord, text)),
            chat_template="messages one after the other",
            apply_chat_template=lambda messages, **_: "".join(each["content"] for each in messages),
        )
        self.asked: list[Any] = []
        self._left: dict[str, tuple[str, Any, int]] = {}
        self._stats = SimpleNamespace(
            num_emitted_tokens=0, num_dummy_steps=0, tokens_per_step=1.0, acceptance_per_position=[]
        )

    def get_metrics(self) -> Any:
        return self._stats

    def add_request(self, prompt: dict[str, Any], params: Any, *, priority: int = 0, lora_request: Any = None) -> str:
        text = str(prompt.get("prompt", prompt.get("prompt_token_ids")))
        if not text:
            raise ValueError("prompt is empty; at least one token is needed")
        name = f"request-{len(self.asked)}"
        self.asked.append(text)
        self._left[name] = (text, params, params.max_tokens)
        return name

    def abort(self, name: str) -> None:
        del self._left[name]

    def step(self) -> list[RequestOutput]:
        done = []
        self._each_step()
        running = list(self._left.items())[: self.limits.max_num_seqs]
        for name, (text, params, left) in running:
            if text == "hang" and len(running) == 1:
                print("waiting", file=sys.stderr, flush=True)
                time.sleep(600)
            if text == "interrupt":
                raise KeyboardInterrupt
            self._stats.num_emitted_tokens += 1
            self._left[name] = (text, params, left - 1)
            if left == 1:
                done.append(_output(*(name, text, params.max_tokens)))
                del self._left[name]
        return done

    def stream(self, prompt: str, params: Any, *, lora_request: Any = None) -> Any:
        for n in range(1, params.max_tokens + 1):
            self._stats.num_emitted_tokens += 1
            yield _output("request-0", prompt, n)


def _output(name: str, text: str, n: int) -> RequestOutput:
    reason = "error" if text == "nan" else "length"
    wrong = "logits are not numbers" if text == "nan" else None
    completion = CompletionOutput(0, text[0] * n, [7] * n, None, None, reason, wrong)
    return RequestOutput(name, text, [1] * len(text), [completion], True, 0, "", 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    generate._open = lambda args: FakeLLM()
    sys.exit(main())
