"""The web page at `/`: a prompt, its completion and engine statistics. It loads nothing from other servers."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files


@cache
def html() -> bytes:
    """Return the page in UTF-8."""
    return files(__name__).joinpath("index.html").read_bytes()


@cache
def content_security_policy() -> str:
    """Return the Content-Security-Policy header, which allows only the page's own script, style and server."""
    script, style = (
        " ".join(f"'sha256-{b64encode(sha256(text).digest()).decode()}'" for text in _texts(tag))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _texts(tag: str) -> list[bytes]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html(), re.DOTALL)
