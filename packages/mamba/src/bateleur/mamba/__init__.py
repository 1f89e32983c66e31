"""Where every Mamba state lives, and the operators that move it."""

from bateleur.mamba.builder import MambaMetadata, MambaMetadataBuilder
from bateleur.mamba.ops import (
    causal_conv1d_update,
    causal_conv1d_varlen,
    gated_rms_norm,
    selective_state_update,
    ssd_scan_varlen,
)
from bateleur.mamba.plan import SlotPlan, plan_step
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, MambaSpec
from bateleur.mamba.state_pool import StatePool

__all__ = [
    "CacheLayout",
    "MambaCacheMode",
    "MambaMetadata",
    "MambaMetadataBuilder",
    "MambaSpec",
    "SlotPlan",
    "StatePool",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "gated_rms_norm",
    "plan_step",
    "selective_state_update",
    "ssd_scan_varlen",
]
