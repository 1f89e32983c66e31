"""Operators that read and write recurrent states.

The device of the arguments selects the form: on CUDA the Triton kernels in `triton` (torch for float64), on a CPU the C
kernels in `native` if there is a compiler and the form accepts the arguments, otherwise torch.

Conventions:

- T tokens of R rows (requests) are flat, one row after the other. Row r has the tokens query_start_loc[r] to
  query_start_loc[r + 1] - 1. query_start_loc is (R + 1,) int32 on the device. Outputs of other tokens are unspecified.
- States are updated in place: conv_state (slots, W - 1 + K, C) for W taps, K drafts and C channels, oldest input first,
  and ssm_state (slots, heads, head channels, state entries).
- State slots are int64 on the device. Slot 0 is null: reading it gives a zero state, a write to it is dropped, and its
  contents are undefined. A row without tokens writes nothing.
- A row may write the slot that it reads. No row may write a slot that another row reads or writes, except slot 0.
- Operators compute in float32 (float64 for float64 inputs). Outputs have the dtype of x.
- x, dt, z, B and C may be strided views, such as parts of a projection.
- No operator synchronizes with the device or loops over requests on the host, except the torch forms for prefills, and
  those of the delta rules on a CPU.
"""

from bateleur.mamba.ops.conv import causal_conv1d_update, causal_conv1d_varlen
from bateleur.mamba.ops.custom_op import FORMS
from bateleur.mamba.ops.delta_rule import delta_fold_ring, delta_replay_update, delta_scan_varlen, delta_state_update
from bateleur.mamba.ops.gated_norm import gated_rms_norm
from bateleur.mamba.ops.mamba2 import fold_ring, replay_update, selective_state_update, ssd_scan_varlen
from bateleur.mamba.ops.states import copy_states, fold_window

__all__ = [
    "FORMS", "causal_conv1d_update", "causal_conv1d_varlen", "copy_states", "delta_fold_ring", "delta_replay_update",
    "delta_scan_varlen", "delta_state_update", "fold_ring", "fold_window", "gated_rms_norm", "replay_update",
    "selective_state_update", "ssd_scan_varlen",
]  # fmt: skip
