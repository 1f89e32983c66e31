"""All draft passes of a proposal in one C call, on a CPU with a compiler: see `chain.c`. For EAGLE-3 heads with one
layer in float32 whose products can be called from C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import is_
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.eagle.cache import DraftCache
from bateleur.eagle.drafter import DraftContext
from bateleur.eagle.heads.eagle3 import Eagle3Head
from bateleur.eagle.heads.layers import RMSNorm
from bateleur.eagle.heads.spec import CallableInC, CProduct
from bateleur.eagle.noise import Lanes
from bateleur.eagle.rules import Rule
from bateleur.metadata.native import Kernel, kernels, unavailable_reason
from bateleur.metadata.native.structs import Struct, fields


class _Matrix(Struct):
    _fields_: ClassVar = fields("call weight bias", "rows columns")


class _Head(Struct):
    _fields_: ClassVar = [
        *((name, _Matrix) for name in ("fc", "qkv", "o", "up", "down", "output")),
        *fields(
            "tap_norms input_norm embedding token_norm hidden_norm q_norm k_norm mlp_norm norm cos sin target_ids "
            "words k_cache v_cache",
            "hidden taps tap_width heads kv_heads size lanes block_size positions norms_residual feeds_normed",
        ),
        ("eps", ctypes.c_double),
    ]


class _Step(Struct):
    _fields_: ClassVar = [
        *fields(
            "input_ids starts table positions next_token num_valid seeds start_positions taps temperature drafts "
            "places room",
            "rows k table_stride next_stride valid_stride drafts_stride longest width greedy threads",
        )
    ]


_MAX_TURNS = 64


@dataclass(slots=True, eq=False)
class _Pointed:
    """Pointers to the tensors of a step's requests, and to their drafts, for the C function."""

    rows: tuple[Tensor, ...]
    step: _Step
    address: int
    ends: tuple[Tensor, Tensor] | None = None


class NativeChain:
    """Computes all drafts of a step under COUPLED in one C call. They equal those of the torch passes up to rounding.

    Pointers that steps of the same requests share are set up once.
    """

    def __init__(self, head: Eagle3Head, cache: DraftCache, positions: int, longest: int, width: int) -> None:
        """positions: number of positions that the head has reserved. longest: most tokens of a sequence. width: K."""
        self._group, self._width = cache.group, width
        self._held: list[object] = [head, cache]
        self._struct = s = self._described(head, cache, positions)
        self._by_token = s.hidden + max(2 * s.hidden + s.qkv.rows, s.taps * s.tap_width)
        self._by_row = 2 * s.hidden + s.heads * s.size + s.up.rows + s.down.columns + s.output.rows
        self._tap_width = s.tap_width
        self._taps = (ctypes.c_int64 * (2 * s.taps))()
        self._turns: dict[tuple[int, int], _Pointed] = {}
        """Pointers by numbers of rows and tokens."""
        self._fixed = {"longest": longest, "width": width, "taps": ctypes.addressof(self._taps)}
        self._at = ctypes.addressof(self._struct)
        self._room, self._places = torch.empty(0), torch.empty(0, dtype=torch.int64)

    @staticmethod
    def fits(head: Eagle3Head, cache: DraftCache, rule: Rule) -> bool:
        """Return whether the C function supports the head, cache and rule."""
        if rule is not Rule.COUPLED or unavailable_reason() is not None or not head.vocabulary.whole:
            return False
        layer, spec = head.first.layer, head.spec
        if head.others or spec.sliding_window is not None or layer.input_norm is not None:
            return False
        tensors = (head.vocabulary.embedding, *cache.kv[0])
        if any(each.dtype != torch.float32 or not each.is_cpu or not each.is_contiguous() for each in tensors):
            return False
        return all(_in_c(each) is not None for each in _products(head).values())

    def propose(self, context: DraftContext) -> Tensor | None:
        """Return (R, K) int64 drafts of the step, -1 where there is none; or None if no drafts are requested or the
        C function does not support the tensors.
        """
        next_token = context.next_token
        if not 0 < context.num_drafts <= self._width or (at := self._pointed_to(context)) is None:
            return None
        step = at.step
        drafts = next_token.new_empty(step.rows, self._width)
        if not self._point_to_ends(at, next_token, drafts) or not self._point_to_tokens(step, context):
            return None
        step.k, step.greedy, step.threads = context.num_drafts, context.greedy, torch.get_num_threads()
        if _draft()(self._at, at.address):
            raise MemoryError(f"out of memory for the drafts of {step.rows} rows")
        return drafts

    def _pointed_to(self, context: DraftContext) -> _Pointed | None:
        """Return the pointers to the tensors of the step's requests, reused from the last step of the same size if
        possible; None for unsupported tensors.
        """
        batch = context.batch
        sizes = rows, tokens = batch.num_actual_reqs, batch.num_actual_tokens
        narrow = input_ids, starts, table = (batch.input_ids, batch.query_start_loc, batch.block_tables[self._group])
        shared = (*narrow, batch.positions, context.seeds, context.temperature)
        known = self._turns.get(sizes)
        if known is not None and all(map(is_, known.rows, shared)):
            return known
        if (
            any(each.dtype != torch.int32 or each.stride(-1) != 1 for each in narrow)
            or not _is_row(batch.positions[:tokens], torch.int64, tokens)
            or not _is_row(context.seeds, torch.int64, rows)
            or not _is_row(context.temperature, torch.float32, rows)
        ):
            return None
        self._make_room(rows, tokens)
        step = _Step(**self._fixed)
        step.point(
            input_ids=input_ids,
            starts=starts,
            table=table,
            table_stride=table.stride(0),
            positions=batch.positions,
            seeds=context.seeds,
            temperature=context.temperature,
            rows=rows,
            room=self._room,
            places=self._places,
        )
        if len(self._turns) == _MAX_TURNS:
            self._turns.clear()
        made = self._turns[sizes] = _Pointed(shared, step, ctypes.addressof(step))
        return made

    def _point_to_ends(self, at: _Pointed, next_token: Tensor, drafts: Tensor) -> bool:
        """Set the pointers to the tokens before the drafts, and to the drafts. Returns False if unsupported."""
        if at.ends is not None and next_token is at.ends[0] and drafts is at.ends[1]:
            return True
        rows = at.step.rows
        if next_token.shape != (rows,) or drafts.shape != (rows, self._width) or drafts.stride(1) != 1:
            return False
        if next_token.dtype != torch.int64 or drafts.dtype != torch.int64:
            return False
        at.step.point(
            next_token=next_token, next_stride=next_token.stride(0), drafts=drafts, drafts_stride=drafts.stride(0)
        )
        at.ends = next_token, drafts
        return True

    def _make_room(self, rows: int, tokens: int) -> None:
        room, places = tokens * self._by_token + rows * self._by_row, 6 * (tokens + rows)
        if room <= len(self._room) and places <= len(self._places):
            return
        self._turns.clear()  # these point to the old workspace
        self._room = torch.empty(max(room, len(self._room)))
        self._places = torch.empty(max(places, len(self._places)), dtype=torch.int64)

    def _point_to_tokens(self, step: _Step, context: DraftContext) -> bool:
        """Set the pointers that change in every step. Returns False for unsupported tensors."""
        shape = context.batch.num_tokens, self._tap_width
        num_valid, start_positions, rows = (context.num_valid, context.start_positions, context.batch.num_actual_reqs)
        if len(context.features) * 2 != len(self._taps):
            return False
        for index, tap in enumerate(context.features):
            if tap.shape != shape or tap.dtype != torch.float32:
                return False
            apart, dense = tap.stride()
            if dense != 1:
                return False
            self._taps[2 * index], self._taps[2 * index + 1] = tap.data_ptr(), apart
        if num_valid.shape != (rows,) or num_valid.dtype != torch.int64:
            return False
        if start_positions is not None and not _is_row(start_positions, torch.int64, rows):
            return False
        step.num_valid, step.valid_stride = num_valid.data_ptr(), num_valid.stride(0)
        step.start_positions = None if start_positions is None else start_positions.data_ptr()
        return True

    def _described(self, head: Eagle3Head, cache: DraftCache, positions: int) -> _Head:
        spec, layer, first = head.spec, head.first.layer, head.first
        cos, sin = head.turns or (None, None)
        assert cos is None or len(cos) >= positions
        lanes = Lanes.of(spec.vocab_size if head.target_ids is None else head.target_ids, torch.device("cpu"))
        norms = [norm.weight.data_ptr() for norm in head.tap_norms]
        tap_norms = (ctypes.c_int64 * len(norms))(*norms)
        self._held += [cos, sin, lanes, tap_norms]
        described = _Head(eps=spec.norm_eps, **{name: _matrix(product) for name, product in _products(head).items()})
        described.point(
            tap_norms=ctypes.addressof(tap_norms) if norms else None,
            input_norm=_weight(head.input_norm),
            embedding=head.vocabulary.embedding,
            token_norm=first.token_norm.weight,
            hidden_norm=first.hidden_norm.weight,
            q_norm=_weight(layer.attention.q_norm),
            k_norm=_weight(layer.attention.k_norm),
            mlp_norm=layer.mlp_norm.weight,
            norm=head.norm.weight,
            cos=cos,
            sin=sin,
            target_ids=head.target_ids,
            words=lanes.words,
            k_cache=cache.kv[0][0],
            v_cache=cache.kv[0][1],
            hidden=spec.hidden_size,
            taps=len(spec.needs.taps) or 1,
            tap_width=spec.target_hidden_size if spec.needs.taps else spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            size=spec.head_dim,
            lanes=0 if cos is None else cos.shape[-1],
            block_size=cache.blocks.block_size,
            positions=positions,
            norms_residual=spec.norm_before_residual,
            feeds_normed=spec.recycle == "post_norm",
        )
        return described


def _products(head: Eagle3Head) -> Mapping[str, Callable[[Tensor], Tensor]]:
    layer, fc = head.first.layer, {} if head.fc is None else {"fc": head.fc}
    return fc | {
        "qkv": layer.attention.qkv_proj,
        "o": layer.attention.o_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
        "output": head.vocabulary.output,
    }


def _matrix(product: Callable[[Tensor], Tensor]) -> _Matrix:
    found, matrix = _in_c(product), _Matrix()
    assert found is not None
    matrix.point(call=found.address, weight=found.weight, bias=found.bias, rows=found.rows, columns=found.columns)
    return matrix


def _in_c(product: Callable[[Tensor], Tensor]) -> CProduct | None:
    return product.in_c if isinstance(product, CallableInC) else None


def _is_row(tensor: Tensor, dtype: torch.dtype, rows: int) -> bool:
    """Return whether the tensor is contiguous (rows,) of this dtype."""
    return tensor.dtype == dtype and tensor.shape == (rows,) and tensor.is_contiguous()


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


@cache
def _draft() -> Kernel:
    return kernels(Path(__file__).parent / "chain.c", (("draft", "=pp"),))["draft"]
