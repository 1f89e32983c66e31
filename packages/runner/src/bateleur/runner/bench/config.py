"""Options of `bateleur bench`, named as in vLLM's benchmarks if they exist there.

The docstrings of `LatencyConfig`, `ThroughputConfig` and `ServeBenchConfig`, and those under fields, are the texts of
`bateleur bench latency --help` etc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bateleur.runner.utils.arguments import Integer, Number, OneOf, Several, file, maybe, refuse, text
from bateleur.runner.utils.options import Checked, option

PEERS = ("transformers", "vllm", "llama.cpp")
_FILE = maybe(file)
_COUNT = Integer(1)


def _peers(name: str, value: Any) -> tuple[str, ...]:
    named = Several(OneOf((*PEERS, "none")), "a sequence of names")(name, value)
    if "none" in named and len(named) > 1:
        refuse(name, value, "names of engines, or only none")
    return tuple(dict.fromkeys(named))


def _url(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("http://"):
        refuse(name, value, "a URL that begins with http://")
    try:
        split = urlsplit(value)
        known = split.port != 0 and (split.hostname or "").isprintable() and " " not in value
    except ValueError:  # no port, or no IPv6 address
        known = False
    if not (known and split.hostname):
        refuse(name, value, "http://host or http://host:port")
    return value.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig(Checked):
    """Options of `bateleur bench latency` and `bateleur bench throughput`; their --help describes each field."""

    peers: Sequence[str] = option((), _peers)
    """Engines to compare with: transformers, vllm, llama.cpp, or none. Default: transformers, vllm if --vllm is given,
    and llama.cpp if --gguf is given"""
    vllm: Path | None = option(None, _FILE)
    """Python interpreter of an environment with vLLM"""
    gguf: Path | None = option(None, _FILE)
    """GGUF file with the same weights, for llama.cpp (package llama-cpp-python)"""
    num_iters_warmup: int = option(1, Integer(0))
    """Number of warm-up rounds, which are not counted"""
    num_iters: int = option(5, _COUNT)
    """Number of measured rounds. Each engine runs once per round; figures are medians over the rounds"""
    output_json: Path | None = option(None, _FILE)
    """File to write the results to, as JSON"""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for name, needed in (("vllm", "vllm"), ("llama.cpp", "gguf")):
            if name in self.peers and getattr(self, needed) is None:
                refuse("peers", tuple(self.peers), f"without {name} unless {needed} is given, too")

    @property
    def chosen_peers(self) -> tuple[str, ...]:
        """Names of the engines to compare with, with defaults filled in."""
        given = {"vllm": self.vllm, "llama.cpp": self.gguf, "transformers": True}
        named = self.peers or [name for name in PEERS if given[name] is not None]
        return tuple(name for name in named if name != "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig(OfflineConfig):
    """Measure one batch of equal requests: time to first token, and time per output token after it."""

    input_len: int = option(32, _COUNT)
    """Prompt tokens per request"""
    output_len: int = option(64, Integer(2))
    """Output tokens per request"""
    batch_size: int = option(1, _COUNT)
    """Number of requests, which start together"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(OfflineConfig):
    """Measure output tokens per second for requests of random lengths that are all queued at the start."""

    input_len: int = option(64, _COUNT)
    """Mean number of prompt tokens"""
    output_len: int = option(32, _COUNT)
    """Mean number of output tokens"""
    num_prompts: int = option(64, _COUNT)
    """Number of requests"""
    random_range_ratio: float = option(0.5, Number(0, 1))
    """Spread of lengths: they are uniform between mean * (1 - ratio) and mean * (1 + ratio)"""
    seed: int = option(0, Integer(0))
    """Seed of lengths and token ids"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig(Checked):
    """Measure a server under Poisson arrivals: time to first token, time per output token, output tokens per second.
    The server is the one at `base_url`, or bateleur's, started with the arguments `ours`. If `vllm` is given, vLLM's
    server is started with the arguments `theirs` and measured, too.
    """

    base_url: str | None = option(None, maybe(_url))
    """URL of a running OpenAI-compatible server. Default: a server is started with the model"""
    served_model_name: str | None = option(None, maybe(text))
    """Model name in requests. Default: the model folder as given"""
    vllm: Path | None = option(None, _FILE)
    """Python interpreter of an environment with vLLM, whose server is compared"""
    ours: str = option("", lambda name, value: str(value))
    """Further arguments of `bateleur serve`, as one string"""
    theirs: str = option("", lambda name, value: str(value))
    """Further arguments of vLLM's server, as one string"""
    dataset_name: str = option("random", OneOf(("random", "conversations")))
    """Requests: random (prompts that share nothing) or conversations (four turns after a shared system prompt)"""
    num_prompts: int = option(40, _COUNT)
    """Number of requests per round"""
    request_rate: Sequence[float] = option((2.0, 6.0), Several(Number(0, above=True), "rates above 0"))
    """Arrival rate in requests per second; several rates are measured one after the other"""
    random_input_len: int = option(144, Integer(8))
    """Mean number of prompt tokens"""
    random_range_ratio: float = option(0.78, Number(0, 1))
    """Spread of prompt lengths: they are uniform between mean * (1 - ratio) and mean * (1 + ratio)"""
    random_output_len: int = option(48, Integer(2))
    """Output tokens per request"""
    timeout: float = option(600.0, Number(0, above=True))
    """Seconds without a byte of a reply, after which the benchmark fails"""
    num_iters: int = option(3, _COUNT)
    """Number of rounds. Each server runs once per round; figures are medians over the rounds"""
    seed: int = option(0, Integer(0))
    """Seed of prompts and arrival times"""
    output_json: Path | None = option(None, _FILE)
    """File to write the results to, as JSON"""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.base_url is not None and (self.vllm is not None or self.ours or self.theirs):
            refuse("base_url", self.base_url, "given without vllm, ours and theirs, which start servers")
