"""Calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, see `functions`."""

from bateleur.runner.serve.parsers.hermes import Qwen3Coder

__all__ = ["Qwen3Coder"]
