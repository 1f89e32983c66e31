"""`PrefixRouting` as Ray Serve asks for it. Ray ships this module as it is, so it holds no more than that."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bateleur.runner.replicas.call import Call
from bateleur.runner.replicas.prefix_routing import PrefixRouting


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses among replicas by what they were sent, and by how many requests they have."""

    def initialize_state(self, **options: Any) -> None:
        """options: those of `PrefixRouting`."""
        self._routing = PrefixRouting(**options)
        self._ongoing: Counter[ReplicaID] = Counter()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request is on its way."""
        super().on_send_request(replica_id)
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, one way or other."""
        self._ongoing[replica_id] = max(0, self._ongoing[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These there are now."""
        super().update_replicas(replicas)
        self._ongoing = Counter({each: self._ongoing[each] for each in self._replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one to take it, and the others where that is full."""
        asked = pending_request.args[0] if pending_request is not None and pending_request.args else None
        call = asked if isinstance(asked, Call) else None
        avoided = call.avoided if call is not None else frozenset()
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        able = {name: each for name, each in known.items() if name not in avoided} or known
        if not able:
            return []
        loads = {name: self._load(each.replica_id) for name, each in able.items()}
        chosen = self._routing.choose(call.prefixes if call is not None else (), loads).replica
        return [[able.pop(chosen)], list(able.values())]

    def _load(self, replica_id: ReplicaID) -> int:
        """What other routers have sent is known of the replica's own count, which is told with its answers."""
        return max(self._ongoing[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)
