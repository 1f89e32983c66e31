"""Tokens read and written for one reply, counted as they come."""

from __future__ import annotations

from typing import Any

from bateleur.runner.outputs import RequestOutput


class Usage:
    """What `usage` tells, of reports that hold what is new."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._written = 0

    def count(self, output: RequestOutput, *, only_prompt: bool = False) -> None:
        """Take in a report."""
        self._prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        if not only_prompt:
            self._written += sum(len(each.token_ids) for each in output.outputs)

    def told(self) -> dict[str, Any]:
        """As it stands in a reply; `cached_tokens` are those of prompts that were found in the caches."""
        read = sum(length for length, _ in self._prompts.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": self._written,
            "total_tokens": read + self._written,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }
