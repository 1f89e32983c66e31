"""`PrefixRouting` as a Ray Serve request router. Ray pickles this module, so it contains nothing else."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bateleur.runner.replicas.forwarded_request import ForwardedRequest
from bateleur.runner.replicas.prefix_routing import PrefixRouting


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve router that chooses a replica by cached prefixes and load."""

    def initialize_state(self, **options: Any) -> None:
        """Create the routing; called by Ray. options: arguments of `PrefixRouting`."""
        self._routing = PrefixRouting(**options)
        self._ongoing: Counter[ReplicaID] = Counter()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent."""
        super().on_send_request(replica_id)
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request that has ended or failed."""
        self._ongoing[replica_id] = max(0, self._ongoing[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the available replicas, and keep the counts of those that still exist."""
        super().update_replicas(replicas)
        self._ongoing = Counter({each: self._ongoing[each] for each in self._replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica first and all others second, in case it is full."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        excluded, prefixes = frozenset[str](), tuple[bytes, ...]()
        if isinstance(request, ForwardedRequest):
            excluded, prefixes = request.excluded, request.prefixes
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        allowed = {name: each for name, each in known.items() if name not in excluded} or known
        if not allowed:
            return []
        loads = {name: self._load(each.replica_id) for name, each in allowed.items()}
        chosen = self._routing.choose(prefixes, loads).replica
        return [[allowed.pop(chosen)], list(allowed.values())]

    def _load(self, replica_id: ReplicaID) -> int:
        """Return the number of requests of a replica: the larger of this router's count and its last reported queue
        length, which includes requests of other routers.
        """
        return max(self._ongoing[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)
