"""Runs all parts of the conformance check of a recurrence."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bateleur.mamba.conformance.mixed_batches import check_schedule
from bateleur.mamba.conformance.problem import RecurrenceCase, Step, broken
from bateleur.mamba.conformance.replay_and_fold import check_rings
from bateleur.mamba.conformance.scan_and_update import check_scan, check_update
from bateleur.mamba.recurrence import Recurrence
from bateleur.mamba.spec import PromptScan, StatePolicy
from bateleur.metadata.conformance.errors import ConformanceError, Violation

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}


@dataclass(frozen=True, slots=True)
class RecurrenceReport:
    """Number of calls per operator, and of tokens, that `check_recurrence` checked."""

    calls: dict[str, int]
    """Number of calls of `scan`, `update`, `replay` and `fold`."""
    tokens: int
    """Number of tokens whose outputs were compared."""


def check_recurrence(
    spec: Recurrence, step: Step, *, drafts: int = 3, ring_capacity: int = 9, tolerance: float | None = None,
    device: str = "cpu", seed: int = 0, prompt_scan: PromptScan = PromptScan.OWN,
) -> RecurrenceReport:  # fmt: skip
    """Compare the operators of a recurrence with a function that processes one token.

    Operators are called with requests of different lengths, padded rows, padding tokens, strided views, zero states,
    and states that are updated in place or to another slot. Unused state slots and ring entries are NaN. Outputs and
    states are compared, and all other memory must keep its bits. Scans use several block and chunk sizes. Replays
    (decodes from a saved state and a ring of later inputs) run until rings of every length were read and every number
    of tokens was accepted. Folds (ring entries added to the saved state) end at the newest token, and at block
    boundaries inside the last accepted tokens. Finally, requests share batches (chunked prefills, decodes, rejected
    drafts) under the state policies SLOTS and FOLD. There, `bateleur.mamba.planners` choose the state slots, as in an
    engine.

    Args:
        spec: the recurrence; its `policy` and `num_speculative_tokens` are replaced. Use small, odd sizes, and float64
            for `conv_dtype` and `ssm_dtype` for the strictest comparison.
        step: step(params, channels (conv_dim,), gates, state) -> (y (*output_shape), state (*state_shape)), all float64
            on the CPU, without writing to its arguments. The state of a pure convolution has the shape (0,).
        drafts: maximum number of draft tokens of a step.
        ring_capacity: entries of a ring, at least 1 + 2 * drafts.
        tolerance: maximum of |actual - expected| / (1 + |expected|); by default 1e-9 in float64, 2e-4 in float32,
            otherwise 0.05.
        device: device of the operators.
        seed: random seed.
        prompt_scan: kernels that scan prefills, for recurrences that have several.

    Raises:
        ConformanceError: a check failed; it has the first violation of each part.
        ValueError: `ring_capacity` is too small.
    """
    if ring_capacity < 1 + 2 * drafts:
        raise ValueError(f"ring_capacity is {ring_capacity}; it must be at least 1 + 2 * drafts = {1 + 2 * drafts}")
    allowed = _TOLERANCES.get(spec.conv_dtype, 0.05) if tolerance is None else tolerance
    cases, found = list[RecurrenceCase](), dict[str, str]()
    for part, check, policy, has_drafts in _PARTS:
        if "declaration" in found or (found and part == "schedule"):
            break  # later parts would only repeat these violations
        variant = replace(spec, policy=policy, num_speculative_tokens=drafts if has_drafts else 0)
        capacity = ring_capacity if has_drafts else 3
        cases.append(RecurrenceCase(variant, step, allowed, device, seed + len(cases), capacity, prompt_scan))
        try:
            check(cases[-1])
        except ConformanceError as error:
            (violation,) = error.violations
            found.setdefault(violation.letter or part, violation.text)
    if found:
        raise ConformanceError(repr(spec), [Violation(part, text) for part, text in found.items()])
    calls = sum((case.calls for case in cases), Counter[str]())
    return RecurrenceReport(dict(calls), sum(case.compared for case in cases))


def _check_declaration(case: RecurrenceCase) -> None:
    """Check equality and hash of the recurrence, and the shapes and dtypes of the tensors that it declares."""
    spec = case.spec
    if replace(spec) != spec or hash(replace(spec)) != hash(spec):
        raise broken("a copy is not equal to it: it must be a frozen dataclass of its sizes")
    for kind in ("gates", "parameters", "ring_entry"):
        names = [each.name for each in getattr(spec, kind)]
        if len({*names}) < len(names):
            raise broken(f"{kind} are called {names}; names must be different")
    if "request_conv" in [each.name for each in spec.ring_entry]:
        raise broken("ring_entry has the name 'request_conv', which is reserved for conv windows")
    if spec.ring_entry and not spec.state_shape:
        raise broken("it has a ring_entry and no state; ring_entry must be empty")
    if spec.state_shape and not spec.ring_entry:
        raise broken("it has a state and no ring_entry; FOLD recomputes a state from ring entries")
    for each in spec.gates:
        if each.dtype != spec.conv_dtype:
            raise broken(f"gate {each.name} is {each.dtype}; it must be conv_dtype = {spec.conv_dtype}")


_PARTS: tuple[tuple[str, Callable[[RecurrenceCase], None], StatePolicy, bool], ...] = (
    ("declaration", _check_declaration, StatePolicy.SLOTS, True),
    ("scan", check_scan, StatePolicy.SLOTS, True),
    ("update", check_update, StatePolicy.SLOTS, False),
    ("update", check_update, StatePolicy.SLOTS, True),
    ("replay", check_rings, StatePolicy.FOLD, False),
    ("replay", check_rings, StatePolicy.FOLD, True),
    ("schedule", check_schedule, StatePolicy.SLOTS, True),
    ("schedule", check_schedule, StatePolicy.FOLD, True),
)
"""Name and function of each part, its state policy, and whether there are draft tokens."""
