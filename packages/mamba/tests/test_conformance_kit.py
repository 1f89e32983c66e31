"""`check_recurrence` passes the recurrences of the package, and finds planted defects in each part."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bateleur.mamba import (
    CopyPlan,
    FoldBatch,
    Mamba2,
    MambaMetadata,
    PrefillChunks,
    ReplayPlan,
    ShortConv,
    SlotPlan,
    TensorSpec,
)
from bateleur.mamba.conformance import ConformanceError, check_aliases, check_recurrence
from one_token import one_token

F64 = torch.float64
SIZES = (4, 3, 5, 2, 0.01, 2.5)
DTYPES = {"conv_dtype": F64, "ssm_dtype": F64}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("drafts", "capacity"), [(1, 3), (3, 9), (5, 16)])
def test_mamba2_conforms(groups, width, drafts, capacity):
    spec = Mamba2(*SIZES[:3], groups, *SIZES[4:], conv_width=width, **DTYPES)
    report = check_recurrence(spec, one_token(spec), drafts=drafts, ring_capacity=capacity, seed=drafts)
    assert report.tokens > 300
    assert report.calls["replay"] >= 2 * capacity
    assert min(report.calls[name] for name in ("scan", "update", "fold")) > 4


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_mamba2_conforms_in_low_precision(act, kept):
    spec = Mamba2(*SIZES, conv_dtype=act, ssm_dtype=kept)
    tolerance = None if act == kept else 0.05
    check_recurrence(spec, one_token(spec), tolerance=tolerance)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("act", [F64, torch.bfloat16])
def test_a_short_convolution_conforms(width, act):
    """The state of a pure convolution is (0,) for the reference and None for the operators."""
    spec = ShortConv(5, conv_width=width, conv_dtype=act)
    report = check_recurrence(spec, one_token(spec))
    assert min(report.calls[name] for name in ("scan", "update", "replay", "fold")) > 4


class LeavesTheWindow(ShortConv):
    def fold(self, params, conv, state, request_conv, ring, at):
        pass


def test_a_window_that_stays_where_it_is_is_found():
    spec = LeavesTheWindow(5, conv_dtype=F64)
    with pytest.raises(ConformanceError, match="the conv window of slot") as error:
        check_recurrence(spec, one_token(spec))
    assert error.value.letters == ("fold",)


class ForgetsWhereItWas(Mamba2):
    def scan(self, params, channels, gates, state, chunks, chunk_size, read):
        return Mamba2.scan(self, params, channels, gates, state, chunks, chunk_size, 0 * read)


class ReadsTheNullSlot(Mamba2):
    def scan(self, params, channels, gates, state, chunks, chunk_size, read):
        return Mamba2.scan(self, params, channels, gates, state, chunks, chunk_size, read.masked_fill(read == 0, 9))


class KeepsBoundariesOneChunkLate(Mamba2):
    def scan(self, params, channels, gates, state, chunks, chunk_size, read):
        late = replace(chunks, chunk_write=chunks.chunk_write.roll(1))
        return Mamba2.scan(self, params, channels, gates, state, late, chunk_size, read)


class KeepsEndsAlone(Mamba2):
    """Stores only the state at the end of a step: a boundary inside a prefill is lost."""

    def scan(self, params, channels, gates, state, chunks, chunk_size, read):
        last = torch.zeros_like(chunks.chunk_write)
        ends = chunks.row_chunk_loc[1:].long() - 1
        last[ends] = chunks.chunk_write[ends]
        ends_alone = replace(chunks, chunk_write=last)
        return Mamba2.scan(self, params, channels, gates, state, ends_alone, chunk_size, read)


class ScribblesElsewhere(Mamba2):
    def scan(self, params, channels, gates, state, chunks, chunk_size, read):
        state[50] = 1.0
        return Mamba2.scan(self, params, channels, gates, state, chunks, chunk_size, read)


class KeepsTheLastTokenAlone(Mamba2):
    def update(self, params, channels, gates, state, rows):
        write = rows.plan.ssm_write.clone()
        write[:, :-1] = 0
        rows = replace(rows, plan=replace(rows.plan, ssm_write=write)) if write.shape[1] > 1 else rows
        return Mamba2.update(self, params, channels, gates, state, rows)


class UpdatesInRowOrder(Mamba2):
    """Assumes that row r has slot r."""

    def update(self, params, channels, gates, state, rows):
        order = rows.plan.ssm_read.sort().values
        return Mamba2.update(
            self, params, channels, gates, state, replace(rows, plan=replace(rows.plan, ssm_read=order))
        )


class AdvancesTheCheckpoint(Mamba2):
    def replay(self, params, channels, gates, state, ring, rows):
        y = Mamba2.replay(self, params, channels, gates, state, ring, rows)
        state[rows.plan.slot] *= 0.5
        return y


class CountsWhatWasRejected(Mamba2):
    """Appends to the ring after rejected tokens."""

    def replay(self, params, channels, gates, state, ring, rows):
        longer = (rows.plan.ring_len + (rows.plan.ring_len > 0)).clamp(max=ring[0].shape[1] - 4)
        rows = replace(rows, plan=replace(rows.plan, ring_len=longer))
        return Mamba2.replay(self, params, channels, gates, state, ring, rows)


class BeginsRingsAtZero(Mamba2):
    def replay(self, params, channels, gates, state, ring, rows):
        rows = replace(rows, plan=replace(rows.plan, ring_start=0 * rows.plan.ring_start))
        return Mamba2.replay(self, params, channels, gates, state, ring, rows)


class FoldsOneTooFew(Mamba2):
    def fold(self, params, conv, state, request_conv, ring, at):
        Mamba2.fold(self, params, conv, state, request_conv, ring, at._replace(counts=(at.counts - 1).clamp(1)))


class FoldsInPlace(Mamba2):
    """Writes a fold to the source slot instead of the boundary's slot."""

    def fold(self, params, conv, state, request_conv, ring, at):
        dst = torch.where((at.src > 0) & (at.dst > 0), at.src, at.dst)
        Mamba2.fold(self, params, conv, state, request_conv, ring, at._replace(dst=dst))


class FoldsWithOneLayersParameters(Mamba2):
    def fold(self, params, conv, state, request_conv, ring, at):
        Mamba2.fold(self, tuple(each[:1].expand_as(each) for each in params), conv, state, request_conv, ring, at)


class TakesTheOldestWindow(Mamba2):
    def fold(self, params, conv, state, request_conv, ring, at):
        Mamba2.fold(self, params, conv, state, request_conv, ring, at._replace(page_offset=0 * at.page_offset))


class LooksAtTheWholeBatch(Mamba2):
    """Uses the gates of the step's first tokens, which is right only without decodes."""

    def scan(self, params, channels, gates, state, chunks, chunk_size, read):
        whole = gates[0]
        if whole._base is not None:
            whole = whole.as_strided(whole.shape, whole.stride(), whole.storage_offset() % whole.stride(0))
        return Mamba2.scan(self, params, channels, (whole,), state, chunks, chunk_size, read)


class KeepsNoRing(Mamba2):
    ring_entry = ()


class HasGatesOfItsOwn(Mamba2):
    @property
    def gates(self):
        return (TensorSpec("dt", (self.num_heads,), torch.float16),)


DEFECTS = {
    "declaration": [KeepsNoRing, HasGatesOfItsOwn],
    "scan": [ForgetsWhereItWas, ReadsTheNullSlot, KeepsBoundariesOneChunkLate, KeepsEndsAlone, ScribblesElsewhere],
    "update": [KeepsTheLastTokenAlone, UpdatesInRowOrder],
    "replay": [AdvancesTheCheckpoint, CountsWhatWasRejected, BeginsRingsAtZero],
    "fold": [FoldsOneTooFew, FoldsInPlace, FoldsWithOneLayersParameters, TakesTheOldestWindow],
    "schedule": [LooksAtTheWholeBatch],
}


@pytest.mark.parametrize(
    ("part", "kind"),
    [(part, kind) for part, kinds in DEFECTS.items() for kind in kinds],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_planted_is_found_where_it_is(part, kind):
    spec = kind(*SIZES, **DTYPES)
    with pytest.raises(ConformanceError, match=kind.__name__) as error:
        check_recurrence(spec, one_token(spec))
    assert error.value.violations[0].letter == part
    others = {"scan", "update", "replay", "fold", "declaration"} - {part}
    assert not others & {each.letter for each in error.value.violations} or part == "declaration"


def test_a_ring_that_is_too_short_is_refused():
    spec = Mamba2(*SIZES, **DTYPES)
    with pytest.raises(ValueError, match=r"ring_capacity is 6; it must be at least 1 \+ 2 \* drafts = 7"):
        check_recurrence(spec, one_token(spec), ring_capacity=6)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def decodes(plan: SlotPlan | ReplayPlan, request_row: Tensor | None = None) -> MambaMetadata:
    loc = torch.arange(len(plan.conv_offset) + 1, dtype=torch.int32)
    return MambaMetadata(len(loc) - 1, len(loc) - 1, 0, plan, loc, PrefillChunks.empty("cpu"), 1, 1, request_row)


@dataclass
class Case:
    """A step whose row 1 has the value of `bad` in a field: then it shares with row 0 what one of them writes."""

    good: int
    bad: int
    said: str

    def step(self, value: int):
        raise NotImplementedError


class Written(Case):
    def step(self, value):
        none = ints(0, 0)
        return decodes(SlotPlan(ints(1, 2), torch.tensor([[3, 4], [value, 0]]), none, none, none, none))


class Read(Case):
    def step(self, value):
        none = ints(0, 0)
        return decodes(SlotPlan(ints(1, value), torch.tensor([[3, 4], [5, 0]]), none, none, none, none))


class RingOf(Case):
    def step(self, value):
        none = ints(0, 0)
        return decodes(ReplayPlan(ints(7, 7), none, none, none, none), ints(3, value))


class Folded(Case):
    def step(self, value):
        none = ints(0, 0)
        return FoldBatch(ints(1, 2), none, ints(1, 1), ints(4, value), ints(6, 8), none)


class Copied(Case):
    def step(self, value):
        none = ints(0, 0)
        return CopyPlan(ints(1, 2), none, ints(1, value), ints(6, 8), none, none)


@pytest.mark.parametrize(
    "case",
    [
        Written(5, 4, "slot 4 is written by row 0 and by row 1"),
        Read(5, 3, "slot 3 is written by row 0 and read by row 1"),
        RingOf(0, 3, "request row 3 is written by row 0 and by row 1"),
        Folded(8, 6, "slot 6 is written by row 0 and read by row 1"),
        Copied(8, 6, "slot 6 is written by row 0 and read by row 1"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_aliased_slots_are_refused(case):
    check_aliases(case.step(case.good))
    with pytest.raises(ValueError, match=case.said):
        check_aliases(case.step(case.bad))


def test_aliased_pages_of_prompts_are_refused():
    chunks = ints(0, 2, 4).int()
    chunks = PrefillChunks(chunks, chunks, ints(0, 1).int(), ints(5, 6), ints(0, 1, 2).int(), 1)
    check_aliases(chunks, ints(5, 0))
    with pytest.raises(ValueError, match="slot 5 is written by row 0 and read by row 1"):
        check_aliases(chunks, ints(0, 5))


def test_steps_without_rows_have_no_aliases():
    none, no_writes = ints(0)[:0], torch.zeros((0, 2), dtype=torch.int64)
    check_aliases(PrefillChunks.empty("cpu"), none)
    check_aliases(decodes(SlotPlan(none, no_writes, none, none, none, none)))
    check_aliases(decodes(ReplayPlan(none, none, none, none, none), none))
    check_aliases(FoldBatch(none, none, none, none, none, none))
    check_aliases(CopyPlan(none, none, none, none, none, none))
