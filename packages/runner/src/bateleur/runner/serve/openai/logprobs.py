"""Log probabilities in the forms of OpenAI's completions and chat completions, and vLLM's prompt logprobs.

token_ids: tokens of a reply or chunk. logprobs: for each token, the log probabilities at its position, including its
own. num_top: number of most likely tokens to report, -1 for all. as_ids: write tokens as token_id:ID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bateleur.runner.outputs import Logprob


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    num_top: int,
    *,
    offset: int = 0,
    beginning: str = "",
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return `logprobs` of `/v1/completions`: the most likely tokens, and the token itself.

    logprobs: None for the first token of a prompt. beginning: its text. offset: characters before the first token.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    likely: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, position in zip(token_ids, logprobs, strict=True):
        offsets.append(offset)
        text = beginning if position is None else _text(position[token])
        tokens.append(_id_name(token) if as_ids else text)
        chosen.append(None if position is None else _finite(position[token]))
        likely.append(None if position is None else _top_logprobs(position, token, num_top, as_ids))
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": likely, "text_offset": offsets}


def _top_logprobs(position: Mapping[int, Logprob], token: int, num_top: int, as_ids: bool) -> dict[str, float]:
    """Return log probabilities by text or bytes of the token; of equal texts, the most likely one counts."""
    entry: dict[str, float] = {}
    for i, each in enumerate(sorted(position, key=lambda each: position[each].rank)):
        if i < num_top or num_top < 0 or each == token:
            name = _text(position[each]) if each == token else _name(position[each])
            entry.setdefault(_id_name(each) if as_ids else name, _finite(position[each]))
    return entry


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return `logprobs` of `/v1/chat/completions`."""

    def entry(token: int, position: Mapping[int, Logprob]) -> dict[str, Any]:
        known, text = position[token], _text(position[token])
        data = known.token_bytes or text.encode("utf-8", "replace")
        return {"token": _id_name(token) if as_ids else text, "logprob": _finite(known), "bytes": list(data)}

    content = []
    for token, position in zip(token_ids, logprobs, strict=True):
        ranked = sorted(position, key=lambda each: position[each].rank)[: None if num_top < 0 else num_top]
        content.append(entry(token, position) | {"top_logprobs": [entry(each, position) for each in ranked]})
    return {"content": content}


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format, by token id; None for the first token."""

    def entry(each: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(each), "rank": each.rank, "decoded_token": each.decoded_token}

    return [
        None if position is None else {str(token): entry(each) for token, each in position.items()}
        for position in logprobs
    ]


def _id_name(token: int) -> str:
    """Return vLLM's unique name of a token."""
    return f"token_id:{token}"


def _text(logprobs: Logprob) -> str:
    return logprobs.decoded_token or ""


def _name(logprobs: Logprob) -> str:
    """Return the text of a token, or its bytes in OpenAI's notation if it has no text."""
    return logprobs.decoded_token or "".join(["bytes:", *(f"\\x{byte:02x}" for byte in logprobs.token_bytes)])


def _finite(logprobs: Logprob) -> float:
    """Return the log probability, at least -9999.0 as in vLLM, because JSON has no infinity."""
    return max(logprobs.logprob, -9999.0)
