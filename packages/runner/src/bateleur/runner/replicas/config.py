"""Options of replicas: flags of `bateleur serve`, and arguments of the Ray Serve application."""

from __future__ import annotations

from dataclasses import dataclass

from bateleur.runner.utils.arguments import Integer, Number, maybe, refuse, text
from bateleur.runner.utils.options import Checked, option

NOT_OF_RAY = ("uds", "timeout_write", "h11_max_incomplete_event_size", "uvicorn_log_level")
"""Options of the server that Ray's HTTP proxy does not have."""
OF_RAY = ("host", "port", "root_path", "timeout_keep_alive", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
"""Options of the server that Ray Serve has by other names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(Checked):
    """Number of engine replicas, autoscaling (in seconds), and load limit: (1 + imbalance) * mean load + slack."""

    replicas: int = option(1, Integer(1))
    """Number of engine replicas, each in its own process on Ray (extra bateleur-runner[ray]); 1 needs no Ray"""
    max_replicas: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Maximum number of replicas with autoscaling. Default: --replicas, without autoscaling"""
    target_ongoing_requests: float | None = option(None, maybe(Number(0, above=True)))
    """Requests per replica above which autoscaling starts another one. Default: --max-num-seqs, else 64"""
    upscale_delay: float = option(30.0, Number(0))
    """Seconds for which requests must exceed the target before a replica is started"""
    downscale_delay: float = option(600.0, Number(0))
    """Seconds for which requests must be below the target before a replica is stopped; its running requests get
    --shutdown-timeout seconds to end"""
    replica_imbalance: float = option(0.25, Number(0))
    """Share of the mean load by which a replica may exceed it to get requests whose prefix it has cached"""
    replica_slack: float = option(2.0, Number(1))
    """Number of requests by which a replica may exceed that limit"""
    health_check_timeout: float = option(60.0, Number(0, above=True))
    """Seconds without an engine step after which a replica counts as hung and is replaced"""
    ray_address: str | None = option(None, maybe(text))
    """Address of a Ray cluster, or "auto" for the cluster of this machine. Default: a new local cluster is started"""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            refuse("max_replicas", self.max_replicas, f"at least replicas = {self.replicas}, or None")

    @property
    def upper_limit(self) -> int:
        """Maximum number of replicas that can exist."""
        return self.max_replicas or self.replicas

    @property
    def is_single(self) -> bool:
        """Whether there is always one engine, so that Ray is not needed."""
        return self.upper_limit == 1 and self.ray_address is None
