"""Which replica a request goes to: the one that holds most of its prompt, as long as that has not too much to do.

Pure: no clock, no chance, no I/O. The same calls make the same choices, in a router or in a simulation of a thousand.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bateleur.runner.utils.arguments import Integer, Number

_PRIME = (1 << 61) - 1


class Choice(NamedTuple):
    """Where a request goes, and why."""

    replica: str
    matched: int
    """How many of its prefixes that replica was known to hold."""


class PrefixRouting:
    """Sends a request to the replica that holds the longest prefix of it, within a bound on imbalance.

    A replica may take a request if its load is then at most `(1 + imbalance) * mean + slack`, where `mean` is that of
    all replicas with the request (the bound of consistent hashing with bounded loads, Mirrokni and others 2018, and a
    slack, since a batch of few requests is no burden). One always may: the least loaded.

    1. Of those that may and hold the longest prefix that any of them holds, the least loaded.
    2. Where none holds any, the less loaded of two that follow from the shortest prefix. So routers that know nothing
       of each other send what begins alike to the same two.
    3. If neither may, or a request has no prefixes, the least loaded, and of several the one that waits longest.

    What a replica was sent counts as held, until `max_prefixes` others have been sent somewhere since; shorter prefixes
    outlive longer ones. Those who are not among the loads are passed over, so a replica that is gone takes nothing.

    imbalance: share of the mean; at least 0. slack: requests; at least 1. max_prefixes: at least 1.

    Raises ValueError for anything else.
    """

    def __init__(self, *, imbalance: float = 0.25, slack: float = 2.0, max_prefixes: int = 200_000) -> None:
        self._imbalance = Number(0)("imbalance", imbalance)
        self._slack = Number(1)("slack", slack)
        self._max_prefixes = Integer(1)("max_prefixes", max_prefixes)
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()
        """Who was sent a prefix; what was asked for last comes last."""
        self._factors: dict[str, tuple[int, int]] = {}
        """By replica what ranks it for a prefix."""
        self._turns: dict[str, int] = {}
        """By replica the number of the last request that it was sent."""
        self._turn = 0

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._holders)

    def choose(self, prefixes: Sequence[bytes], loads: Mapping[str, float]) -> Choice:
        """Where to send a request, which from here on counts as sent.

        prefixes: keys of ever longer prefixes of it, as `prefix_keys` makes them. loads: requests that each replica
        has, and nobody else is chosen; ValueError if there is none.
        """
        if not loads:
            raise ValueError("loads holds no replica; at least one is needed")
        most = (1 + self._imbalance) * (sum(loads.values()) + 1) / len(loads) + self._slack
        choice = self._holder(prefixes, loads, most) or self._newcomer(prefixes, loads, most)
        self._remember(prefixes, choice.replica, loads)
        return choice

    def forget(self, replica: str) -> None:
        """A replica has lost what it held; one whose name never comes again need not be told of."""
        for holders in self._holders.values():
            holders.discard(replica)

    def _holder(self, prefixes: Sequence[bytes], loads: Mapping[str, float], most: float) -> Choice | None:
        for number in range(len(prefixes), 0, -1):
            holders = self._holders.get(prefixes[number - 1], ())
            able = [each for each in holders if each in loads and loads[each] + 1 <= most]
            if able:
                return Choice(self._least(able, loads), number)
        return None

    def _newcomer(self, prefixes: Sequence[bytes], loads: Mapping[str, float], most: float) -> Choice:
        two = self._two_for(prefixes[0], loads) if prefixes else ()
        able = [each for each in two if loads[each] + 1 <= most]
        return Choice(self._least(able or loads, loads), 0)

    def _two_for(self, prefix: bytes, loads: Mapping[str, float]) -> list[str]:
        """Rendezvous hashing: whom it names does not change when others come or go."""
        number = int.from_bytes(hashlib.blake2b(prefix, digest_size=7).digest(), "little")

        def rank(replica: str) -> int:
            factor, shift = self._factors.get(replica) or self._new_factors(replica)
            return (number * factor + shift) % _PRIME

        return heapq.nlargest(2, loads, rank)

    def _new_factors(self, replica: str) -> tuple[int, int]:
        digest = hashlib.blake2b(replica.encode(), digest_size=14).digest()
        made = int.from_bytes(digest[:7], "little") + 1, int.from_bytes(digest[7:], "little")
        self._factors[replica] = made
        return made

    def _least(self, replicas: Sequence[str] | Mapping[str, float], loads: Mapping[str, float]) -> str:
        return min(replicas, key=lambda each: (loads[each], self._turns.get(each, 0), each))

    def _remember(self, prefixes: Sequence[bytes], replica: str, loads: Mapping[str, float]) -> None:
        self._turn += 1
        self._turns[replica] = self._turn
        if len(self._turns) > 2 * len(loads):
            self._turns = {each: turn for each, turn in self._turns.items() if each in loads}
            self._factors = {each: made for each, made in self._factors.items() if each in loads}
        for prefix in reversed(prefixes):
            holders = self._holders.setdefault(prefix, set())
            holders.add(replica)
            if len(holders) > len(loads):
                holders.intersection_update(loads)
            self._holders.move_to_end(prefix)
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)
