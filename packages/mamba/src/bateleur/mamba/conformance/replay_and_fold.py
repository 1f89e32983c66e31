"""Checks `replay` (decodes from a saved state and a ring of inputs) and `fold` (adds ring entries to the state)."""

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from bateleur.mamba.conformance.aliases import check_aliases
from bateleur.mamba.conformance.problem import RecurrenceCase, Tokens, broken, require_unchanged
from bateleur.mamba.conformance.scan_and_update import decode_rows
from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.planners import ReplayPlan
from bateleur.mamba.recurrence import FoldBatch, Tensors, TensorSpec

_LAYERS, _REQUESTS, _SLOTS = 2, 4, 200
_LEAST_STEPS, _MOST_STEPS = 12, 120


@dataclass(slots=True)
class _Request:
    """A request: row of its ring, slot and length of its saved state, and each layer's states after later tokens.

    states[layer][i] is the state after i more tokens than the saved state has.
    """

    row: int
    slot: int
    base: int
    states: list[list[Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.states[0]) - 1


def check_rings(problem: RecurrenceCase) -> None:
    """Run steps until every ring length and every number of accepted tokens occurred."""
    run, drafts, capacity = _Run(problem), problem.spec.num_speculative_tokens, problem.ring_capacity
    operations = {f"{a} of {q}" for q in range(1, 2 + drafts) for a in range(1, 1 + q)}
    operations |= {f"fill {n}" for n in range(capacity)} | {"in place", "elsewhere", *(["boundary"] if drafts else [])}
    for done in range(_MOST_STEPS):
        if not operations and done >= (_LEAST_STEPS if drafts else 0):
            return
        operations -= run.step(operations)
    raise AssertionError(f"after {_MOST_STEPS} steps these did not occur: {operations}")


class _Run:
    """State and ring tensors of two layers, NaN where nothing was written, and their expected contents."""

    def __init__(self, problem: RecurrenceCase) -> None:
        self.problem, self.drafts, self.capacity = problem, problem.spec.num_speculative_tokens, problem.ring_capacity
        self.rng, self.free = Random(1), list(range(_SLOTS - 1, 0, -1))
        spec, rows = problem.spec, 2 + _REQUESTS  # one row of the rings is unused
        self.params = [problem.params() for _ in range(_LAYERS)]
        self.stacked: Tensors = tuple(torch.stack(each) for each in zip(*self.params, strict=True))
        self.requests = [_Request(1 + r, self.free.pop() if r % 2 else 0, 3 + 4 * r) for r in range(_REQUESTS)]
        own = [request.slot for request in self.requests if request.slot]
        self.state = torch.stack([problem.states(_SLOTS, *own) for _ in range(_LAYERS)])
        request_conv = TensorSpec("request_conv", (rows, *spec.request_conv_shape), spec.conv_dtype)
        self.request_conv = problem.draw(request_conv, _LAYERS)
        keep = (spec.conv_width - 1, spec.conv_dim)
        self.conv = torch.full((_LAYERS, _SLOTS, *keep), torch.nan, dtype=spec.conv_dtype, device=problem.device)
        size = (_LAYERS, rows, self.capacity)
        self.ring: Tensors = tuple(
            torch.full((*size, *each.shape), torch.nan, dtype=each.dtype, device=problem.device)
            for each in spec.ring_entry
        )
        for request in self.requests:
            request.states = [[problem.start(state, request.slot)] for state in self.state]

    def step(self, operations: set[str]) -> set[str]:
        """Run a step of random requests and a padded row; return the names of the cases that occurred.

        operations: names of the cases that must still occur.
        """
        rng = self.rng
        requests = rng.sample(self.requests, rng.randint(2, _REQUESTS))
        counts = [self._counts(request, operations) for request in requests]
        done = {f"{a} of {q}" for q, a in counts} | {f"fill {request.length}" for request in requests}
        lens = [q for q, _ in counts]
        tokens = self.problem.tokens(sum(lens))
        rows = self._rows(requests, lens)
        check_aliases(rows)
        for layer in range(_LAYERS):
            self._replay(layer, requests, lens, tokens, rows)
        for request, (q, a) in zip(requests, counts, strict=True):
            for states in request.states:
                del states[len(states) - q + a :]
            self._spoil(request, request.length, request.length + q - a)  # rejected entries must not be read
        return done | self._fold(requests, [a for _, a in counts])

    def _counts(self, request: _Request, operations: set[str]) -> tuple[int, int]:
        """Choose numbers of tokens and of accepted tokens for a request's next step, mostly a case in `operations`.

        A case is "a of q": a accepted tokens of q.
        """
        most = min(1 + self.drafts, self.capacity - request.length)
        pairs = [(q, a) for q in range(1, 1 + most) for a in range(1, 1 + q)]
        wanted = [(q, a) for q, a in pairs if f"{a} of {q}" in operations]
        return self.rng.choice(wanted if wanted and self.rng.random() < 0.7 else pairs)

    def _rows(self, requests: list[_Request], lens: list[int]) -> MambaMetadata:
        def ints(*values: int) -> Tensor:
            return torch.tensor([*values, 0], device=self.problem.device)

        none = ints(*[0] * len(requests))
        starts, fills = ints(*[r.base for r in requests]), ints(*[r.length for r in requests])
        plan = ReplayPlan(ints(*[r.slot for r in requests]), none, starts, fills, none)
        longest = 1 if max(lens) == 1 else 1 + self.drafts
        return decode_rows([*lens, 0], longest, plan, self.problem.device, ints(*[r.row for r in requests]))

    def _replay(
        self, layer: int, requests: list[_Request], lens: list[int], tokens: Tokens, rows: MambaMetadata
    ) -> None:
        """Run `replay`, compare outputs, and check that only the ring entries of the tokens changed."""
        problem, outputs, first = self.problem, [], 0
        given = tokens.of(torch.arange(sum(lens)), placeholder=1)
        state, ring = self.state[layer], tuple(each[layer] for each in self.ring)
        before = tuple(each.clone() for each in (*ring, state))
        y = problem.spec.replay(self.params[layer], given.channels, given.gates, problem.given(state), ring, rows)
        problem.calls["replay"] += 1
        what = f"a replay of {lens} tokens over rings of {[request.length for request in requests]}"
        for request, n in zip(requests, lens, strict=True):
            index = range(first, first + n)
            done, states = problem.run(self.params[layer], tokens, index, request.states[layer][-1])
            outputs += done
            request.states[layer] += states[1:]
            first += n
        problem.outputs(y, outputs, what)
        nobody = torch.zeros(0)
        require_unchanged(before[-1], state, nobody, f"{what}: slot")
        for was, now, entry in zip(before, ring, problem.spec.ring_entry, strict=False):
            for request, n in zip(requests, lens, strict=True):
                at = self._places(request, request.length - n, request.length)
                if now[request.row][at].isnan().any():
                    raise broken(f"{what}: {entry.name} of a token is not in the ring, or is NaN")
                was[request.row][at] = now[request.row][at]
            require_unchanged(was, now, nobody, f"{what}: {entry.name} of ring")

    def _places(self, request: _Request, first: int, end: int) -> Tensor:
        return (request.base + torch.arange(first, end, device=self.problem.device)) % self.capacity

    def _spoil(self, request: _Request, first: int, end: int) -> None:
        """Set the ring entries of tokens `first` to `end` - 1 of a request, no longer valid, to NaN."""
        for each in self.ring:
            each[:, request.row, self._places(request, first, end)] = torch.nan

    def _fold(self, requests: list[_Request], accepted: list[int]) -> set[str]:
        """Fold full rings, and others at random, into saved states; return the names of the cases that occurred.

        accepted: number of tokens that each request accepted in this step. A fold takes all entries of a ring, or it
            stops inside the accepted tokens, as at a block boundary (case "boundary"). It writes the slot that it reads
            (case "in place") or another slot (case "elsewhere").
        """
        done: set[str] = set()
        count, dst = [], []
        for request, a in zip(requests, accepted, strict=True):
            full = request.length == self.capacity
            if not full and self.rng.random() < 0.85:
                count.append(self.rng.randint(-3, 9))  # must be ignored
                dst.append(0)
                continue
            inside = a > 1 and self.rng.random() < 0.6
            count.append(request.length - (self.rng.randint(1, a - 1) if inside else 0))
            stay = request.slot != 0 and self.rng.random() < 0.5
            dst.append(request.slot if stay else self.free.pop())
            done |= {"in place" if stay else "elsewhere"} | ({"boundary"} if inside else set())
        if any(dst) or self.rng.random() < 0.3:
            self._call_fold(requests, count, dst)
        return done

    def _call_fold(self, requests: list[_Request], count: list[int], dst: list[int]) -> None:
        problem, device = self.problem, self.problem.device
        keep = self.conv.shape[2]
        offset = [self.rng.randint(0, self.request_conv.shape[2] - keep) for _ in requests]
        fields = (
            [r.row for r in requests], [r.base for r in requests], count, [r.slot for r in requests], dst, offset,
        )  # fmt: skip
        at = FoldBatch(*(torch.tensor(values, device=device) for values in fields))
        check_aliases(at)
        tensors = (*self.ring, self.conv, self.state)
        kept = [each.clone() for each in tensors]
        problem.spec.fold(self.stacked, self.conv, problem.given(self.state), self.request_conv, self.ring, at)
        problem.calls["fold"] += 1
        what = f"a fold of {[c for c, d in zip(count, dst, strict=True) if d]} entries"
        for i, (was, now) in enumerate(zip(kept, tensors, strict=True)):
            kind, but = ("row of a ring", []) if i < len(self.ring) else ("slot", dst)
            for layer in range(_LAYERS):
                require_unchanged(was[layer], now[layer], torch.tensor(but), f"{what}: {kind}", "fold")
        for request, n, slot, first in zip(requests, count, dst, offset, strict=True):
            if slot:
                self._check_page(request, n, slot, first, what)

    def _check_page(self, request: _Request, n: int, slot: int, first: int, what: str) -> None:
        """Check the page (conv window and states) that a fold of `n` ring entries wrote to `slot`; update `request`.

        first: entry of the request's row of `request_conv` at which the copied window starts. what: name of the fold in
            an error.
        """
        window = self.request_conv[:, request.row, first : first + self.conv.shape[2]]
        if not torch.equal(self.conv[:, slot], window):
            raise broken(
                f"{what}: the conv window of slot {slot} is not the request conv window from entry {first} on", "fold"
            )
        for layer, states in enumerate(request.states):
            where = f"{what}: the state of layer {layer} after {n} of {request.length} entries"
            self.problem.close(self.state[layer, slot], states[n], where, "fold")
            states[n] = self.problem.start(self.state[layer], slot)  # as it was rounded
        self._spoil(request, 0, n)
        request.base, request.slot = request.base + n, slot
        for states in request.states:
            del states[:n]
