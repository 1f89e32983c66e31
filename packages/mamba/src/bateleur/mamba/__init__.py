"""State management and operators of recurrent layers (Mamba-2, delta rules, short convolutions) for inference."""

from bateleur.mamba.fold_cache import FoldCache, FoldStep
from bateleur.mamba.metadata import MambaMetadata
from bateleur.mamba.metadata_builder import MambaMetadataBuilder
from bateleur.mamba.mixer import Mixer, MixerBatch
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
from bateleur.mamba.prefill_chunks import PrefillChunks
from bateleur.mamba.prefix_retention import PrefixRetention
from bateleur.mamba.recurrence import FoldBatch, Recurrence, TensorSpec
from bateleur.mamba.recurrences import GatedDelta, KimiDelta, Mamba2, ShortConv
from bateleur.mamba.request_states import RequestStates, RowStates
from bateleur.mamba.spec import CacheLayout, MambaCacheMode, PromptScan, StatePolicy
from bateleur.mamba.state_manager import MambaStateManager, StateBlockPool
from bateleur.mamba.state_pool import Rings, StatePool

__all__ = [
    "CacheLayout", "CopyPlan", "FoldBatch", "FoldCache", "FoldPlan", "FoldStep", "GatedDelta", "KimiDelta", "Mamba2",
    "MambaCacheMode", "MambaMetadata", "MambaMetadataBuilder", "MambaStateManager", "Mixer", "MixerBatch",
    "PrefillChunks", "PrefixRetention", "PromptScan", "Recurrence", "ReplayPlan", "RequestStates", "Rings", "RowStates",
    "ShortConv", "SlotPlan", "StateBlockPool", "StatePolicy", "StatePool", "TensorSpec", "causal_conv1d_update",
    "causal_conv1d_varlen", "copy_states", "delta_fold_ring", "delta_replay_update", "delta_scan_varlen",
    "delta_state_update", "fold_ring", "fold_window", "gated_rms_norm", "plan_copy", "plan_fold", "plan_replay",
    "plan_step", "replay_update", "selective_state_update", "ssd_scan_varlen",
]  # fmt: skip
