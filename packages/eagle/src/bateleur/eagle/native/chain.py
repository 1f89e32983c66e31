"""All passes of a proposal in one call, on a CPU with a compiler: see `chain.c`. For EAGLE-3 heads of one layer in
float32, whose products can be called from C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
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
from bateleur.metadata.native import Kernel, kernels, missing
from bateleur.metadata.native.structs import Struct, fields


class _Matrix(Struct):
    _fields_: ClassVar = fields("call weight bias", "rows columns")


class _Head(Struct):
    _fields_: ClassVar = [
        *((name, _Matrix) for name in ("qkv", "o", "up", "down", "output")),
        *fields(
            "embedding token_norm hidden_norm q_norm k_norm mlp_norm norm cos sin target_ids words k_cache v_cache",
            "hidden heads kv_heads size lanes block_size positions norms_residual feeds_normed",
        ),
        ("eps", ctypes.c_double),
    ]


class _Step(Struct):
    _fields_: ClassVar = fields(
        "input_ids starts table positions next_token num_valid seeds begins hidden temperature drafts places room",
        "rows k table_stride longest width greedy threads",
    )


class NativeChain:
    """Drafts under COUPLED, all of a step at once: those of the passes, but for what rounds otherwise."""

    def __init__(self, head: Eagle3Head, cache: DraftCache, positions: int, longest: int) -> None:
        """`positions`: those that the head has, and has reserved. `longest`: tokens of a sequence at most."""
        self._head, self._group, self._longest = head, cache.group, longest
        self._held: list[object] = [head, cache]
        self._struct = self._described(head, cache, positions)
        s = self._struct
        self._by_token = 3 * s.hidden + s.qkv.rows
        self._by_row = 2 * s.hidden + s.heads * s.size + s.up.rows + s.down.columns + s.output.rows
        self._room = torch.empty(0)
        self._places = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def fits(head: Eagle3Head, cache: DraftCache, rule: Rule) -> bool:
        """Whether such a head's drafts can be made here."""
        if rule is not Rule.COUPLED or missing() is not None or not head.vocabulary.whole:
            return False
        layer, spec = head.first.layer, head.spec
        if head.others or spec.sliding_window is not None or layer.input_norm is not None:
            return False
        tensors = (head.vocabulary.embedding, *cache.kv[0])
        if any(
            each.dtype != torch.float32 or not each.is_cpu or not each.is_contiguous() for each in tensors
        ):
            return False
        return all(_in_c(each) is not None for each in _products(head).values())

    def takes(self, context: DraftContext) -> bool:
        """Whether the step's tensors are of the kinds that are read here."""
        batch, rows = context.batch, context.batch.num_actual_reqs
        by_row = [context.next_token, context.num_valid, context.seeds]
        if context.begins is not None:
            by_row.append(context.begins)
        narrow = (batch.input_ids, batch.query_start_loc, batch.block_tables[self._group])
        return (
            all(each.dtype == torch.int64 and each.shape == (rows,) for each in by_row)
            and all(each.dtype == torch.int32 and each.stride(-1) == 1 for each in narrow)
            and all(each.is_contiguous() for each in (*by_row, context.temperature))
            and context.temperature.dtype == torch.float32
            and batch.positions.dtype == torch.int64
        )

    def propose(self, context: DraftContext, hidden: Tensor, width: int) -> Tensor:
        """(R, width) int64 drafts of the step, -1 where there is none. hidden: (T, H) what the head fuses."""
        batch = context.batch
        rows, tokens, table = batch.num_actual_reqs, batch.num_actual_tokens, batch.block_tables[self._group]
        drafts = torch.empty(rows, width, dtype=torch.int64)
        room, places = tokens * self._by_token + rows * self._by_row, 5 * (tokens + rows)
        if room > len(self._room):
            self._room = torch.empty(room)
        if places > len(self._places):
            self._places = torch.empty(places, dtype=torch.int64)
        hidden, step = hidden.contiguous(), _Step()
        step.point(
            input_ids=batch.input_ids,
            starts=batch.query_start_loc,
            table=table,
            positions=batch.positions,
            next_token=context.next_token,
            num_valid=context.num_valid,
            seeds=context.seeds,
            begins=context.begins,
            hidden=hidden,
            temperature=context.temperature,
            drafts=drafts,
            places=self._places,
            room=self._room,
            rows=rows,
            k=context.num_drafts,
            table_stride=table.stride(0),
            longest=self._longest,
            width=width,
            greedy=context.greedy,
            threads=torch.get_num_threads(),
        )
        if _draft()(ctypes.addressof(self._struct), ctypes.addressof(step)):
            raise MemoryError(f"there is no memory for the drafts of {rows} rows")
        return drafts

    def _described(self, head: Eagle3Head, cache: DraftCache, positions: int) -> _Head:
        spec, layer, first = head.spec, head.first.layer, head.first
        cos, sin = head.turns or (None, None)
        assert cos is None or len(cos) >= positions
        lanes = Lanes.of(spec.vocab_size if head.target_ids is None else head.target_ids, torch.device("cpu"))
        self._held += [cos, sin, lanes]
        described = _Head(
            eps=spec.norm_eps, **{name: _matrix(product) for name, product in _products(head).items()}
        )
        described.point(
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
    layer = head.first.layer
    return {
        "qkv": layer.attention.qkv_proj,
        "o": layer.attention.o_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
        "output": head.vocabulary.output,
    }


def _matrix(product: Callable[[Tensor], Tensor]) -> _Matrix:
    found, matrix = _in_c(product), _Matrix()
    assert found is not None
    matrix.point(
        call=found.address, weight=found.weight, bias=found.bias, rows=found.rows, columns=found.columns
    )
    return matrix


def _in_c(product: Callable[[Tensor], Tensor]) -> CProduct | None:
    return product.in_c if isinstance(product, CallableInC) else None


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


@cache
def _draft() -> Kernel:
    return kernels(Path(__file__).parent / "chain.c", (("draft", "=pp"),))["draft"]
