"""What a user may choose about the server: flags of `bateleur serve`. The names are those of vLLM and of uvicorn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bateleur.runner.assets import default_drafts
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.utils.arguments import (
    Integer,
    Number,
    OneOf,
    Several,
    flag,
    folder,
    maybe,
    refuse,
    shown,
    text,
)
from bateleur.runner.utils.options import option
from bateleur.runner.utils.vllm_names import translate_vllm_names

_FILE = maybe(lambda name, value: Path(folder(name, value)))
_NAMES = Several(text, "a sequence of names")
_SECONDS = Number(0, above=True)


def _keys(name: str, value: Any) -> tuple[str, ...]:
    """Keys as a header can hold them; an error never shows one."""
    for each in (keys := Several(lambda _, key: key, "a sequence of keys")(name, value)):
        if (
            not isinstance(each, str)
            or not each
            or not each.isascii()
            or not each.isprintable()
            or " " in each
        ):
            raise ValueError(
                f"{name} holds what is no key: it must be printable ASCII without spaces, not empty"
            )
    return keys


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str) or (value and (not value.startswith("/") or value.endswith("/"))):
        refuse(name, value, "empty, or a path that begins with / and does not end with it")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(ParserOptions):
    """Where it listens, whom it answers, how it reads what the model writes, and for how long it waits."""

    host: str = option("127.0.0.1", text)
    """Address to listen on; 0.0.0.0 or :: is every one of the machine's."""
    port: int = option(8000, Integer(0, 65535))
    """Port to listen on; 0 is any that is free."""
    uds: Path | None = option(None, _FILE)
    """Path of a Unix domain socket to listen on, in place of an address."""
    served_model_name: Sequence[str] = option((), _NAMES)
    """Names by which requests may ask for the model, the first is told in replies; default: the folder as given."""
    api_key: Sequence[str] = option((), _keys)
    """Keys, one of which a request to /v1 must bring as a bearer token; default: none is asked for. As with vLLM the
    other paths stay open."""
    allowed_origins: Sequence[str] = option((), _NAMES)
    """Origins whose pages may ask from a browser (CORS), or *; default: none but the server's own."""
    ssl_keyfile: Path | None = option(None, _FILE)
    """Private key, for TLS."""
    ssl_certfile: Path | None = option(None, _FILE)
    """Certificate, for TLS."""
    ssl_ca_certs: Path | None = option(None, _FILE)
    """Certificates of authorities; with them a client must have one of theirs."""
    root_path: str = option("", _path)
    """Path under which a proxy shows the server."""
    strict_fields: bool = option(False, flag)
    """Refuse requests with unknown fields, which are ignored and logged once by default."""
    response_store_bytes: int = option(64 * 2**20, Integer(0))
    """Bytes of stored responses of /v1/responses; those that were used least recently are dropped."""
    enable_force_include_usage: bool = option(False, flag)
    """Report the usage in every stream, whether or not stream_options ask for it."""
    return_tokens_as_token_ids: bool = option(False, flag)
    """Write tokens as token_id:ID in log probabilities, so that tokens of the same text differ."""
    disable_fastapi_docs: bool = option(False, flag)
    """Do not serve /docs and /openapi.json."""
    max_queued_requests: int = option(1024, Integer(0))
    """Requests that may wait beside those that run; the next one gets status 429."""
    max_logprobs: int = option(20, Integer(-1))
    """Most likely tokens that a request may ask for at each place of its prompt or its answer; -1 for no limit."""
    max_body_bytes: int = option(16 * 2**20, Integer(1))
    """Bytes of a request's body, at most; a longer one gets status 413."""
    h11_max_incomplete_event_size: int = option(64 * 2**10, Integer(1024))
    """Bytes of a request's head, at most."""
    timeout_keep_alive: int = option(5, Integer(1))
    """Seconds for which a connection without a request is kept open."""
    timeout_read: float = option(30.0, _SECONDS)
    """Seconds within which the head of a request must come, and then its body."""
    timeout_write: float = option(60.0, _SECONDS)
    """Seconds for which a client may read nothing of what is sent; then its request is aborted."""
    shutdown_timeout: int = option(30, Integer(0))
    """Seconds that running requests have to end after SIGTERM or Ctrl-C; a second signal ends at once."""
    uvicorn_log_level: str = option(
        "warning", OneOf(("critical", "error", "warning", "info", "debug", "trace"))
    )
    """What the HTTP server logs; "info" has a line for each request."""

    def __post_init__(self) -> None:
        ParserOptions.__post_init__(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            name = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            refuse(name, None, "given as well: TLS needs ssl_keyfile and ssl_certfile")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            refuse("ssl_ca_certs", self.ssl_ca_certs, "None without ssl_certfile")


def served_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an engine that is served: prefixes are shared, and the shipped model has its draft head, unless they
    say otherwise. "none" is no draft."""
    options = translate_vllm_names(options)
    engine = {"draft": None, "enable_prefix_caching": True, **default_drafts(options), **options}
    return engine | {"draft": None if engine["draft"] == "none" else engine["draft"]}


SHIPPED = "bateleur"
"""The model that comes with the package."""


def served_names(model: Path | None, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of a model: those that were given, else those of its folder; replies have the first."""
    if given:
        return tuple(given)
    return (SHIPPED,) if model is None else (model.resolve().name, str(model))


def require_served(name: str | None, names: Sequence[str]) -> None:
    """Raise ValueError if a body asks for another model than the one there is; silent means that one."""
    if name is not None and name not in names:
        known = ", ".join(map(shown, names))
        refuse("model", name, f"absent or one of {known}; --served-model-name says what else it is called")
