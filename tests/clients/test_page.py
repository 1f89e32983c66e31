"""The page at `/`, in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

browsers = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
expect = browsers.expect
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: run .ci/clients")
PROMPT = "class Shape:\n    def __init__(self, width, height):\n" * 8


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, server: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page, opened; nothing may go wrong in it, and it may ask nobody but its server."""
    context = browser.new_context(color_scheme=request.param)
    page, wrong, asked = context.new_page(), list[browsers.Error](), list[str]()
    page.on("pageerror", lambda error: wrong.append(error))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server}/")
    expect(page.locator("#model")).to_have_text("shipped")
    yield page
    context.close()
    assert not wrong
    assert all(url.startswith((server, "data:")) for url in asked)


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def style(page: Page, selector: str, name: str) -> str:
    value = page.eval_on_selector(selector, "(element, name) => getComputedStyle(element)[name]", name)
    assert isinstance(value, str)
    return value


def test_drafts_and_cached_tokens_can_be_told_apart(page: Page) -> None:
    for _ in range(2):  # the second finds the prompt in the cache
        page.get_by_label("Prompt", exact=True).fill(PROMPT)
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("status")).to_contain_text("done (length): 120 tokens", timeout=30_000)
    text = page.get_by_role("region", name="Prompt and generated text")
    assert (text.text_content() or "").startswith(PROMPT)
    expect(text.locator("mark.cached").first).to_be_visible()
    expect(text.locator("mark.draft").first).to_be_visible()
    found = re.match(r"(\d+) of (\d+)", page.locator("#cached").text_content() or "")
    assert found is not None
    assert 0 < int(found[1]) < int(found[2])
    looks = {kind: style(page, f"#text mark.{kind}", "borderBottomStyle") for kind in ("cached", "draft")}
    assert looks == {"cached": "dotted", "draft": "solid"}, "not by colour alone"
    for kind in ("cached", "draft"):
        ink, tint = (style(page, f"#text mark.{kind}", name) for name in ("color", "backgroundColor"))
        assert contrast(ink, tint) >= 4.5


def test_words_can_be_read_in_light_and_dark(page: Page) -> None:
    for selector, ground in (("body", "body"), ("#curves h2", "#curves"), ("#run", "#run"), ("#model", "body")):
        ink, paper = style(page, selector, "color"), style(page, ground, "backgroundColor")
        assert contrast(ink, paper) >= 4.5, selector


def test_keys_alone_are_enough(page: Page) -> None:
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.type("def parse(")
    page.get_by_label("Tokens", exact=True).fill("400")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("status")).to_contain_text("generating")
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_contain_text("stopped after")
    page.get_by_label("Prompt", exact=True).focus()
    seen = []
    for _ in range(5):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    assert seen == ["max-tokens", "temperature", "chat", "run", "text"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_screen_readers_hear_names_and_the_end(page: Page) -> None:
    expect(page.get_by_role("img")).to_have_count(5)
    for curve in ("tokens per second", "requests running", "cache in use", "drafts accepted"):
        expect(page.get_by_role("img", name=re.compile(curve))).to_be_visible()
    expect(page.get_by_role("status")).to_have_count(1)
    for role, name in (("textbox", "Prompt"), ("spinbutton", "Tokens"), ("checkbox", "as a chat message")):
        expect(page.get_by_role(role, name=name)).to_be_visible()  # type: ignore[arg-type]


def test_curves_follow_the_engine(page: Page) -> None:
    page.get_by_label("Tokens", exact=True).fill("300")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("done", timeout=30_000)
    curve = page.get_by_role("img", name=re.compile(r"tokens per second: [1-9]"))
    expect(curve).to_be_visible(timeout=5_000)
    assert curve.locator("path.line").get_attribute("d")


def test_an_error_is_said_in_words(page: Page) -> None:
    page.get_by_label("as a chat message").check()
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("chat template")
    expect(page.get_by_role("button", name="Run")).to_be_enabled()
