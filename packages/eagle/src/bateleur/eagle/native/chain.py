"""All draft passes of a proposal in one C call (`chain.c`), for EAGLE-3 heads with one layer in float32 on a CPU."""

import ctypes
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bateleur.eagle.buffers import DraftCache
from bateleur.eagle.drafter import DraftContext
from bateleur.eagle.heads.eagle import Eagle3Head
from bateleur.eagle.heads.layers import RMSNorm
from bateleur.eagle.heads.spec import CProduct, vocab_of
from bateleur.eagle.rules import Rule
from bateleur.metadata.native import Kernel, Struct, fields, kernels, unavailable_reason


class _Matrix(Struct):
    _fields_: ClassVar = fields("address weight bias", "rows columns")


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
    _fields_: ClassVar = fields(
        "input_ids starts table positions next_token num_valid seeds start_positions taps temperature drafts places "
        "room",
        "rows k table_stride longest width threads",
    )


class NativeChain:
    """Proposes all drafts for `Rule.COUPLED` in one C call, equal to those of the torch passes up to rounding."""

    def __init__(self, head: Eagle3Head, cache: DraftCache, positions: int, longest: int, width: int) -> None:
        """positions: number of positions that the head has reserved. longest: most tokens of a sequence. width: K."""
        self._group, self._width, self._longest = cache.group, width, longest
        self._held: list[object] = [head, cache]
        self._struct = s = self._described(head, cache, positions)
        self._by_token = s.hidden + max(2 * s.hidden + s.qkv.rows, s.taps * s.tap_width)
        self._by_row = 2 * s.hidden + s.heads * s.size + s.up.rows + s.down.columns + s.output.rows
        self._taps = (ctypes.c_int64 * (2 * s.taps))()

    @staticmethod
    def fits(head: Eagle3Head, cache: DraftCache, rule: Rule) -> bool:
        """Return whether the C function supports the head, cache and rule."""
        if rule is not Rule.COUPLED or unavailable_reason() is not None or head.shard is not None:
            return False
        if len(head.layers) > 1 or head.spec.sliding_window is not None:
            return False
        tensors = (head.vocabulary.embedding, *cache.kv[0])
        if head.vocabulary.embed is not None or any(
            each.dtype != torch.float32 or not each.is_cpu or not each.is_contiguous() for each in tensors
        ):
            return False
        return all(product is not None for product in _products(head).values())

    def propose(self, context: DraftContext) -> Tensor | None:
        """Return (R, K) int64 drafts, -1 for none; or None if `num_drafts` is 0 or C does not support the tensors."""
        batch, rows, tokens = context.batch, context.batch.num_actual_reqs, context.batch.num_actual_tokens
        if not 0 < context.num_drafts <= self._width or not self._takes(context):
            return None
        for index, tap in enumerate(context.features):
            self._taps[2 * index], self._taps[2 * index + 1] = tap.data_ptr(), tap.stride(0)
        table, start_positions = batch.block_tables[self._group], context.start_positions
        next_token, num_valid, seeds = (
            each.contiguous() for each in (context.next_token, context.num_valid, context.seeds)
        )
        if start_positions is not None:
            start_positions = start_positions.contiguous()
        drafts, temperature = next_token.new_empty(rows, self._width), context.temperature.contiguous()
        room = torch.empty(tokens * self._by_token + rows * self._by_row)
        places = torch.zeros(6 * (tokens + rows), dtype=torch.int64)
        step = _Step()
        step.point(
            input_ids=batch.input_ids, starts=batch.query_start_loc, table=table, positions=batch.positions,
            next_token=next_token, num_valid=num_valid, seeds=seeds, start_positions=start_positions,
            taps=ctypes.addressof(self._taps), temperature=temperature, drafts=drafts, places=places, room=room,
            rows=rows, k=context.num_drafts, table_stride=table.stride(0), longest=self._longest, width=self._width,
            threads=torch.get_num_threads(),
        )  # fmt: skip
        if _draft()(ctypes.addressof(self._struct), ctypes.addressof(step)):
            raise MemoryError(f"out of memory for the drafts of {rows} rows")
        return drafts

    def _takes(self, context: DraftContext) -> bool:
        batch, rows = context.batch, (context.batch.num_actual_reqs,)
        narrow = batch.input_ids, batch.query_start_loc, batch.block_tables[self._group]
        wide = [context.next_token, context.num_valid, context.seeds, context.start_positions]
        shape = batch.num_tokens, self._struct.tap_width
        return (
            all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in narrow)
            and all(x is None or (x.dtype == torch.int64 and x.shape == rows) for x in wide)
            and (context.temperature.dtype, context.temperature.shape) == (torch.float32, rows)
            and (batch.positions.dtype, batch.positions.stride(0)) == (torch.int64, 1)
            and len(context.features) * 2 == len(self._taps)
            and all(x.shape == shape and x.dtype == torch.float32 and x.stride(1) == 1 for x in context.features)
        )

    def _described(self, head: Eagle3Head, cache: DraftCache, positions: int) -> _Head:
        spec, layer = head.spec, head.layers[0]
        table = None if head.rotary is None else head.rotary.table
        cos, sin = table or (None, None)
        assert spec.rope is None or (cos is not None and len(cos) >= positions)
        hashes = vocab_of(head, torch.device("cpu")).hashes
        norms = [norm.weight.data_ptr() for norm in head.tap_norms]
        tap_norms = (ctypes.c_int64 * len(norms))(*norms)
        self._held += [cos, sin, hashes, tap_norms]
        described = _Head(eps=spec.norm_eps, **{name: _matrix(product) for name, product in _products(head).items()})
        described.point(
            tap_norms=ctypes.addressof(tap_norms) if norms else None, input_norm=_weight(head.input_norm),
            embedding=head.vocabulary.embedding, token_norm=head.token_norm.weight, hidden_norm=head.hidden_norm.weight,
            q_norm=_weight(layer.attention.q_norm), k_norm=_weight(layer.attention.k_norm),
            mlp_norm=layer.mlp_norm.weight, norm=head.norm.weight, cos=cos, sin=sin, target_ids=head.target_ids,
            words=hashes, k_cache=cache.kv[0][0], v_cache=cache.kv[0][1], hidden=spec.hidden_size,
            taps=len(spec.needs.taps) or 1,
            tap_width=spec.target_hidden_size if spec.needs.taps else spec.hidden_size,
            heads=spec.num_heads, kv_heads=spec.num_kv_heads, size=spec.head_dim,
            lanes=0 if cos is None else cos.shape[-1], block_size=cache.blocks.block_size, positions=positions,
            norms_residual=spec.norm_before_residual, feeds_normed=spec.recycle == "post_norm",
        )  # fmt: skip
        return described


def _products(head: Eagle3Head) -> dict[str, CProduct | None]:
    layer, fc = head.layers[0], {} if head.fc is None else {"fc": head.fc}
    products = fc | {
        "qkv": layer.attention.qkv_proj,
        "o": layer.attention.o_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
        "output": head.vocabulary.output,
    }
    return {name: getattr(product, "in_c", None) for name, product in products.items()}


def _matrix(product: CProduct | None) -> _Matrix:
    matrix = _Matrix()
    assert product is not None
    matrix.point(**{name: getattr(product, name) for name, _ in _Matrix._fields_})
    return matrix


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


@cache
def _draft() -> Kernel:
    return kernels(Path(__file__).parent / "chain.c", (("draft", "=pp"),))["draft"]
