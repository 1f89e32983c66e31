"""The recurrence for few tokens a row, over a state that stands still and a ring of the inputs since."""

from bateleur.mamba.ops.replay import torch
from bateleur.mamba.ops.shared.library import operator

replay_update = operator(torch.replay_update, mutates=("ring_x", "ring_dt", "ring_B"), like="x")
"""The same recurrence for few tokens per row, over a state that stays as it is and a ring of the inputs since.

The state before a row's tokens is ssm_state[slot] advanced by ring_len entries of row `ring_row` of the rings:
entry j lies at (ring_start + j) % L. The tokens are appended at ring_len and behind; the caller counts those that
are accepted, and the next step overwrites the others, so that a rejected token never reaches a state.

ring_x (ring rows, L, H, P) and ring_B (ring rows, L, G, N) of x's dtype or a wider one, ring_dt (ring rows, L, H)
float32, the processed step (float64 for float64 inputs); contiguous. Row 0 of the rings is null, like slot 0: a row
with ring_row 0 keeps nothing, and its output is unspecified. slot, ring_row, ring_start and ring_len (R,) int64;
ring_len plus the row's tokens is at most L; no two rows share a ring row, except row 0. The other arguments as for
`selective_state_update`. Returns y (T, H, P).

With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slot and ring row 0.
"""
