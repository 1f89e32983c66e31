"""Where every recurrent state lives, and the operators that move it."""

from bateleur.mamba.builder import MambaMetadataBuilder
from bateleur.mamba.fold_cache import FoldCache, FoldStep
from bateleur.mamba.mixer import Mixer, MixerRows
from bateleur.mamba.ops import (
    causal_conv1d_update,
    causal_conv1d_varlen,
    copy_states,
    delta_fold_ring,
    delta_replay_update,
    delta_scan_varlen,
    delta_state_update,
    fold_ring,
    fold_window,
    gated_rms_norm,
    replay_update,
    selective_state_update,
    ssd_scan_varlen,
)
from bateleur.mamba.planners import (
    CopyPlan,
    FoldPlan,
    ReplayPlan,
    SlotPlan,
    plan_copy,
    plan_fold,
    plan_replay,
    plan_step,
)
from bateleur.mamba.prompts import Prompts
from bateleur.mamba.recurrence import FoldRows, Recurrence, TensorSpec
from bateleur.mamba.recurrences import GatedDelta, KimiDelta, Mamba2, ShortConv
from bateleur.mamba.request_states import RequestStates, RowStates
from bateleur.mamba.retention import Retention
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, PromptScan, StatePolicy
from bateleur.mamba.state_pages import PagePool, StatePages
from bateleur.mamba.state_pool import Rings, StatePool
from bateleur.mamba.step_metadata import MambaMetadata

__all__ = [
    "CacheLayout",
    "CopyPlan",
    "FoldCache",
    "FoldPlan",
    "FoldRows",
    "FoldStep",
    "GatedDelta",
    "KimiDelta",
    "Mamba2",
    "MambaCacheMode",
    "MambaMetadata",
    "MambaMetadataBuilder",
    "Mixer",
    "MixerRows",
    "PagePool",
    "PromptScan",
    "Prompts",
    "Recurrence",
    "ReplayPlan",
    "RequestStates",
    "Retention",
    "Rings",
    "RowStates",
    "ShortConv",
    "SlotPlan",
    "StatePages",
    "StatePolicy",
    "StatePool",
    "TensorSpec",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "copy_states",
    "delta_fold_ring",
    "delta_replay_update",
    "delta_scan_varlen",
    "delta_state_update",
    "fold_ring",
    "fold_window",
    "gated_rms_norm",
    "plan_copy",
    "plan_fold",
    "plan_replay",
    "plan_step",
    "replay_update",
    "selective_state_update",
    "ssd_scan_varlen",
]
