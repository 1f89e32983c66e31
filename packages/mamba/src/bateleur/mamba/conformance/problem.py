"""Random inputs for a recurrence, and the expected results, computed token by token in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bateleur.mamba.recurrence import Recurrence, State, Tensors, TensorSpec
from bateleur.mamba.spec import PromptScan
from bateleur.metadata.conformance.errors import ConformanceError, Violation

Step = Callable[[Tensors, Tensor, Tensors, Tensor], tuple[Tensor, Tensor]]
"""step(params, channels (conv_dim,), gates, state) -> (y, state): one token in float64, not in place."""

_MARGIN = 3
"""Unused columns of the projection before the channels and after the gates."""


def broken(what: str, part: str = "") -> ConformanceError:
    """Return a ConformanceError with the text `what`. part: failed part; `check_recurrence` replaces "" by its name."""
    return ConformanceError("the recurrence", [Violation(part, what)])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Random inputs of one layer: convolved channels and gates of its tokens."""

    channels: Tensor
    gates: Tensors

    @property
    def tensors(self) -> Tensors:
        """The channels, then the gates."""
        return (self.channels, *self.gates)

    def of(self, index: Tensor, placeholder: int = 0) -> Tokens:
        """Return the tokens with the indices `index`, then `placeholder` tokens of NaN, as views of one wide tensor."""
        count, device = len(index), self.channels.device
        parts = [each.flatten(1) for each in self.tensors]
        dtype, sizes = self.channels.dtype, [part.shape[1] for part in parts]
        wide = torch.full((count + placeholder, sum(sizes) + 2 * _MARGIN), torch.nan, dtype=dtype, device=device)
        views = wide[:, _MARGIN:-_MARGIN].split(sizes, 1)
        for view, part in zip(views, parts, strict=True):
            view[:count] = part[index]
        shapes = [gate.shape[1:] for gate in self.gates]
        gates = (view.unflatten(1, shape) for view, shape in zip(views[1:], shapes, strict=True))
        return Tokens(views[0], tuple(gates))


class RecurrenceCase:
    """A recurrence to check, its function `step` of one token, a random generator, and counts of calls and tokens."""

    def __init__(
        self, spec: Recurrence, step: Step, tolerance: float, device: str, seed: int, capacity: int, scan: PromptScan
    ) -> None:
        self.spec, self.step, self.tolerance, self.device = spec, step, tolerance, device
        self.ring_capacity, self.prompt_scan = capacity, scan
        self.generator = torch.Generator().manual_seed(seed)
        self.calls = Counter[str]()
        self.compared = 0
        """Number of tokens whose output was compared."""

    def draw(self, spec: TensorSpec, *front: int, least: torch.dtype | None = None) -> Tensor:
        """Return random values (*front, *spec.shape), sign as `spec.sign`, in the wider of `spec.dtype` and `least`."""
        dtype = spec.dtype if least is None else torch.promote_types(spec.dtype, least)
        return spec.random((*front, *spec.shape), self.generator).to(self.device, dtype)

    def params(self) -> Tensors:
        """Return random parameters of one layer."""
        return tuple(self.draw(each, least=self.spec.compute_dtype) for each in self.spec.parameters)

    def tokens(self, count: int) -> Tokens:
        """Return the random inputs of `count` tokens."""
        spec = self.spec
        channels = TensorSpec("channels", (spec.conv_dim,), spec.conv_dtype)
        return Tokens(self.draw(channels, count), tuple(self.draw(gate, count) for gate in spec.gates))

    def states(self, slots: int, *own: int) -> Tensor:
        """Return states (slots, *state_shape), random in slots `own`, NaN in others; (slots, 0) without a state."""
        each = TensorSpec("state", self.spec.state_shape or (0,), self.spec.ssm_dtype)
        made = torch.full((slots, *each.shape), torch.nan, dtype=each.dtype, device=self.device)
        for slot in own:
            made[slot] = self.draw(each)
        return made

    def given(self, state: Tensor) -> State:
        """Return `state` as operators take it: None for a pure convolution."""
        return state if self.spec.state_shape else None

    def start(self, state: Tensor, slot: int) -> Tensor:
        """Return a slot's state as `step` takes it, float64 on the CPU; zeros for slot 0."""
        return (state[slot] if slot else torch.zeros_like(state[slot])).double().cpu()

    def run(
        self, params: Tensors, tokens: Tokens, index: Sequence[int], state: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run `step` over the tokens `index`; return their outputs, and a list of `state` and the state after each."""
        of_layer = tuple(each.double().cpu() for each in params)
        outputs, states = [], [state]
        for t in index:
            gates = tuple(gate[t].double().cpu() for gate in tokens.gates)
            y, state = self.step(of_layer, tokens.channels[t].double().cpu(), gates, state)
            outputs.append(y)
            states.append(state)
        return outputs, states

    def close(self, actual: Tensor, expected: Tensor, what: str, part: str = "") -> None:
        """Raise ConformanceError if |actual - expected| > tolerance * (1 + |expected|) in any element.

        what: name of `actual` in the error. part: as in `broken`.
        """
        if actual.shape != expected.shape:
            raise broken(f"{what} has the shape {tuple(actual.shape)}; it must be {tuple(expected.shape)}", part)
        found = actual.double().cpu()
        bad = ~((found - expected).abs() <= self.tolerance * (1 + expected.abs()))
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            raise broken(f"{what} is {float(found[at]):.6g} at {at}; it must be {float(expected[at]):.6g}", part)

    def outputs(self, y: Tensor, expected: Sequence[Tensor], what: str) -> None:
        """Check shape and dtype of an operator's output, and compare its leading tokens with `expected`.

        what: name of the operator call in an error.
        """
        shape = (len(y), *self.spec.output_shape)
        if tuple(y.shape) != shape or y.dtype != self.spec.conv_dtype:
            raise broken(f"{what} returns {y.dtype} {tuple(y.shape)}; it must be {self.spec.conv_dtype} {shape}")
        self.compared += len(expected)
        if expected:
            self.close(y[: len(expected)], torch.stack(list(expected)), f"the output of {what}")


def require_unchanged(before: Tensor, after: Tensor, except_slots: Tensor, what: str, part: str = "") -> None:
    """Raise ConformanceError if an entry of dimension 0 changed, except entry 0 and the entries `except_slots`.

    what: noun for an entry in the error. part: as in `broken`.
    """
    equal = (before == after) | (before.isnan() & after.isnan())
    changed = ~equal.flatten(1).all(1)
    changed[except_slots.long()] = False
    changed[0] = False
    if changed.any():
        raise broken(f"{what} {int(changed.nonzero()[0])} changed; the operator must not write there", part)
