"""Registration of the operators as `torch.ops.bateleur.*`; the device of the arguments picks the form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from bateleur.mamba import kernels
from bateleur.mamba.ops.torch_conv import causal_conv1d_update, causal_conv1d_varlen
from bateleur.mamba.ops.torch_pages import copy_states
from bateleur.mamba.ops.torch_ring import fold_ring, replay_update
from bateleur.mamba.ops.torch_ssm import gated_rms_norm, selective_state_update, ssd_scan_varlen

SCHEMAS = (
    "causal_conv1d_varlen(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor(b!)? live, "
    "Tensor query_start_loc, Tensor read, Tensor chunk_start_loc, Tensor chunk_row, Tensor chunk_write, "
    "Tensor? live_write, str activation) -> Tensor",
    "causal_conv1d_update(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor query_start_loc, "
    "int max_query_len, Tensor read, Tensor offset, Tensor write, str activation) -> Tensor",
    "ssd_scan_varlen(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, "
    "Tensor(a!) ssm_state, Tensor query_start_loc, Tensor chunk_start_loc, Tensor chunk_row, Tensor row_chunk_loc, "
    "int max_chunks_per_row, int chunk_size, Tensor read, Tensor chunk_write, float dt_min, float dt_max) -> Tensor",
    "selective_state_update(Tensor(a!) ssm_state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
    "Tensor dt_bias, Tensor query_start_loc, int max_query_len, Tensor read, Tensor write, float dt_min, "
    "float dt_max) -> Tensor",
    "replay_update(Tensor ssm_state, Tensor(a!) ring_x, Tensor(b!) ring_dt, Tensor(c!) ring_B, Tensor x, Tensor dt, "
    "Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, Tensor query_start_loc, int max_query_len, Tensor slot, "
    "Tensor ring_row, Tensor ring_start, Tensor ring_len, float dt_min, float dt_max) -> Tensor",
    "fold_ring(Tensor(a!) ssm_state, Tensor(b!) conv_state, Tensor live, Tensor ring_x, Tensor ring_dt, Tensor ring_B, "
    "Tensor A, Tensor ring_row, Tensor ring_start, Tensor count, Tensor src, Tensor dst, Tensor conv_offset) -> ()",
    "copy_states(Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor conv_src, Tensor conv_bias, Tensor ssm_src, "
    "Tensor dst) -> ()",
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, int groups, float eps) -> Tensor",
)

_TORCH_FORMS = {
    form.__name__: form
    for form in (
        causal_conv1d_varlen,
        causal_conv1d_update,
        ssd_scan_varlen,
        selective_state_update,
        replay_update,
        fold_ring,
        copy_states,
        gated_rms_norm,
    )
}

library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def _like(position: int) -> Callable[..., Tensor | None]:
    """The fake form of an operator whose result is new, with the shape and dtype of its argument at `position`."""
    return lambda *args: args[position].new_empty(args[position].shape)


def _on_cuda(name: str) -> Callable[..., Tensor | None]:
    """The Triton form, which is imported with the first call; float64 has none."""

    def form(*args: Any) -> Tensor | None:
        chosen = _TORCH_FORMS[name] if args[0].dtype == torch.float64 else kernels.form(name)
        result: Tensor | None = chosen(*args)
        return result

    return form


def _nothing(*_: object) -> None:
    """The fake form of an operator that only mutates."""


def _register() -> None:
    fakes = {"selective_state_update": _like(1), "replay_update": _like(4)}
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, _TORCH_FORMS[name], "CPU")
        library.impl(name, _on_cuda(name), "CUDA")
        fake = _nothing if schema.endswith("()") else fakes.get(name, _like(0))
        register_fake(f"bateleur::{name}", fake, lib=library)


_register()
