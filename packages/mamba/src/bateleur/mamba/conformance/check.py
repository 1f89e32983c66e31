"""All parts of the contract, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bateleur.mamba.conformance.errors import broken
from bateleur.mamba.conformance.reference import Problem, Step
from bateleur.mamba.conformance.rings import check_rings
from bateleur.mamba.conformance.schedule import check_schedule
from bateleur.mamba.conformance.slots import check_scan, check_update
from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.spec import PromptScan, StatePolicy
from bateleur.metadata.conformance.errors import ConformanceError, Violation

Part = tuple[str, Callable[[], None]]
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}


@dataclass(frozen=True, slots=True)
class RecurrenceReport:
    """What was checked."""

    calls: dict[str, int]
    """Of `scan`, `update`, `replay` and `fold`."""
    tokens: int
    """Whose outputs were compared."""


def check_recurrence(
    spec: Recurrence,
    step: Step,
    *,
    drafts: int = 3,
    ring_capacity: int = 9,
    tolerance: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    prompt_scan: PromptScan = PromptScan.OWN,
) -> RecurrenceReport:
    """Hold a recurrence to a function of one token.

    Every operator is called with ragged rows, padded ones and tokens of nobody behind them, strided views, zero states,
    states of their own in place and elsewhere, and NaN in every slot, ring entry and lane that belongs to nobody;
    outputs and states are compared, and what nobody may write must keep its bits. Scans are cut in every way; replays
    go on until rings of every fill were read and every number of accepted tokens occurred; folds end at the newest
    token and at boundaries inside what was accepted last. At the end requests share batches over pages and rings,
    under both policies, by the real planners.

    Args:
        spec: the recurrence; its policy and its number of drafts are replaced. With float64 for `conv_dtype` and
            `ssm_dtype` the comparison is sharpest; sizes should be small, and odd.
        step: step(params, channels (conv_dim,), gates, state) -> (y (*output_shape), state (*state_shape)), all float64
            on the CPU; it writes to none of its arguments. A pure convolution has the state (0,), and returns it.
        drafts: most draft tokens of a step.
        ring_capacity: tokens of a ring, at least 1 + 2 * drafts.
        tolerance: of |got - wanted| / (1 + |wanted|); None is 1e-9 in float64, 2e-4 in float32, and 0.05 below.
        device: where the operators run.
        seed: of parameters, tokens and states.
        prompt_scan: which kernels take prompts, of recurrences that have a choice, where they serve.

    Raises:
        ConformanceError: what is wrong first in each part, whose name is the letter of the violation.
        ValueError: a ring that is too short.
    """
    if ring_capacity < 1 + 2 * drafts:
        raise ValueError(
            f"ring_capacity is {ring_capacity}; it must be at least 1 + 2 * drafts = {1 + 2 * drafts}"
        )
    allowed = _TOLERANCES.get(spec.conv_dtype, 0.05) if tolerance is None else tolerance
    problems: list[Problem] = []

    def of(policy: StatePolicy, k: int) -> Problem:
        variant = replace(spec, policy=policy, num_speculative_tokens=k)
        problems.append(Problem(variant, step, allowed, device, seed + len(problems)))
        return problems[-1]

    parts = [
        ("declaration", lambda: check_declaration(spec)),
        *_parts(of, drafts, ring_capacity, prompt_scan),
    ]
    if violations := _violations(parts):
        raise ConformanceError(repr(spec), violations)
    calls = sum((Counter(problem.calls) for problem in problems), Counter[str]())
    return RecurrenceReport(dict(calls), sum(problem.compared for problem in problems))


def _parts(
    of: Callable[[StatePolicy, int], Problem], drafts: int, capacity: int, scan: PromptScan
) -> list[Part]:
    """What is checked, in order; without drafts first, where there is a choice."""
    slots, fold = StatePolicy.SLOTS, StatePolicy.FOLD
    return [
        ("scan", lambda: check_scan(of(slots, drafts), scan)),
        ("update", lambda: check_update(of(slots, 0), 0)),
        ("update", lambda: check_update(of(slots, drafts), drafts)),
        ("replay", lambda: check_rings(of(fold, 0), 0, 3)),
        ("replay", lambda: check_rings(of(fold, drafts), drafts, capacity)),
        ("schedule", lambda: check_schedule(of(slots, drafts), capacity, scan)),
        ("schedule", lambda: check_schedule(of(fold, drafts), capacity, scan)),
    ]


def _violations(parts: Sequence[Part]) -> list[Violation]:
    """What is wrong first in each part."""
    found: dict[str, str] = {}
    for part, check in parts:
        if "declaration" in found or (found and part == "schedule"):
            break  # what follows is made of what is wrong
        try:
            check()
        except ConformanceError as error:
            (violation,) = error.violations
            found.setdefault(violation.letter or part, violation.text)
    return [Violation(part, text) for part, text in found.items()]


def check_declaration(spec: Recurrence) -> None:
    """What is said of tensors can be true, and layers of equal recurrences are known as such."""
    if replace(spec) != spec or hash(replace(spec)) != hash(spec):
        raise broken("a copy is not equal to it: it must be a frozen dataclass of its sizes")
    for kind in ("gates", "parameters", "ring_entry"):
        names = [each.name for each in getattr(spec, kind)]
        if len({*names}) < len(names):
            raise broken(f"{kind} are called {names}; names must differ")
    if "live" in [each.name for each in spec.ring_entry]:
        raise broken("ring_entry has the name 'live', which is that of conv windows")
    if spec.ring_entry and not spec.state_shape:
        raise broken("it has a ring_entry and no state; only the inputs of a state are kept")
    if spec.state_shape and not spec.ring_entry:
        raise broken("it has a state and no ring_entry; under FOLD a state is made again of its inputs")
    for each in spec.gates:
        if each.dtype != spec.conv_dtype:
            raise broken(f"gate {each.name} is {each.dtype}; it must be conv_dtype = {spec.conv_dtype}")
