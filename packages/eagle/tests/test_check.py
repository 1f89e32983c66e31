"""The conformance check passes what is shipped, and finds what is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.cudagraph import CudagraphDispatcher, CudaGraphMode, RecordedBackend
from bateleur.eagle.buffers import DraftCache
from bateleur.eagle.conformance import check_drafter
from bateleur.eagle.conformance.toy_engine import ToyRequest, ToyTarget, paged_caches
from bateleur.eagle.drafter import DraftContext, Drafter, TargetNeeds
from bateleur.eagle.managers import DraftGraphs
from bateleur.eagle.ngram import NGramDrafter
from bateleur.eagle.speculator import EagleSpeculator
from bateleur.metadata.conformance import ConformanceError
from eagle_doubles.drafters import NoDrafts, RandomDrafter, ScriptedDrafter, StickyDrafter
from eagle_doubles.engine import GraphEngine
from eagle_doubles.heads import ToyHead

K, VOCAB = 3, 19


def speculator(engine: GraphEngine) -> EagleSpeculator:
    head: Any = ToyHead(engine.target)
    kv = paged_caches(1, engine.num_blocks, engine.block_size)
    return EagleSpeculator(head, DraftCache(kv, engine.groups), engine.backend, engine.limits, K)


def captured(engine: GraphEngine) -> EagleSpeculator:
    head: Any = ToyHead(engine.target)
    kv = paged_caches(1, engine.num_blocks, engine.block_size)
    graphs = DraftGraphs(RecordedBackend(), (1, 2, 4))
    made = EagleSpeculator(head, DraftCache(kv, engine.groups), engine.backend, engine.limits, K, graphs=graphs)
    plan = CudagraphDispatcher.make(
        CudaGraphMode.FULL_AND_PIECEWISE, (4, 8, 16), max_num_reqs=4, max_num_tokens=64, query_lens=(1 + K,)
    )
    made.capture(engine.capture(plan, RecordedBackend()))
    return made


def lookup(engine: GraphEngine) -> NGramDrafter:
    limits = engine.limits
    return NGramDrafter(K, limits.max_num_reqs, limits.max_model_len, "cpu", prompt_lookup_min=1, prompt_lookup_max=3)


def scripted(right: int | None) -> Callable[[GraphEngine], Drafter]:
    """Knows what the target says: its prompts tell the requests of the check apart."""

    def make(engine: GraphEngine) -> Drafter:
        def continuation(tokens: list[int]) -> list[int]:
            (owner,) = (each for each in engine.requests.values() if each.tokens == tokens)
            twin = ToyRequest(owner.row, list(tokens), owner.seed, owner.temperature)
            return engine.plain(twin, K)[len(tokens) :]

        return ScriptedDrafter(continuation, K, right, VOCAB)

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda _: NoDrafts(K),
        lambda _: StickyDrafter(K),
        lambda _: RandomDrafter(K, VOCAB),
        lambda _: RandomDrafter(8, VOCAB, seed=3),
        lookup,
        speculator,
        captured,
    ],
    ids=["none", "sticky", "random", "random-8", "lookup", "speculator", "captured"],
)
def test_what_is_shipped_passes(make: Callable[[GraphEngine], Drafter]) -> None:
    report = check_drafter(make, engine=GraphEngine)
    assert report.num_proposals > 100


@pytest.mark.parametrize("right", [None, 0, 2])
def test_g_right_up_to_s_gives_s_plus_one_tokens_per_step(right: int | None) -> None:
    report = check_drafter(scripted(right), reads_device=True)
    few = 0.8 if right != 0 else 0.0  # in one run fewer drafts than K are asked for
    assert report.num_steps > 20
    assert (
        (K if right is None else right) + 1 - few
        <= report.mean_acceptance_length
        <= (K if right is None else right) + 1
    )


class Broken:
    """A drafter with one fault; without one it is right."""

    needs = TargetNeeds(hidden=True)
    num_speculative_tokens = K

    def __init__(self, fault: str = "") -> None:
        self.fault, self.state, self.calls = fault, dict[int, int](), 0

    def admit(self, row: int, token_ids: list[int]) -> None:
        if self.fault != "keeps what another request left in the row" or row not in self.state:
            self.state[row] = token_ids[0]

    def propose(self, context: DraftContext) -> Tensor:
        self.calls += 1
        (hidden,), batch, token = context.features, context.batch, context.next_token
        count = len(token)
        last = batch.query_start_loc[:count] + context.num_valid - 1
        mark = (hidden[last].sum(1) * 1e3).long()  # what the target made of the last token that stayed
        drafts = ((token + mark).unsqueeze(1) + torch.arange(K)) % VOCAB
        drafts[:, context.num_drafts :] = -1
        return getattr(self, "_" + (self.fault or "sound").partition(" ")[0], lambda drafts, *_: drafts)(
            drafts, context
        )

    def _looks(self, drafts: Tensor, context: DraftContext) -> Tensor:
        mark = (context.features[0].sum() * 1e3).nan_to_num(5.0).long()
        return drafts.where(drafts < 0, (drafts + (mark if "padding" in self.fault else context.next_token[0])) % VOCAB)

    def _multiplies(self, drafts: Tensor, context: DraftContext) -> Tensor:
        (hidden,), batch = context.features, context.batch
        last = batch.query_start_loc[: len(drafts)] + context.num_valid - 1
        chosen = (torch.arange(len(hidden)) == last.unsqueeze(1)).to(hidden.dtype)  # 0 times NaN is NaN
        mark = ((chosen @ hidden).sum(1) * 1e3).nan_to_num(5.0).long()
        return drafts.where(drafts < 0, (drafts + mark.unsqueeze(1)) % VOCAB)

    def _keeps(self, drafts: Tensor, context: DraftContext) -> Tensor:
        mark = torch.tensor([self.state[row] for row in context.rows.tolist()])
        return drafts.where(drafts < 0, (drafts + mark.unsqueeze(1)) % VOCAB)

    def _counts(self, drafts: Tensor, context: DraftContext) -> Tensor:
        return drafts.where(drafts < 0, (drafts + self.calls * (context.num_drafts == K)) % VOCAB)

    def _writes(self, drafts: Tensor, context: DraftContext) -> Tensor:
        context.num_valid.fill_(1)
        return drafts

    def _waits(self, drafts: Tensor, context: DraftContext) -> Tensor:
        return drafts if int(context.num_valid.max()) else drafts + 1

    def _lists(self, drafts: Tensor, context: DraftContext) -> Any:
        return [[0] * K] * len(drafts)

    def _narrow(self, drafts: Tensor, context: DraftContext) -> Tensor:
        return drafts.int()

    def _short(self, drafts: Tensor, context: DraftContext) -> Tensor:
        return drafts[:, : context.num_drafts]

    def _draft(self, drafts: Tensor, context: DraftContext) -> Tensor:
        return drafts.where(drafts < 0, drafts + 1)

    def _eager(self, drafts: Tensor, context: DraftContext) -> Tensor:
        return drafts.where(drafts >= 0, 0)


def test_the_drafter_without_a_fault_passes() -> None:
    check_drafter(lambda _: Broken())


@pytest.mark.parametrize(
    ("fault", "letters", "text"),
    [
        ("lists in place of a tensor", "P", "it is <class 'list'>"),
        ("narrow ids", "P", r"it is torch.int32 \(2, 3\)"),
        ("short rows where less is asked", "KP", r"it is torch.int64 \(2, 0\)"),
        ("draft ids taken for target ids", "P", "an id is 19; ids are below 19"),
        ("eager to draft more than is asked", "N", r"later ones must be -1 \(first: 0\)"),
        ("writes to the counts", "W", "propose writes to num_valid"),
        ("waits for the device", "S", "propose waits for the device: "),
        ("looks at the first row only", "BK", "drafts differ when it is alone"),
        ("keeps what another request left in the row", "B", "'second in its row' at "),
        ("looks at the sum over padding, too", "BDK", "drafts differ when the step is padded"),
        ("multiplies padding by zero", "D", "drafts differ when the step is padded"),
        ("counts its calls", "BK", "drafts differ after steps with fewer drafts"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, letters: str, text: str) -> None:
    reads = fault.startswith("keeps")
    with pytest.raises(ConformanceError, match=text) as found:
        check_drafter(lambda _: Broken(fault), reads_device=reads)
    assert "".join(found.value.letters) == letters


class Spoiling(Broken):
    """Writes where the target keeps its keys, which no drafter is shown."""

    def __init__(self, engine: GraphEngine) -> None:
        super().__init__()
        self.engine = engine

    def propose(self, context: DraftContext) -> Tensor:
        self.engine.kv[0][1][1:] *= 0.5
        return super().propose(context)


def test_a_text_that_is_not_plain_decodings_is_found() -> None:
    with pytest.raises(ConformanceError, match="the text is not that of plain decoding") as found:
        check_drafter(Spoiling)
    assert "T" in found.value.letters


def test_the_number_of_drafts_is_limited() -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens=9 must be in \[1, 8\]"):
        check_drafter(lambda _: NoDrafts(9))


def test_another_target() -> None:
    report = check_drafter(lambda _: StickyDrafter(K), target=lambda: ToyTarget(num_layers=1, seed=4))
    assert report.num_steps > 20
