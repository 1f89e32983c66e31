"""A test double of the flashinfer module. Its wrappers attend by their plans alone."""

from __future__ import annotations

import importlib.machinery
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class Double:
    """Reads the pages, the counts and the starts of its plan, and nothing else, over plain causal attention.

    For graphs it plans into the buffers it was given, and runs without a look at the host. Signatures are those of
    flashinfer 0.6 and 0.7.
    """

    decode = False
    made: list[Double]

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool = False, **options: Any) -> None:
        assert kv_layout == "NHD"
        assert not workspace.any()
        self.workspace, self.fixed = workspace, use_cuda_graph
        self.use_tensor_cores = bool(options.pop("use_tensor_cores", False))
        self.num_plans = 0
        self.most: int | None = None
        end = "buffer" if self.decode else "buf"
        self.buffers = {name.removesuffix(f"_{end}"): buffer for name, buffer in options.items()}
        names = {"paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"}
        names |= set() if self.decode else {"qo_indptr"}
        assert set(self.buffers) == (names if use_cuda_graph else set())
        self.made.append(self)

    def plan(self, *args: Any, **options: Any) -> None:
        self.num_plans += 1
        if self.decode:
            self.starts = torch.arange(len(args[0]))
        else:
            assert options.pop("causal")
            self.starts, *args = args
        indptr, self.indices, last, *self.sizes = args
        assert {each.device.type for each in (self.starts, indptr, last)} == {"cpu"}, "counts come from the host"
        assert {each.dtype for each in (indptr, self.indices, last)} == {torch.int32}
        assert len(indptr) == len(last) + 1 == len(self.starts)
        assert int(indptr[0]) == 0
        assert int(indptr[-1]) == len(self.indices)
        assert int(last.min()) >= 1
        assert int(last.max()) <= self.sizes[3]
        self.indptr, self.last = indptr.tolist(), last.tolist()
        self.scale, self.window = options.pop("sm_scale"), options.pop("window_left")
        self.dtypes = options.pop("q_data_type"), options.pop("kv_data_type")
        assert not options
        self.num_tokens = int(self.starts[-1])
        if self.fixed:
            self._plan_in_place(indptr, last)

    def _plan_in_place(self, indptr: Tensor, last: Tensor) -> None:
        self.most = self.num_tokens if self.most is None else self.most
        assert self.num_tokens <= self.most, "more tokens than the first plan had"
        given = {"paged_kv_indptr": indptr, "paged_kv_last_page_len": last}
        for name, tensor in (given if self.decode else given | {"qo_indptr": self.starts}).items():
            assert len(tensor) == len(self.buffers[name]), "the number of rows is that of the buffers"
            self.buffers[name].copy_(tensor)
        self.buffers["paged_kv_indices"].fill_(-1)[: len(self.indices)].copy_(self.indices)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        heads, kv_heads, dim, page = self.sizes
        assert q.shape == (self.num_tokens, heads, dim)
        assert kv[0].shape[1:] == (page, kv_heads, dim)
        assert (q.dtype, kv[0].dtype) == self.dtypes
        if self.fixed:
            return out.copy_(self._from_buffers(q, kv, out))
        spans = zip(pairwise(self.starts.tolist()), pairwise(self.indptr), self.last, strict=True)
        for (begin, end), (first, behind), last in spans:
            length = (behind - first - 1) * page + last
            k, v = (
                side[self.indices[first:behind].long()].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1)
                for side in kv
            )
            for token in range(begin, end):
                position = length - (end - token)
                low = 0 if self.window < 0 else max(0, position - self.window)
                weights = torch.einsum("hd,shd->hs", q[token], k[low : position + 1]) * self.scale
                out[token] = torch.einsum("hs,shd->hd", weights.softmax(-1), v[low : position + 1])
        return out

    def _from_buffers(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        """Repeat what a graph replay does: read the batch from the buffers only."""
        heads, kv_heads, _, page = self.sizes
        indptr, last = self.buffers["paged_kv_indptr"].long(), self.buffers["paged_kv_last_page_len"].long()
        starts = torch.arange(len(indptr)) if self.decode else self.buffers["qo_indptr"].long()
        token = torch.arange(len(q))
        row = torch.searchsorted(starts[1:], token, right=True).clamp(max=len(last) - 1)
        length = (indptr[row + 1] - indptr[row] - 1) * page + last[row]
        position = length - (starts[row + 1] - token)
        places = torch.arange(-(-self.buffers["paged_kv_indices"].shape[0] // len(last)) * page)
        at = (indptr[row, None] + places // page).clamp(max=self.buffers["paged_kv_indices"].shape[0] - 1)
        slot = self.buffers["paged_kv_indices"].long()[at].clamp(min=0) * page + places % page
        k, v = (side.flatten(0, 1)[slot].repeat_interleave(heads // kv_heads, 2) for side in kv)
        low = position - self.window if self.window >= 0 else torch.zeros_like(position)
        seen = (places <= position[:, None]) & (places >= low[:, None])
        scores = torch.einsum("thd,tshd->ths", q, k) * self.scale
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        found = torch.einsum("ths,tshd->thd", weights.to(v.dtype), v)
        return torch.where((token < starts[-1])[:, None, None], found, out)


def install(patch: pytest.MonkeyPatch) -> list[Double]:
    """Replace flashinfer by the double. Returns the list of wrappers created later."""
    wrappers: list[Double] = []
    module: Any = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (Double,), {"decode": True, "made": wrappers})
    module.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (Double,), {"made": wrappers})
    patch.setitem(sys.modules, "flashinfer", module)
    patch.setattr("bateleur.metadata.backends.flashinfer.WORKSPACE_BYTES", 64)
    return wrappers
