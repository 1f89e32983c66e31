"""What a user may choose about replicas: flags of `bateleur serve`, and arguments of the application on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass

from bateleur.runner.utils.arguments import Integer, Number, maybe, refuse, text
from bateleur.runner.utils.options import Checked, option

NOT_OF_RAY = ("uds", "timeout_write", "h11_max_incomplete_event_size", "uvicorn_log_level")
"""Options of the server that Ray's HTTP does not have."""
OF_RAY = ("host", "port", "root_path", "timeout_keep_alive", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
"""Those that are options of Ray Serve itself, under its own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(Checked):
    """How many engines there are, and which of them a request goes to."""

    replicas: int = option(1, Integer(1))
    """Engines that answer, each a process of its own, on Ray (extra bateleur-runner[ray]); 1 needs no Ray."""
    max_replicas: int | None = option(None, maybe(Integer(1, why=", or None")))
    """Engines that there may be when requests are many; default: no more than --replicas."""
    target_ongoing_requests: float | None = option(None, maybe(Number(0, above=True)))
    """Requests for each engine, behind which another one is started; default: as many as run at once in one."""
    upscale_delay: float = option(30.0, Number(0))
    """Seconds for which requests must be many before an engine is started."""
    downscale_delay: float = option(600.0, Number(0))
    """Seconds for which they must be few before one is ended; what runs there has --shutdown-timeout to end."""
    replica_imbalance: float = option(0.25, Number(0))
    """Share of the mean by which an engine may have more requests than the others, since it holds their prefixes."""
    replica_slack: float = option(2.0, Number(1))
    """Requests that it may have beyond that."""
    health_check_timeout: float = option(60.0, Number(0, above=True))
    """Seconds that a step may take before an engine counts as hung and is replaced."""
    ray_address: str | None = option(None, maybe(text))
    """Address of a Ray cluster, or "auto" for the one of this machine; default: one that is started for the server."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            refuse("max_replicas", self.max_replicas, f"at least replicas = {self.replicas}, or None")

    @property
    def most(self) -> int:
        """Engines at most."""
        return self.max_replicas or self.replicas

    @property
    def alone(self) -> bool:
        """Whether there is one engine for ever, which needs no Ray."""
        return self.most == 1 and self.ray_address is None
