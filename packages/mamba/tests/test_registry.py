"""Schemas of the operators, and the cost of importing them."""

from __future__ import annotations

import inspect

import pytest
import torch

import bateleur.mamba
import reference_operators as reference
from bateleur.mamba import ops
from bateleur.mamba.ops import FORMS


def test_import_is_light(modules_of):
    """Maximum number of modules that the import adds to torch and numpy."""
    new = modules_of("mamba")
    assert len(new) < 84, new
    assert not any(name.split(".")[0] == "triton" for name in new)


def test_public_names_are_sorted_and_documented():
    names = bateleur.mamba.__all__
    assert names == sorted(names)
    assert all(getattr(bateleur.mamba, name).__doc__ for name in names if name not in FORMS)
    for name, forms in FORMS.items():  # where the operator is declared
        assert forms.torch.__name__ == name
        assert forms.torch.__doc__


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FORMS)
def test_opcheck(make, name):
    """Schema (mutation and aliasing), fake shapes, and a trace with dynamic shapes."""
    p = make([2, 1], drafts=1, dtype=torch.float32)
    replay, fold, copy = ring_arguments()
    every = {
        "causal_conv1d_varlen": p.conv
        | p.prompts("chunk_start_loc", "chunk_row")
        | {"request_conv": torch.zeros(3, 4, p.conv["x"].shape[1]), "request_conv_write": torch.tensor([1, 2])},
        "causal_conv1d_update": p.conv | p.rows | {"max_query_len": 2, "offset": torch.tensor([0, 1])},
        "ssd_scan_varlen": p.ssm
        | p.prompts("chunk_start_loc", "chunk_row", "row_chunk_loc", "max_chunks_per_row", "chunk_size"),
        "selective_state_update": p.ssm | p.rows | {"max_query_len": 2, "write": torch.tensor([[1, 3], [2, 4]])},
        "replay_update": replay,
        "fold_ring": fold,
        "copy_states": copy,
        "fold_window": {name: fold[name] for name in ("conv_state", "request_conv", "ring_row", "dst", "page_offset")},
        "gated_rms_norm": {"x": torch.randn(2, 6), "z": torch.randn(2, 6), "weight": torch.ones(6)}
        | {"groups": 2, "eps": 1e-5},
    }
    args = (every | delta_arguments())[name]
    for state in ("conv_state", "ssm_state"):
        if state in args:
            args[state] = args[state].nan_to_num()
    torch.library.opcheck(getattr(torch.ops.bateleur, name).default, (), args)


def ring_arguments():
    """Two rows with 2 and 1 tokens, the first of which folds, in two layers."""

    def ints(*values):
        return torch.tensor(values)

    state = {"ssm_state": torch.randn(5, 2, 3, 4)}
    rings = {"ring_x": torch.randn(3, 4, 2, 3), "ring_dt": torch.rand(3, 4, 2), "ring_B": torch.randn(3, 4, 1, 4)}
    rows = {"ring_row": ints(1, 2), "ring_start": ints(3, 0)}
    A = -torch.rand(2)
    tokens = {"x": torch.randn(3, 2, 3), "dt": torch.randn(3, 2), "B": torch.randn(3, 1, 4), "C": torch.randn(3, 1, 4)}
    params = {"A": A, "D": torch.randn(2), "dt_bias": torch.randn(2), "dt_min": 0.0, "dt_max": 1.0}
    loc = {"query_start_loc": ints(0, 2, 3).int(), "max_query_len": 2, "slot": ints(1, 0), "ring_len": ints(2, 0)}
    pages = {"conv_state": torch.randn(5, 3, 6), "request_conv": torch.randn(3, 4, 6), "page_offset": ints(1, 0)}
    fold = state | rings | rows | pages | {"A": A, "count": ints(3, 0), "src": ints(1, 0), "dst": ints(2, 0)}
    copy = state | {"conv_state": pages["conv_state"], "conv_src": ints(1, 2), "conv_bias": ints(1, 0)}
    copy |= {"ssm_src": ints(3, 2), "dst": ints(2, 4)}
    for of_layers in (fold, copy):  # two of them
        of_layers |= {k: torch.stack([v, v]) for k, v in of_layers.items() if v.is_floating_point()}
    return state | rings | rows | tokens | params | loc, fold, copy


def delta_arguments():
    """The same rows for the delta rules: one key head of two value heads, decays of a head, or of each key channel."""

    def ints(*values):
        return torch.tensor(values)

    replay, fold, _ = ring_arguments()
    tokens = {"q": torch.randn(3, 1, 4), "k": torch.randn(3, 1, 4), "v": torch.randn(3, 2, 3), "b": torch.randn(3, 2)}
    tokens |= {
        "A": -torch.rand(2),
        "beta_scale": 2.0,
        "state": replay["ssm_state"],
        "query_start_loc": ints(0, 2, 3).int(),
    }
    by_head = {"a": torch.randn(3, 2), "dt_bias": torch.randn(2)}
    by_channel = {"a": torch.randn(3, 2, 4), "dt_bias": torch.randn(2, 4)}
    rings = {"ring_k": replay["ring_B"], "ring_u": replay["ring_x"], "ring_g": -torch.rand(3, 4, 2, 4)}
    chunks = {
        "chunk_start_loc": ints(0, 2, 3).int(),
        "chunk_row": ints(0, 1).int(),
        "row_chunk_loc": ints(0, 1, 2).int(),
    }
    chunks |= {"max_chunks_per_row": 1, "chunk_size": 2, "read": ints(1, 0), "chunk_write": ints(1, 2)}
    rows = {name: replay[name] for name in ("max_query_len", "slot", "ring_row", "ring_start", "ring_len")}
    pages = {
        name: fold[name] for name in ("conv_state", "request_conv", "ring_row", "ring_start", "count", "src", "dst")
    }
    layers = {name: torch.stack([v, v]) for name, v in rings.items()} | {"state": fold["ssm_state"]}
    return {
        "delta_scan_varlen": tokens | by_head | chunks,
        "delta_state_update": tokens
        | by_channel
        | {"max_query_len": 2, "read": ints(1, 0), "write": torch.tensor([[1, 3], [2, 4]])},
        "delta_replay_update": tokens | by_channel | rings | rows,
        "delta_fold_ring": layers | pages | {"page_offset": fold["page_offset"]},
    }


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_signature_of_its_schema(name):
    """All forms of an operator have the same arguments in the same order."""
    schema = [a.name for a in getattr(torch.ops.bateleur, name).default._schema.arguments]
    assert schema == list(inspect.signature(FORMS[name].torch).parameters)
    assert schema == list(inspect.signature(getattr(reference, name)).parameters)
    assert name in ops.__all__


@pytest.mark.parametrize(
    "name", ["replay_update", "fold_ring", "copy_states", "delta_replay_update", "delta_fold_ring"]
)
def test_meta_tensors_have_a_form(name):
    """Shapes alone: what tracing and memory planning run."""
    of_mamba = dict(zip(("replay_update", "fold_ring", "copy_states"), ring_arguments(), strict=True))
    args = (of_mamba | delta_arguments())[name]
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    y = getattr(ops, name)(**meta)
    if "replay" in name:
        like = args["x" if name == "replay_update" else "v"]
        assert (y.shape, y.dtype, y.device.type) == (like.shape, like.dtype, "meta")
    else:
        assert y is None
