"""The recurrence for few tokens a row, with the state after each of them."""

from bateleur.mamba.ops.shared.library import operator
from bateleur.mamba.ops.state_update import torch

selective_state_update = operator(torch.selective_state_update, mutates=("ssm_state",), like="x")
"""The same recurrence for 1 to 1 + K tokens per row, keeping the state after each of them.

Arguments as for `ssd_scan_varlen`, and write (R, 1 + K): the state after token i of row r goes to
ssm_state[write[r, i]]. max_query_len bounds the tokens of a row. Returns y (T, H, P).

With max_query_len 1 and T = R, row r is token r: rows without a token must come last, with slots 0.
"""
