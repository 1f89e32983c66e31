"""A file of requests: one JSON object a line, each on its own. What is wrong with a line stays with that line."""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bateleur.runner.cli.console import naming
from bateleur.runner.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of the file: what it asks for, or why that cannot be told."""

    line: int
    id: str | int
    """The line's own, or its number."""
    digest: str
    """Of all that decides its tokens."""
    prompt: dict[str, Any]
    params: SamplingParams
    where: str
    error: str | None = None


def read_requests(file: str, defaults: Mapping[str, Any], engine: Mapping[str, Any]) -> list[LineRequest]:
    """The requests of a file.

    Lines end at a newline alone; blank ones, and a byte order mark, are passed over.

    file: its path; `-` is stdin. defaults: sampling parameters that a line may replace. engine: what decides tokens
    beside the line; for the digest.
    """
    name = "stdin" if file == "-" else file
    with naming(name):
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    requests: list[LineRequest] = []
    first_of: dict[str | int, int] = {}
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not raw.strip():
            continue
        where = f"{name}, line {number}"
        ident: str | int = number
        try:
            fields = _object(raw)
            own = _ident(fields.pop("id", number))
            if (first := first_of.setdefault(own, number)) != number:
                raise ValueError(f"id is {json.dumps(own)}; line {first} has it already")
            ident = own
            prompt: dict[str, Any] = {
                key: fields.pop(key) for key in ("prompt", "prompt_token_ids") if key in fields
            }
            if len(prompt) != 1:
                raise ValueError("exactly one of prompt, prompt_token_ids is needed")
            params = SamplingParams.from_dict({**defaults, **fields})
            asked = json.dumps([ident, prompt, asdict(params), dict(engine)], sort_keys=True)
        except (ValueError, RecursionError) as error:
            wrong = f"{where}: {error}"
            requests.append(LineRequest(number, ident, "", {}, SamplingParams(), where, wrong))
        else:
            digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
            requests.append(LineRequest(number, ident, digest, prompt, params, where))
    return requests


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {raw[error.start]:#04x} at position {error.start + 1} is not UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at position {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("not a request: brackets are nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}; an object is needed")
    return fields


def _ident(value: object) -> str | int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f"id is {value!r}; it must be text or an integer")
    return value
