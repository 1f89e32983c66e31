"""Options of the server, which are flags of `bateleur serve`. The names are those of vLLM and uvicorn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bateleur.runner.assets import default_drafts
from bateleur.runner.serve.parsers.options import ParserOptions
from bateleur.runner.utils.arguments import Integer, Number, OneOf, Several, flag, folder, maybe, refuse, shown, text
from bateleur.runner.utils.options import Checked, option
from bateleur.runner.utils.vllm_names import translate_vllm_names

_FILE = maybe(lambda name, value: Path(folder(name, value)))
_NAMES = Several(text, "a sequence of names")
_SECONDS = Number(0, above=True)


def _keys(name: str, value: Any) -> tuple[str, ...]:
    """Return valid API keys. Errors do not show them."""
    for each in (keys := Several(lambda _, key: key, "a sequence of keys")(name, value)):
        if not isinstance(each, str) or not each or not each.isascii() or not each.isprintable() or " " in each:
            raise ValueError(f"{name} holds an invalid key: keys must be printable ASCII without spaces, not empty")
    return keys


def _module(name: str, value: Any) -> tuple[str, str]:
    """Return the adapter's name and folder. value: a LoRA adapter as NAME=FOLDER or as a JSON object. name: option that
    an error names.
    """
    rule = 'NAME=FOLDER, or {"name": NAME, "path": FOLDER}'
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            refuse(name, value, rule)
    if isinstance(value, Mapping):
        value = (value.get("name"), value.get("path"))
    pair = value.partition("=")[::2] if isinstance(value, str) else value
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, str) and each for each in pair):
        refuse(name, value, rule)
    return pair[0], pair[1]


_MODULES = Several(_module, "a sequence of names and folders")


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str) or (value and (not value.startswith("/") or value.endswith("/"))):
        refuse(name, value, "empty, or a path that begins with / and does not end with /")
    return value


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Checked):
    """Options of the HTTP server: address, TLS, sizes and timeouts."""

    host: str = option("127.0.0.1", text)
    """Address to listen on; 0.0.0.0 or :: for all interfaces."""
    port: int = option(8000, Integer(0, 65535))
    """Port to listen on; 0 for any free port."""
    uds: Path | None = option(None, _FILE)
    """Path of a Unix domain socket to listen on instead of an address."""
    ssl_keyfile: Path | None = option(None, _FILE)
    """Private key, for TLS."""
    ssl_certfile: Path | None = option(None, _FILE)
    """Certificate, for TLS."""
    ssl_ca_certs: Path | None = option(None, _FILE)
    """CA certificates; clients must present a certificate signed by one of them."""
    root_path: str = option("", _path)
    """Path prefix that a proxy puts before the server's paths."""
    allowed_origins: Sequence[str] = option((), _NAMES)
    """Origins whose web pages may send requests (CORS), or * for all (default: only the server's own page)."""
    disable_fastapi_docs: bool = option(False, flag)
    """Do not serve /docs and /openapi.json."""
    max_body_bytes: int = option(16 * 2**20, Integer(1))
    """Maximum size of a request body in bytes; longer bodies get HTTP 413."""
    h11_max_incomplete_event_size: int = option(64 * 2**10, Integer(1024))
    """Maximum size of a request's head in bytes."""
    timeout_keep_alive: int = option(5, Integer(1))
    """Seconds to keep an idle connection open."""
    timeout_read: float = option(30.0, _SECONDS)
    """Seconds to receive the head of a request, and again for its body."""
    timeout_write: float = option(60.0, _SECONDS)
    """Abort a streaming request if the client reads nothing for this many seconds."""
    shutdown_timeout: int = option(30, Integer(0))
    """Seconds for running requests to finish after SIGTERM or Ctrl-C; a second signal stops at once."""
    uvicorn_log_level: str = option("warning", OneOf(("critical", "error", "warning", "info", "debug", "trace")))
    """Log level of the HTTP server; "info" logs each request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            name = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            refuse(name, None, "given: TLS needs both ssl_keyfile and ssl_certfile")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            refuse("ssl_ca_certs", self.ssl_ca_certs, "None without ssl_certfile")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(HttpOptions, ParserOptions):
    """Options of the server: HTTP, names, access, limits, and parsing of the model's output."""

    served_model_name: Sequence[str] = option((), _NAMES)
    """Names of the model in requests; replies have the first (default: the folder as given)."""
    lora_modules: Sequence[tuple[str, str]] = option((), _MODULES)
    """LoRA adapters, each NAME=FOLDER or a JSON object {"name": NAME, "path": FOLDER}; a request chooses one by its
    name as `model` (needs enable_lora)."""
    api_key: Sequence[str] = option((), _keys)
    """API keys. Requests to /v1 must send one of them as a bearer token; as in vLLM, other paths stay open (default:
    no key is required)."""
    strict_fields: bool = option(False, flag)
    """Reject requests with unknown fields (default: ignore them and log each once)."""
    response_store_bytes: int = option(64 * 2**20, Integer(0))
    """Maximum bytes of stored responses of /v1/responses; the least recently used are dropped."""
    enable_force_include_usage: bool = option(False, flag)
    """Report the usage in every stream, even without stream_options."""
    return_tokens_as_token_ids: bool = option(False, flag)
    """Write tokens as token_id:ID in log probabilities, so that tokens with the same text differ."""
    max_queued_requests: int = option(1024, Integer(0))
    """Maximum number of queued requests; further requests get HTTP 429."""
    max_logprobs: int = option(20, Integer(-1))
    """Maximum number of log probabilities per token that a request may ask for; -1 for no limit."""


def served_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add the server's defaults to options of `LLM`: prefix caching, and the shipped draft head unless draft="none"."""
    options = translate_vllm_names(options)
    engine = {"draft": None, "enable_prefix_caching": True, **default_drafts(options), **options}
    return engine | {"draft": None if engine["draft"] == "none" else engine["draft"]}


def served_names(model: Path | None, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of a model in requests: `given`, or else its folder's name and path. Replies have the first."""
    if given:
        return tuple(given)
    return ("bateleur",) if model is None else (model.resolve().name, str(model))


def require_served(name: str | None, names: Sequence[str]) -> None:
    """Raise ValueError if `name` is not one of the served models' names. None is accepted."""
    if name is not None and name not in names:
        known = ", ".join(map(shown, names))
        refuse("model", name, f"absent or one of {known}; --served-model-name adds names")
