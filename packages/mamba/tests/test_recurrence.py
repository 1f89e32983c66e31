"""Declared tensors are those of the pool, and only a recurrence's own files name it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import bateleur.mamba
from bateleur.mamba import GatedDelta, KimiDelta, Mamba2, Mixer, Recurrence, ShortConv, StatePolicy, StatePool

OWN = {"__init__", "mamba2", "gated_delta", "kimi_delta", "delta_rule", "short_conv"}
"""Files that may name a recurrence."""


def test_nothing_but_its_own_file_names_a_recurrence():
    root = Path(bateleur.mamba.__file__).parent
    others = [path for path in root.rglob("*.py") if path.stem not in OWN and "ops" not in path.parts]
    assert len(others) > 15
    for path in others:
        text = path.read_text().lower()
        for name in ("mamba2", "mamba-2", "delta", "shortconv", "short_conv"):
            assert name not in text, path


@pytest.mark.parametrize(
    "make", [partial(Mamba2, 4, 8, 16, 2), partial(GatedDelta, 2, 4, 6, 5), partial(KimiDelta, 3, 6, 5)]
)
def test_what_is_declared_is_what_a_pool_holds(make):
    spec = make(num_speculative_tokens=3, policy=StatePolicy.FOLD)
    pool = StatePool([spec], 3, "cpu", num_rows=2, ring_capacity=9)
    conv, state = pool.layer(0)
    rings = pool.rings(0)
    assert (tuple(conv.shape[1:]), tuple(state.shape[1:])) == (spec.conv_shape, spec.state_shape)
    assert state.dtype == spec.ssm_dtype
    for entry, each in zip(rings.entries, spec.ring_entry, strict=True):
        assert (tuple(entry.shape), entry.dtype) == ((2, 9, *each.shape), each.dtype)
    assert spec.ring_bytes(9) == sum(entry[0].nbytes for entry in rings.entries)


def test_a_pure_convolution_has_no_state_in_a_pool():
    spec = ShortConv(6, conv_width=3, num_speculative_tokens=2, policy=StatePolicy.FOLD)
    pool = StatePool(
        [spec, Mamba2(4, 8, 16, 2, num_speculative_tokens=2, policy=StatePolicy.FOLD)], 3, "cpu", num_rows=2
    )
    conv, state = pool.layer(0)
    assert (tuple(conv.shape), state) == ((3, 2, 6), None)
    assert (tuple(pool.rings(0).request_conv.shape), pool.rings(0).entries) == ((2, 4, 6), ())
    of_rows = sum(each.request_conv_bytes + each.ring_bytes(16) for each in pool.specs)
    assert pool.nbytes == 3 * sum(each.page_bytes for each in pool.specs) + 2 * of_rows
    assert (spec.page_bytes, spec.request_conv_bytes, spec.ring_bytes(16)) == (24, 48, 0)


def test_operators_of_a_state_have_no_default():
    class Unfinished(ShortConv):
        state_shape = (2, 3, 4)

    spec, x = Unfinished(6), torch.ones(1, 6)
    assert ShortConv(6).update((), x, (), None, None) is x
    for call in (spec.update, partial(spec.replay, ring=())):
        with pytest.raises(NotImplementedError, match="Unfinished has a state: define scan"):
            call(params=(), channels=x, gates=(), state=torch.ones(2, 2, 3, 4), rows=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_weight": torch.ones(4, 3)}, r"conv_weight has the shape \(4, 3\); it must be \(20, 4\)"),
        ({"conv_bias": torch.ones(3)}, r"conv_bias has the shape \(3,\); it must be \(20,\)"),
        ({"params": (torch.ones(4),)}, r"params has 1 tensors; it must be \(A, D, dt_bias\)"),
        ({"params": (torch.ones(4), torch.ones(1, 4), torch.ones(4))}, r"D has the shape \(1, 4\); .* \(4,\)"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, message):
    fitting = {"conv_weight": torch.ones(20, 4), "conv_bias": None, "params": (torch.ones(4),) * 3}
    Mixer(Mamba2(4, 3, 4, 1), **fitting)
    with pytest.raises(ValueError, match=message):
        Mixer(Mamba2(4, 3, 4, 1), **(fitting | change))


def test_a_recurrence_says_all_of_it():
    with pytest.raises(TypeError, match="abstract"):
        Recurrence()
    with pytest.raises(ValueError, match=r"dt limits are \(2\.0, 1\.0\); they must satisfy 0 <= dt_min <= dt_max"):
        Mamba2(4, 3, 4, 1, 2.0, 1.0)
    with pytest.raises(ValueError, match=r"num_value_heads is 5; it must be a multiple of num_key_heads = 2"):
        GatedDelta(2, 5, 4, 4)
    with pytest.raises(ValueError, match="key_dim is 0; it must be at least 1"):
        KimiDelta(2, 0, 4)


def test_sizes_of_the_delta_rules():
    """Of a layer of Qwen3.5-9B, by hand; a key head's k stands once in a ring, and a decay by channel is as large."""
    fold = {"num_speculative_tokens": 3, "policy": StatePolicy.FOLD}
    qwen, kimi = GatedDelta(16, 32, 128, 128, **fold), KimiDelta(32, 128, 128, **fold)
    assert (qwen.conv_dim, kimi.conv_dim) == (2 * 16 * 128 + 32 * 128, 3 * 32 * 128)
    assert qwen.state_bytes == kimi.state_bytes == 32 * 128 * 128 * 4
    assert qwen.ring_bytes(16) == 16 * (2 * 16 * 128 + 4 * 32 * 128 + 4 * 32)
    assert kimi.ring_bytes(16) == 16 * (2 + 4 + 4) * 32 * 128
    assert (qwen.beta_scale, GatedDelta(1, 1, 4, 4, allow_neg_eigval=True).beta_scale) == (1.0, 2.0)
