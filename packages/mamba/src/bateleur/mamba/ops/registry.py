"""Registration of the operators as `torch.ops.bateleur.*`; the device of the arguments picks the form."""

from __future__ import annotations

from torch import Tensor
from torch.library import Library, register_fake

from bateleur.mamba.ops.torch_conv import causal_conv1d_update, causal_conv1d_varlen
from bateleur.mamba.ops.torch_ssm import gated_rms_norm, selective_state_update, ssd_scan_varlen

SCHEMAS = (
    "causal_conv1d_varlen(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor query_start_loc, "
    "Tensor read, Tensor write, str activation) -> Tensor",
    "causal_conv1d_update(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor query_start_loc, "
    "int max_query_len, Tensor read, Tensor offset, Tensor write, str activation) -> Tensor",
    "ssd_scan_varlen(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, "
    "Tensor(a!) ssm_state, Tensor query_start_loc, Tensor chunk_start_loc, Tensor chunk_row, Tensor row_chunk_loc, "
    "int max_chunks_per_row, int chunk_size, Tensor read, Tensor write, float dt_min, float dt_max) -> Tensor",
    "selective_state_update(Tensor(a!) ssm_state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
    "Tensor dt_bias, Tensor query_start_loc, int max_query_len, Tensor read, Tensor write, float dt_min, "
    "float dt_max) -> Tensor",
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, int groups, float eps) -> Tensor",
)

_TORCH_FORMS = {
    form.__name__: form
    for form in (
        causal_conv1d_varlen,
        causal_conv1d_update,
        ssd_scan_varlen,
        selective_state_update,
        gated_rms_norm,
    )
}

library = Library("bateleur", "FRAGMENT")
"""Owns the definitions; dropping it would drop the operators."""


def _like_x(x: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty(x.shape)


def _like_second(ssm_state: Tensor, x: Tensor, *_: object, **__: object) -> Tensor:
    del ssm_state
    return x.new_empty(x.shape)


def _register() -> None:
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        for device in ("CPU", "CUDA"):
            library.impl(name, _TORCH_FORMS[name], device)
        fake = _like_second if name == "selective_state_update" else _like_x
        register_fake(f"bateleur::{name}", fake, lib=library)


_register()
