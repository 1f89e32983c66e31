"""The web page: it loads nothing from other servers, and its security policy allows only its own parts."""

import re
from base64 import b64encode
from hashlib import sha256

from bateleur.runner.serve.about import web_page

HTML, POLICY = web_page()
PAGE = HTML.decode()


def test_it_takes_nothing_from_elsewhere() -> None:
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", PAGE)
    assert [link for link, _ in links] == ["data:,"]
    assert re.findall(r"https?://[^\"' ]+", PAGE) == ["http://www.w3.org/2000/svg"], "the name of SVG, no address"


def test_its_script_and_style_are_the_only_ones_that_may_run() -> None:
    assert "unsafe" not in POLICY
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in POLICY
    assert not re.findall(r"\son\w+=|\sstyle=", PAGE), "handlers and styles of elements are refused by it"


def test_what_models_write_is_never_markup() -> None:
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", PAGE)
