"""The metadata builder passes `check_builder`: classes A, C, D, E, G, L and M of the bug catalogue."""

from __future__ import annotations

import numpy as np
import pytest

from bateleur.mamba import CacheLayout, MambaCacheMode, MambaMetadataBuilder, RequestStates, StatePolicy
from bateleur.metadata import BatchLimits, BuildPhase, KVCacheGroup
from bateleur.metadata.conformance import ConformanceError, check_builder

LIMITS = BatchLimits(max_num_reqs=7, max_num_tokens=40, max_model_len=24)


def builder(kind: type[MambaMetadataBuilder] = MambaMetadataBuilder) -> MambaMetadataBuilder:
    layout = CacheLayout(MambaCacheMode.NONE, LIMITS.max_model_len, 0, LIMITS.max_model_len)
    return kind(layout, 4, LIMITS.max_num_reqs, "cpu")


def check(kind: type[MambaMetadataBuilder] = MambaMetadataBuilder) -> frozenset[str]:
    """The Mamba group follows an attention group, as in a hybrid model."""
    groups = (KVCacheGroup(4, 6), KVCacheGroup(LIMITS.max_model_len, 1, has_slots=False))
    report = check_builder(builder(kind), LIMITS, groups=groups, group=1, query_lens=(1,))
    assert len(report.keys) == 3
    return report.read


def test_the_builder_conforms() -> None:
    assert check() == MambaMetadataBuilder.reads


class MakesSlotsAnew(MambaMetadataBuilder):
    def build(self, *args, **kwargs):
        self._buffers = type(self._buffers)(self.layout, LIMITS.max_num_reqs, "cpu")
        return super().build(*args, **kwargs)


class RemembersTheLargest(MambaMetadataBuilder):
    """Stale `is_prefilling`, as in vLLM #41841: later batches are split like an earlier one with prefills."""

    prompts = 0

    def build(self, common, group, phase=BuildPhase.RUN, **kwargs):
        meta = super().build(common, group, phase, **kwargs)
        self.prompts = max(self.prompts, meta.num_prefills)
        object.__setattr__(meta, "num_prefills", self.prompts)
        return meta


class BlanksPaddedRows(MambaMetadataBuilder):
    """Writes to its input, as ROCm's builder did to `query_start_loc` (vLLM #25985)."""

    def build(self, common, group, phase=BuildPhase.RUN, **kwargs):
        common.seq_lens[common.num_actual_reqs :] = 1
        return super().build(common, group, phase, **kwargs)


class AsksTheDevice(MambaMetadataBuilder):
    def build(self, common, group, phase=BuildPhase.RUN, **kwargs):
        longest = int(np.max(common.num_computed_tokens.tolist(), initial=0))
        assert longest >= 0
        return super().build(common, group, phase, **kwargs)


@pytest.mark.parametrize(
    ("kind", "letter"),
    [(MakesSlotsAnew, "C"), (RemembersTheLargest, "A"), (BlanksPaddedRows, "L"), (AsksTheDevice, "M")],
)
def test_a_builder_that_breaks_a_class_is_told_so(kind: type[MambaMetadataBuilder], letter: str) -> None:
    with pytest.raises(ConformanceError, match=rf"\[{letter}\]"):
        check(kind)


@pytest.mark.parametrize("mode", [MambaCacheMode.ALIGN, MambaCacheMode.ALL])
def test_the_builder_conforms_where_states_outlive_steps(mode: MambaCacheMode) -> None:
    layout = CacheLayout(mode, 8, 0, LIMITS.max_model_len)
    groups = (KVCacheGroup(4, 6), KVCacheGroup(8, layout.columns(), has_slots=False))
    paged = MambaMetadataBuilder(layout, 4, LIMITS.max_num_reqs, "cpu")
    report = check_builder(paged, LIMITS, groups=groups, group=1, query_lens=(1,))
    assert len(report.keys) == 3


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("mode", list(MambaCacheMode))
@pytest.mark.parametrize("policy", list(StatePolicy))
def test_the_builder_conforms_with_states_that_travel(policy: StatePolicy, mode: MambaCacheMode, drafts: int) -> None:
    block = LIMITS.max_model_len if mode is MambaCacheMode.NONE else 8
    layout = CacheLayout(mode, block, drafts, LIMITS.max_model_len, policy)
    own = KVCacheGroup(block, layout.columns(), has_slots=False)
    rows = KVCacheGroup(block, 1, has_slots=False)
    states = RequestStates(1 + LIMITS.max_num_reqs, "cpu")
    kept = MambaMetadataBuilder(layout, 4, LIMITS.max_num_reqs, "cpu", states)
    lens = (1, 1 + drafts)[: 1 + (drafts > 0)]
    report = check_builder(kept, LIMITS, groups=(KVCacheGroup(4, 6), own, rows), group=1, query_lens=lens)
    assert len(report.keys) == 3 * len(lens)
