"""The operators as naive loops over rows and tokens: the specification of every other form.

Each function has the signature of its operator and mutates the states in place. float64 inputs are computed in
float64. Nothing here is fast, nothing here is shared with the other forms.
"""

from bateleur.mamba.ops.conv_update.reference import causal_conv1d_update
from bateleur.mamba.ops.conv_varlen.reference import causal_conv1d_varlen
from bateleur.mamba.ops.copy.reference import copy_states
from bateleur.mamba.ops.fold.reference import fold_ring
from bateleur.mamba.ops.gated_norm.reference import gated_rms_norm
from bateleur.mamba.ops.replay.reference import replay_update
from bateleur.mamba.ops.ssd_scan.reference import ssd_scan_varlen
from bateleur.mamba.ops.state_update.reference import selective_state_update

__all__ = [
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "copy_states",
    "fold_ring",
    "gated_rms_norm",
    "replay_update",
    "selective_state_update",
    "ssd_scan_varlen",
]
