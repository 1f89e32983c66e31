"""Mamba-2: one mixer per layer, without attention, MLP or position limit."""

from __future__ import annotations

from functools import partial

from bateleur.runner.checkpoint.families.base import Family
from bateleur.runner.checkpoint.families.nemotron_h import CALLED, MAMBA_FIELDS
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.checkpoint.names import weight_names
from bateleur.runner.models.spec import MambaLayer, ModelSpec

_FIELDS = MAMBA_FIELDS | {
    "activation": "hidden_act",
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "state_size": "state_size",
}
_LENGTHS = 2048, (1 << 31) - 1
"""Default and maximum request length in tokens. The configuration has no limit; the default is vLLM's."""


def _read_spec(fields: ConfigFields) -> ModelSpec:
    mamba, expanded = fields.mamba(_FIELDS), fields["expand"] * fields["hidden_size"]
    if mamba.state.inner_size != expanded:
        raise ValueError(
            f"num_heads * head_dim is {mamba.state.inner_size}; it must equal expand * hidden_size = {expanded}"
        )
    return fields.model(
        FAMILY.architecture,
        (mamba,) * fields["num_hidden_layers"],
        "layer_norm_epsilon",
        _LENGTHS,
        residual_in_fp32=fields["residual_in_fp32"],
    )


FAMILY = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    _read_spec,
    partial(
        weight_names,
        mlp=CALLED,
        mixers={MambaLayer: CALLED},
        stem="backbone",
        embedding="embeddings",
        final_norm="norm_f",
    ),
    needs=("num_hidden_layers",),
)
