"""What `bateleur bench` measures: its flags, by the names that vLLM's benchmarks have where they have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bateleur.runner.utils.arguments import Integer, Number, OneOf, Several, folder, maybe, refuse, text
from bateleur.runner.utils.options import Checked, option

PEERS = ("transformers", "vllm", "llama.cpp")
_FILE = maybe(lambda name, value: Path(folder(name, value)))
_COUNT = Integer(1)


def _peers(name: str, value: Any) -> tuple[str, ...]:
    named = Several(OneOf((*PEERS, "none")), "a sequence of names")(name, value)
    if "none" in named and len(named) > 1:
        refuse(name, value, "names of engines, or none alone")
    return tuple(dict.fromkeys(named))


def _url(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("http://"):
        refuse(name, value, "an address that begins with http://")
    try:
        split = urlsplit(value)
        known = split.port != 0 and (split.hostname or "").isprintable() and " " not in value
    except ValueError:  # no port, or no IPv6 address
        known = False
    if not (known and split.hostname):
        refuse(name, value, "an address, http://host or http://host:port")
    return value.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig(Checked):
    """What both measurements without a server have in common."""

    peers: Sequence[str] = option((), _peers)
    """Engines beside: transformers, vllm, llama.cpp, or none; default: transformers, and those that the flags below are
    given for."""
    vllm: Path | None = option(None, _FILE)
    """A Python that has vLLM."""
    gguf: Path | None = option(None, _FILE)
    """GGUF file of the same weights, for llama.cpp (package llama-cpp-python)."""
    num_iters_warmup: int = option(1, Integer(0))
    """Rounds before those that count."""
    num_iters: int = option(5, _COUNT)
    """Rounds that count, in each of which every engine has its turn."""
    output_json: Path | None = option(None, _FILE)
    """File to write the figures to."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        for name, needed in (("vllm", "vllm"), ("llama.cpp", "gguf")):
            if name in self.peers and getattr(self, needed) is None:
                refuse("peers", tuple(self.peers), f"without {name}, or {needed} given as well")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The peers to run."""
        given = {"vllm": self.vllm, "llama.cpp": self.gguf, "transformers": True}
        named = self.peers or [name for name in PEERS if given[name] is not None]
        return tuple(name for name in named if name != "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig(OfflineConfig):
    """A batch of equal requests that start together: the time of the first token, and of each one behind it."""

    input_len: int = option(32, _COUNT)
    """Tokens of each prompt."""
    output_len: int = option(64, Integer(2))
    """Tokens of each answer."""
    batch_size: int = option(1, _COUNT)
    """Requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(OfflineConfig):
    """More requests than run at once, of lengths of their own: tokens a second until the last one ends."""

    input_len: int = option(64, _COUNT)
    """Tokens of a prompt, on average."""
    output_len: int = option(32, _COUNT)
    """Tokens of an answer, on average."""
    num_prompts: int = option(64, _COUNT)
    """Requests."""
    random_range_ratio: float = option(0.5, Number(0, 1))
    """Lengths are drawn from those that differ from the average by up to this part of it."""
    seed: int = option(0, Integer(0))
    """Of what is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig(Checked):
    """Requests to a server as they arrive: time to the first token, time per token, tokens a second."""

    base_url: str | None = option(None, maybe(_url))
    """Server to ask, of any engine that answers OpenAI's clients; default: one is started, with the model."""
    served_model_name: str | None = option(None, maybe(text))
    """What that server calls the model; default: the folder as given."""
    vllm: Path | None = option(None, _FILE)
    """A Python that has vLLM, whose server takes turns with ours."""
    ours: str = option("", lambda name, value: str(value))
    """More options of `bateleur serve`, as one text."""
    theirs: str = option("", lambda name, value: str(value))
    """More options of vLLM's server, as one text."""
    dataset_name: str = option("random", OneOf(("random", "conversations")))
    """Prompts of their own, or conversations of four turns behind a prompt that all share."""
    num_prompts: int = option(40, _COUNT)
    """Requests of a round."""
    request_rate: Sequence[float] = option((2.0, 6.0), Several(Number(0, above=True), "rates above 0"))
    """Requests a second that arrive, by a Poisson process; several are measured one after the other."""
    random_input_len: int = option(144, Integer(8))
    """Tokens of a prompt, on average."""
    random_range_ratio: float = option(0.78, Number(0, 1))
    """Their lengths differ from the average by up to this part of it."""
    random_output_len: int = option(48, Integer(2))
    """Tokens of every answer."""
    timeout: float = option(600.0, Number(0, above=True))
    """Seconds without a byte of an answer, after which a server is taken to be dead."""
    num_iters: int = option(3, _COUNT)
    """Rounds, in each of which every server has its turn; figures are medians over them."""
    seed: int = option(0, Integer(0))
    """Of what is drawn."""
    output_json: Path | None = option(None, _FILE)
    """File to write the figures to."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.base_url is not None and (self.vllm is not None or self.ours or self.theirs):
            refuse(
                "base_url",
                self.base_url,
                "given alone: vllm, ours and theirs are of servers that are started",
            )
