"""Routes requests to the replica that has most of their prompt in its prefix cache, within a load limit.

A request has no token ids yet, so its prefixes are hashes of its text at lengths that grow by an eighth. A text of a
million characters has about 75 of them. Of the text that two requests share, at least eight ninths are found. A chat
also has hashes at the ends of its messages, so that its next request finds the replica of this chat and not one with
the same beginning.

Routing is deterministic: no clock, no random numbers, no I/O. `benchmarks/fleet.py` simulates it with 1,000 replicas.
"""

import hashlib
import heapq
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from bateleur.runner.utils.arguments import Integer, Number

SHORTEST = 128  # bytes of the shortest prefix with a key: less is not worth a cache hit
_MAX_MESSAGES = 64  # only the ends of the first 64 messages have keys
_TEMPLATE_FIELDS = (
    *("model", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
    *("instructions", "system", "thinking", "reasoning", "previous_response_id"),
)
"""Fields of a conversation that a chat template may put before its messages."""
_MESSAGE_FIELDS = {"/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
"""Path endings of chat endpoints, and the fields with their messages."""
PATHS = (*_MESSAGE_FIELDS, "/completions")  # path endings of requests with a prompt


def prefix_keys(path: str, body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return hashes of prefixes of the first prompt in a POST to `path`, short ones first; () if short or invalid."""
    with suppress(RecursionError):  # nested too deeply for any engine
        field = next((name for end, name in _MESSAGE_FIELDS.items() if path.endswith(end)), None)
        if field is not None:
            messages = [body[field]] if isinstance(body.get(field), str) else body.get(field)
            head = _bytes([body.get(name) for name in _TEMPLATE_FIELDS])
            return tuple(_keys(head, map(_bytes, messages if isinstance(messages, list) else ())))
        if path.endswith("/completions"):
            return tuple(_keys(_bytes([body.get("model")]), [_prompt(body.get("prompt"))]))
    return ()


def _prompt(prompt: Any) -> bytes:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str | list):
        prompt = first
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    try:
        return array("I", prompt).tobytes()
    except (TypeError, OverflowError):
        return b""


def _bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _keys(head: bytes, parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield hashes of `head` with each of several prefixes of the concatenated parts.

    Prefixes end at lengths that grow by an eighth each, and after each of the first 64 parts (messages).
    """
    state, last_key = hashlib.blake2b(head, digest_size=16, person=b"prefix"), 0
    length, end = 0, SHORTEST
    for number, part in enumerate(parts):
        at = 0
        while (stop := at + end - length) <= len(part):
            state.update(memoryview(part)[at:stop])
            yield state.digest()
            length = last_key = end
            at, end = stop, end + (end >> 3)
        state.update(memoryview(part)[at:])
        length += len(part) - at
        if number < _MAX_MESSAGES and max(last_key + 1, SHORTEST) <= length:
            yield state.digest()
            last_key = length


_PRIME = (1 << 61) - 1


@lru_cache(1 << 12)
def _hash_factors(replica: str) -> tuple[int, int]:
    """Return factor and summand of the hash function by which `_hash_choices` ranks a replica."""
    digest = hashlib.blake2b(replica.encode(), digest_size=14).digest()
    return int.from_bytes(digest[:7], "little") + 1, int.from_bytes(digest[7:], "little")


class RoutingChoice(NamedTuple):
    """The replica that gets a request, and how many of the request's prefixes were sent to it before."""

    replica: str
    num_matched: int


class PrefixRouting:
    """Chooses the replica with the longest cached prefix of a request, within a limit on load.

    A replica is below the limit if its load with the request is at most `(1 + imbalance) * mean + slack`, with the mean
    load of all replicas (consistent hashing with bounded loads, Mirrokni et al. 2018, plus a slack because a small
    batch takes little time). The least loaded replica is always below the limit.

    1. Choose the least loaded of the replicas below the limit that have the longest prefix.
    2. If no replica has a prefix, choose the less loaded of two replicas by rendezvous hashing of the shortest prefix.
       So independent routers send requests with equal beginnings to the same two.
    3. If both are above the limit, or the request has no prefixes, choose the least loaded replica, and of several the
       one that has waited longest for a request.

    A prefix counts as cached by a replica after it was sent there, until `max_prefixes` other prefixes have been sent;
    shorter prefixes are kept longer. Replicas that are not in `loads` are ignored.

    imbalance: at least 0. slack: requests, at least 1. max_prefixes: at least 1. Raises ValueError otherwise.
    """

    def __init__(self, *, imbalance: float = 0.25, slack: float = 2.0, max_prefixes: int = 200_000) -> None:
        self._imbalance = Number(0)("imbalance", imbalance)
        self._slack = Number(1)("slack", slack)
        self._max_prefixes = Integer(1)("max_prefixes", max_prefixes)
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()
        """By prefix the replicas that got it; the prefix of the latest request is last."""
        self._last_request: dict[str, int] = {}  # by replica the number of the last request sent to it
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, prefixes: Sequence[bytes], loads: Mapping[str, float]) -> RoutingChoice:
        """Choose a replica for a request, and record the request as sent there. Raises ValueError without replicas.

        prefixes: hashes of the prompt's prefixes (`prefix_keys`). loads: number of requests of each available replica.
        """
        if not loads:
            raise ValueError("loads holds no replica; at least one is needed")
        limit = (1 + self._imbalance) * (sum(loads.values()) + 1) / len(loads) + self._slack
        for number in range(len(prefixes), 0, -1):
            holders = self._holders.get(prefixes[number - 1], ())
            if allowed := [each for each in holders if each in loads and loads[each] + 1 <= limit]:
                choice = RoutingChoice(self._least_loaded(allowed, loads), number)
                break
        else:
            hashed = self._hash_choices(prefixes[0], loads) if prefixes else ()
            allowed = [each for each in hashed if loads[each] + 1 <= limit]
            choice = RoutingChoice(self._least_loaded(allowed or loads, loads), 0)
        self._record(prefixes, choice.replica, loads)
        return choice

    def _hash_choices(self, prefix: bytes, loads: Mapping[str, float]) -> list[str]:
        """Return two replicas by rendezvous hashing. Adding or removing a replica changes few choices."""
        number = int.from_bytes(hashlib.blake2b(prefix, digest_size=7).digest(), "little")

        def rank(replica: str) -> int:
            factor, shift = _hash_factors(replica)
            return (number * factor + shift) % _PRIME

        return heapq.nlargest(2, loads, rank)

    def _least_loaded(self, replicas: Sequence[str] | Mapping[str, float], loads: Mapping[str, float]) -> str:
        return min(replicas, key=lambda each: (loads[each], self._last_request.get(each, 0), each))

    def _record(self, prefixes: Sequence[bytes], replica: str, loads: Mapping[str, float]) -> None:
        self._num_requests += 1
        self._last_request[replica] = self._num_requests
        if len(self._last_request) > 2 * len(loads):
            self._last_request = {each: n for each, n in self._last_request.items() if each in loads}
        for prefix in reversed(prefixes):
            holders = self._holders.setdefault(prefix, set())
            holders.add(replica)
            if len(holders) > len(loads):
                holders.intersection_update(loads)
            self._holders.move_to_end(prefix)
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)
