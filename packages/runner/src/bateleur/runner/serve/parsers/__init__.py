"""Parsers of what models write: calls of tools and reasoning, by name. Pure functions of text."""

from __future__ import annotations

from bateleur.runner.serve.parsers.hermes import Hermes
from bateleur.runner.serve.parsers.qwen3_coder import Qwen3Coder
from bateleur.runner.serve.parsers.scanner import Scanner
from bateleur.runner.serve.parsers.think import Think

TOOL_PARSERS: dict[str, type[Scanner]] = {"hermes": Hermes, "qwen3_coder": Qwen3Coder}
REASONING_PARSERS: dict[str, type[Think]] = {"think": Think, "qwen3": Think}
