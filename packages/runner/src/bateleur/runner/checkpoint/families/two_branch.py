"""What Bamba and GraniteMoeHybrid have in common: layers of a mixer and a gated MLP, and the `mamba_*` fields."""

from __future__ import annotations

from bateleur.mamba import MambaSpec
from bateleur.runner.checkpoint.fields import ConfigFields
from bateleur.runner.models.spec import AttentionLayer, Layer, MambaLayer, MlpLayer


def read_mamba(fields: ConfigFields) -> MambaLayer:
    """The Mamba layer of the `mamba_*` fields."""
    fields.choice("hidden_act", ("silu",))
    fields.divides("mamba_n_groups", "mamba_n_heads")
    state = MambaSpec(
        num_heads=fields.size("mamba_n_heads"),
        head_dim=fields.size("mamba_d_head"),
        state_size=fields.size("mamba_d_state"),
        num_groups=fields.size("mamba_n_groups"),
        conv_width=fields.size("mamba_d_conv"),
    )
    dt_min, dt_max = fields.time_step_limit()
    return MambaLayer(
        state=state,
        chunk_size=fields.size("mamba_chunk_size"),
        dt_min=dt_min,
        dt_max=dt_max,
        conv_bias=fields.flag("mamba_conv_bias"),
        proj_bias=fields.flag("mamba_proj_bias"),
        norm_eps=fields.number("rms_norm_eps"),
    )


def interleave(
    fields: ConfigFields,
    kinds: list[str],
    attention: AttentionLayer | None,
    mamba: MambaLayer | None,
    mlp: MlpLayer,
) -> tuple[Layer, ...]:
    """Two branches for each of `kinds`: the mixer it names, then `mlp`."""
    mixers = {"full_attention": attention, "linear_attention": mamba}
    layers: list[Layer] = []
    for i, kind in enumerate(kinds):
        mixer = mixers.get(kind)
        if mixer is None:
            raise ValueError(f"layer type {i} is {kind!r}; supported are {', '.join(mixers)}")
        layers += [mixer, mlp]
    return tuple(layers)
