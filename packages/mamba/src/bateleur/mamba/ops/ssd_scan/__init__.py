"""The recurrence over prompts."""

from bateleur.mamba.ops.shared.library import operator
from bateleur.mamba.ops.ssd_scan import torch

ssd_scan_varlen = operator(torch.ssd_scan_varlen, mutates=("ssm_state",), like="x")
"""The Mamba-2 recurrence over prompts, each continuing the state in its `read` slot, by chunks.

For each token and head, with step = clamp(softplus(dt + dt_bias), dt_min, dt_max) and g = h // (H / G):
S <- exp(A step) S + step x B_g^T, y = S C_g + D x. The S after chunk k goes to
ssm_state[chunk_write[k]]: 0 for a chunk whose state is not kept; a row's last chunk leaves its final state.

x (T, H, P), dt (T, H) raw, A (H,) float32 and negative, B and C (T, G, N), D and dt_bias (H,), read (R,),
chunk_write (chunks,).
Chunks hold at most chunk_size tokens and never cross rows: chunk k is tokens chunk_start_loc[k] to
chunk_start_loc[k + 1] of row chunk_row[k], row r has chunks row_chunk_loc[r] to row_chunk_loc[r + 1] and at most
max_chunks_per_row; all int32 on the device, as `MambaMetadataBuilder` makes them. Returns y (T, H, P).
"""
