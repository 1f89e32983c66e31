"""The operators that move recurrent states, a folder each. The device of the arguments picks the form: torch's
operators, vectorised, or on CUDA the kernels in `triton`, which is imported with the first call and has no float64.
`reference` is the specification. Convolutions, gated norms and what Mamba-2 does are computed by `native` on a CPU, in
float32 and bfloat16, where there is a compiler.

What they have in common:

- T tokens of R rows lie one row after the other; row r owns tokens query_start_loc[r] to query_start_loc[r + 1], and
  query_start_loc is (R + 1,) int32 on the device. Outputs of tokens that belong to no row are unspecified.
- States are mutated in place: conv_state (slots, W - 1 + K, C) with the oldest input first, ssm_state (slots, H, P, N).
- Slots are int64 on the device. Reading slot 0 is reading a zero state, whatever it holds; writing slot 0 is dropping
  the write; what slot 0 holds afterwards is scratch. A row without tokens writes nothing. A row may
  write the slot it reads; no row may write a slot that another row reads or writes, except slot 0. (On CPU all reads
  come before all writes; on CUDA that would take a copy of every state.)
- Computation is in float32 (float64 for float64 inputs); outputs have the dtype of x.
- x, dt, z, B and C may be strided views, as a split of a projection makes them.
- None of them synchronises with the device, and none loops over requests.
"""

from bateleur.mamba.ops.conv_update import causal_conv1d_update
from bateleur.mamba.ops.conv_varlen import causal_conv1d_varlen
from bateleur.mamba.ops.copy import copy_states
from bateleur.mamba.ops.delta_fold import delta_fold_ring
from bateleur.mamba.ops.delta_replay import delta_replay_update
from bateleur.mamba.ops.delta_scan import delta_scan_varlen
from bateleur.mamba.ops.delta_update import delta_state_update
from bateleur.mamba.ops.fold import fold_ring
from bateleur.mamba.ops.fold_window import fold_window
from bateleur.mamba.ops.gated_norm import gated_rms_norm
from bateleur.mamba.ops.library import FORMS
from bateleur.mamba.ops.replay import replay_update
from bateleur.mamba.ops.ssd_scan import ssd_scan_varlen
from bateleur.mamba.ops.state_update import selective_state_update

__all__ = [
    "FORMS",
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
    "replay_update",
    "selective_state_update",
    "ssd_scan_varlen",
]
