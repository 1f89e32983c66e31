"""Log probabilities in the two forms of OpenAI's replies, and in vLLM's for prompts.

token_ids: those of a reply or a chunk; known: for each of them what is known in its place, the token itself included;
most: how many of the most likely are told, -1 for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bateleur.runner.outputs import Logprob


def completion_logprobs(
    token_ids: Sequence[int],
    known: Sequence[Mapping[int, Logprob] | None],
    most: int,
    *,
    offset: int = 0,
    beginning: str = "",
    as_ids: bool = False,
) -> dict[str, Any]:
    """The form of `/v1/completions`. The token itself is told beside the most likely ones.

    known: None for the first token of a prompt, which nothing predicts; `beginning` is its text. offset: characters
    before the first token. as_ids: tokens are told as token_id:ID.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    likely: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, place in zip(token_ids, known, strict=True):
        offsets.append(offset)
        text = beginning if place is None else _text(place[token])
        tokens.append(_id_name(token) if as_ids else text)
        chosen.append(None if place is None else _finite(place[token]))
        likely.append(None if place is None else _top_logprobs(place, token, most, as_ids))
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": likely, "text_offset": offsets}


def _top_logprobs(place: Mapping[int, Logprob], token: int, most: int, as_ids: bool) -> dict[str, float]:
    """By text, or by bytes for parts of characters; of tokens that read alike the most likely counts."""
    told: dict[str, float] = {}
    for i, each in enumerate(sorted(place, key=lambda each: place[each].rank)):
        if i < most or most < 0 or each == token:
            name = _text(place[each]) if each == token else _name(place[each])
            told.setdefault(_id_name(each) if as_ids else name, _finite(place[each]))
    return told


def chat_logprobs(
    token_ids: Sequence[int], known: Sequence[Mapping[int, Logprob]], most: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """The form of `/v1/chat/completions`."""

    def told(token: int, place: Mapping[int, Logprob]) -> dict[str, Any]:
        return _told(place[token]) | ({"token": _id_name(token)} if as_ids else {})

    content = []
    for token, place in zip(token_ids, known, strict=True):
        ranked = sorted(place, key=lambda each: place[each].rank)[: None if most < 0 else most]
        content.append(told(token, place) | {"top_logprobs": [told(each, place) for each in ranked]})
    return {"content": content}


def prompt_logprobs(known: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Those of a prompt as vLLM tells them, by token; None where nothing predicts one."""
    return [
        None
        if place is None
        else {
            str(token): {"logprob": _finite(each), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in place.items()
        }
        for place in known
    ]


def _told(known: Logprob) -> dict[str, Any]:
    data = known.token_bytes or _text(known).encode("utf-8", "replace")
    return {"token": _text(known), "logprob": _finite(known), "bytes": list(data)}


def _id_name(token: int) -> str:
    """vLLM's name of a token that has no other like it."""
    return f"token_id:{token}"


def _text(known: Logprob) -> str:
    return known.decoded_token or ""


def _name(known: Logprob) -> str:
    """The text of a token, or its bytes as OpenAI writes them if it adds no text."""
    return known.decoded_token or "".join(["bytes:", *(f"\\x{byte:02x}" for byte in known.token_bytes)])


def _finite(known: Logprob) -> float:
    """JSON has no infinity; vLLM tells this in its place."""
    return max(known.logprob, -9999.0)
