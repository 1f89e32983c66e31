"""What was decided of requests as they were admitted: whoever has it makes the same requests."""

from __future__ import annotations

from dataclasses import dataclass

from bateleur.runner.outputs import RequestOutputKind
from bateleur.runner.requests.request_group import RequestGroup
from bateleur.runner.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A `RequestGroup` as plain values, before it runs: of each field that is all that its members have."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    priority: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    """Of each member, in their order."""

    @classmethod
    def of(cls, group: RequestGroup) -> AdmittedRequest:
        """That of a group which has not run yet."""
        first = group.members[0]
        return cls(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            params=first.params,
            kind=group.kind,
            priority=first.priority,
            stop_token_ids=first.stop_token_ids,
            max_total_tokens=first.max_total_tokens,
            bad_words=first.bad_words,
            seeds=tuple(each.seed for each in group.members),
        )
