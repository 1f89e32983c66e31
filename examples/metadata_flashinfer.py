"""One staged batch for two attention libraries: `pip install bateleur-metadata`, and `flashinfer-python` on a GPU.

A decode, a prefill and the rest of a prefill share a step. The torch backend uses the attention metadata built for it.
FlashInfer, if installed, uses plan arguments read from the same metadata. Both must agree with dense attention over
each request. (`get_backend("flashinfer", ...)` plans and runs FlashInfer itself, without waiting for the device.)

    python examples/metadata_flashinfer.py
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bateleur.metadata import BatchLimits, BatchShape, InputBuffers, KVCacheGroup, StepRows, get_backend

DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 64
TABLE = np.array([[5, 9], [1, 8], [3, 0]], np.int32)  # pages of each request; page 0 is reserved


def random(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values."""
    q, k, v = torch.randn(3, tokens, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    return q, k[:, :KV_HEADS], v[:, :KV_HEADS]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one request; the queries are its last tokens."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=DEVICE).tril(len(k) - len(q))
    inputs = (each.transpose(0, 1)[None] for each in (q, k, v))
    return scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def flashinfer_attention(q: Tensor, kv: tuple[Tensor, Tensor], plan: dict[str, Tensor]) -> Tensor:
    """Plan and run FlashInfer's wrapper."""
    flashinfer: Any = import_module("flashinfer")
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    dtypes = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
    wrapper.plan(*plan.values(), HEADS, KV_HEADS, DIM, PAGE, causal=True, **dtypes)
    result: Tensor = wrapper.run(q, kv)
    return result


def main() -> None:
    """Two steps: two prefills, then a decode, a prefill and the rest of a prefill together."""
    torch.manual_seed(0)
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=2 * PAGE)
    buffers = InputBuffers(limits, [KVCacheGroup(PAGE, max_blocks=2)], DEVICE)
    backend = get_backend("torch", device=DEVICE, dtype=DTYPE, head_dim=DIM)
    builder = backend.builder()
    kv = torch.zeros(2, 10, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE).unbind()
    keys, values = ([torch.empty(0, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)] * 3 for _ in range(2))
    done = np.zeros(3, np.int32)
    for lens, prefilling in (([20, 17], [True, True]), ([1, 9, 6], [False, True, True])):
        rows, tokens = len(lens), sum(lens)
        step = StepRows(
            query_lens=np.array(lens, np.int32),
            num_computed_tokens=done[:rows].copy(),
            is_prefilling=np.array(prefilling),
            token_ids=np.zeros(tokens, np.int32),
            block_tables=(TABLE[:rows],),
        )
        padded = BatchShape(rows, tokens, padded_reqs=4, padded_tokens=tokens + 2, max_query_len=max(lens))
        batch = buffers.stage(step, padded)
        meta = builder.build(batch, group=0)
        q, k, v = random(batch.num_tokens)
        out = backend.attend(q, k, v, kv, meta, scale=DIM**-0.5)

        parts = [each[:tokens].split(lens) for each in (q, k, v)]
        for r in range(rows):
            keys[r], values[r] = torch.cat((keys[r], parts[1][r])), torch.cat((values[r], parts[2][r]))
        expected = torch.cat([dense(parts[0][r], keys[r], values[r]) for r in range(rows)])
        torch.testing.assert_close(out[:tokens], expected, rtol=1e-2, atol=1e-2)
        done[:rows] += step.query_lens
    print(f"torch backend, {lens} tokens over {done - lens} in the cache: equal to dense attention")

    # FlashInfer plans from counts on the host, and from one list with the pages of all rows.
    key_lens = torch.from_numpy(batch.seq_len_bound.per_row(slice(0, rows)))
    pages = -(-key_lens // PAGE)
    table = meta.block_table[:rows]
    plan = {
        "qo_indptr": batch.query_start_loc_cpu[: rows + 1],
        "paged_kv_indptr": torch.cat((pages.new_zeros(1), pages.cumsum(0))).int(),
        "paged_kv_indices": table[torch.arange(table.shape[1]).lt(pages[:, None]).to(DEVICE)],
        "paged_kv_last_page_len": (key_lens - (pages - 1) * PAGE).int(),
    }
    for name, value in plan.items():
        print(f"{name:24}{value.tolist()}")
    listed = kv[0][plan["paged_kv_indices"]].split(pages.tolist())
    for r in range(rows):
        length = int((pages[r] - 1) * PAGE + plan["paged_kv_last_page_len"][r])
        assert torch.equal(listed[r].flatten(0, 1)[:length], keys[r])
    print("the pages of each row, the last one in part: equal to the keys of its request")

    if DEVICE == "cuda" and find_spec("flashinfer"):
        torch.testing.assert_close(flashinfer_attention(q[:tokens], kv, plan), expected, rtol=1e-2, atol=1e-2)
        print("FlashInfer, planned with these: equal to dense attention")
    else:
        print("FlashInfer was not run: that takes a GPU and `pip install flashinfer-python`")


if __name__ == "__main__":
    main()
