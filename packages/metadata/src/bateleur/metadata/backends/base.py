"""Base classes of paged-attention backends: metadata, metadata builder, and the attention call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bateleur.metadata.attention_metadata_builder import AttentionMetadataBuilder, BuildPhase, GraphSupport
from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata
from bateleur.metadata.signature import Role, Signature

KVCache: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of a layer, each (num_blocks, block_size, Hkv, D)."""
KV_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that caches may have, whatever the dtype of queries is."""


@dataclass(frozen=True, slots=True)
class PagedAttentionMetadata:
    """Metadata of one KV-cache group, for a batch with R rows (requests) and T tokens.

    Attributes:
        query_start_loc, seq_lens, block_table: (R + 1,), (R,) and (R, max_blocks) int32.
        slot_mapping: (T,) int64, -1 for tokens that are not stored.
        num_decodes: number of leading rows with one token each, so that row ``r`` has token ``r``; padded rows without
            a token may be included.
        max_query_len, max_seq_len: host bounds over all rows.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int


class AttentionOptions(NamedTuple):
    """Options of one attention call, see :meth:`AttentionBackend.attend`."""

    scale: float
    sliding_window: int | None = None
    work: Tensor | None = None
    sinks: Tensor | None = None
    kv_scales: Tensor | None = None


class LayerConfig(NamedTuple):
    """Configuration of layers. ``dtype``: dtype of the queries. ``kv_dtype``: dtype of the caches; None: ``dtype``."""

    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None
    kv_dtype: torch.dtype | None = None
    sinks: bool = False


class PagedAttentionBuilder:
    """Builds :class:`PagedAttentionMetadata`: views of the batch, and the number of decodes."""

    reads = frozenset({"query_start_loc", "query_start_loc_cpu", "seq_lens", "block_tables", "slot_mappings"})
    seq_len_fill = 0

    def __init__(self, graph_support: GraphSupport = GraphSupport.ALWAYS) -> None:
        self.graph_support = graph_support

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> PagedAttentionMetadata:
        """Return metadata for KV-cache group ``group``. Raises ValueError if the batch has no such group."""
        if not 0 <= group < len(common.block_tables):
            raise ValueError(f"group: {group} is not one of the batch's {len(common.block_tables)} groups")
        return PagedAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_tables[group],
            slot_mapping=common.slot_mappings[group],
            num_decodes=_leading_single_token_rows(common, phase),
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )

    def signature(self, meta: PagedAttentionMetadata) -> Signature:
        """Return ``num_decodes`` (role FLOOR: a replay has at least the captured value), ``max_query_len`` and
        ``max_seq_len`` (role BOUND: a replay has at most the captured value).
        """
        return Signature(
            (
                ("num_decodes", Role.FLOOR, meta.num_decodes),
                ("max_query_len", Role.BOUND, meta.max_query_len),
                ("max_seq_len", Role.BOUND, meta.max_seq_len),
            )
        )

    def addresses(self) -> Mapping[str, int]:
        """Return an empty mapping: all tensors belong to the batch."""
        return {}


def _leading_single_token_rows(common: CommonAttentionMetadata, phase: BuildPhase) -> int:
    if phase is not BuildPhase.RUN and common.max_query_len > 1:
        return 0  # a batch that replays the graph may have several tokens in any row
    if common.max_query_len == 1:  # padded rows too, so that all batches of a captured size agree
        return min(common.num_reqs, common.num_tokens)
    if 0 < common.num_actual_tokens == common.num_actual_reqs * common.max_query_len:
        return 0  # all rows have the same number, above 1
    several = common.query_start_loc_cpu.diff().numpy() != 1
    return int(several.argmax()) if several.any() else common.num_reqs


class AttentionBackend:
    """Base class of attention backends: a metadata builder and kernels over a paged KV cache.

    Block 0 of a cache is the null block. No request owns it, and its slot 0 stays zero. Other unused entries of the
    cache may hold any value; they may be NaN unless ``needs_finite_cache``. A subclass sets ``name``, ``write``, and
    ``kernel`` unless it overrides ``attend_cache``.

    Attributes:
        name: name for :func:`get_backend`.
        graph_support: batches that its kernels may be captured for.
        fuses_rotary: whether ``attend`` accepts ``rotary``. If not, the caller rotates queries and keys.
        fuses_norm: whether ``attend`` accepts ``norm`` together with ``rotary``.
        supports_sinks: whether ``attend`` accepts ``sinks``.
        needs_finite_cache: whether masked keys and values must be finite, because the kernel multiplies them by a
            weight of 0. The engine then zeroes a block before a request gets it, because its last owner may have left
            NaN.
        tolerates_loose_bounds: whether ``max_seq_len`` and ``max_query_len`` may be far above the true lengths. Kernels
            captured with such bounds accept any batch of the captured number of rows and tokens, and are as fast.
            Graphs of mixed batches may then contain the attention. Otherwise it runs eagerly between graph pieces.
        dtypes: supported dtypes of queries, keys and values. A cache may always have the dtype of the queries.
        kv_dtypes: other supported dtypes of caches. Keys and values are rounded when they are stored. Queries attend to
            the rounded ones, also to those of their own step.
        min_capability: lowest supported CUDA compute capability; None if no CUDA device is needed.
        device: device of the buffers of its builders; set by :func:`get_backend`.
        write: function that stores keys and values, called as :data:`bateleur.metadata.ops.write_kv`:
            ``write(k, v, k_cache, v_cache, slot_mapping)``. If ``fuses_rotary``, called as ``rotate_and_write_kv``:
            ``write(q, k, v, k_cache, v_cache, slot_mapping, cos, sin)``, with norm weights and epsilon only if
            ``fuses_norm``. The keyword ``kv_scales`` is added for caches with scales.
        kernel: function that returns attention over the cache, called as
            :data:`bateleur.metadata.ops.paged_attention`.
    """

    name: ClassVar[str]
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    fuses_rotary: ClassVar[bool] = False
    fuses_norm: ClassVar[bool] = False
    supports_sinks: ClassVar[bool] = True
    needs_finite_cache: ClassVar[bool] = False
    tolerates_loose_bounds: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    kv_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    min_capability: ClassVar[tuple[int, int] | None] = None
    device = torch.device("cpu")
    write: ClassVar[Callable[..., Any]]
    kernel: ClassVar[Callable[..., Any]]

    def builder(self) -> AttentionMetadataBuilder[PagedAttentionMetadata]:
        """Return a new metadata builder, for one or more KV-cache groups."""
        return PagedAttentionBuilder(self.graph_support)

    def unsupported_reason(self, config: LayerConfig) -> str | None:
        """Return why the backend cannot serve a configuration, or None if it can.

        Checks ``config`` against the class attributes, and calls ``missing_requirement``, which subclasses override.
        """
        head_dim, dtype, device, sliding_window, kv_dtype, sinks = config
        if sinks and not self.supports_sinks:
            return "attention sinks are not supported"
        if head_dim < 1:
            return f"head_dim {head_dim} is not positive"
        if dtype not in self.dtypes:
            return f"dtype {dtype} is not one of {', '.join(map(str, self.dtypes))}"
        if kv_dtype not in (None, dtype, *self.kv_dtypes):
            return f"it has no KV cache in {kv_dtype} for queries in {dtype}"
        if sliding_window is not None and sliding_window < 1:
            return f"sliding_window {sliding_window} is not positive"
        reason = self.missing_requirement(config)
        if reason is None and self.min_capability is not None:
            reason = device_refusal(device, self.min_capability)
        return reason

    def missing_requirement(self, config: LayerConfig) -> str | None:
        """Return why ``config`` does not meet a requirement that no class attribute expresses, such as an installed
        package; None if it meets all. Subclasses override it; call ``unsupported_reason`` instead.
        """
        return None

    def build_work_list(
        self, meta: PagedAttentionMetadata, kv: KVCache, num_heads: int, sliding_window: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Return the work list (query tiles with KV splits) for all layers with equal heads and windows. None if the
        kernels use no list, which is the default.

        If ``tolerates_loose_bounds``, a model calls it once per forward pass, before its layers, and passes the result
        to every ``attend``. A CUDA graph records the call. Without a list, ``attend`` computes one if the backend needs
        it. kv: caches of one of the layers. num_heads: query heads. dtype: dtype of the queries; None: the dtype of the
        caches.
        """
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVCache, meta: PagedAttentionMetadata, scale: float,
        sliding_window: int | None = None, rotary: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, Tensor, float] | None = None, work: Tensor | None = None, sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store this step's keys and values, then attend over the cache.

        Args:
            q: (T, Hq, D) queries, Hq a multiple of Hkv.
            k, v: (T, Hkv, D) keys and values of the same tokens.
            kv: caches of the layer, written in place.
            meta: metadata of this batch and the layer's KV-cache group.
            sliding_window: query ``i`` sees key ``j`` if ``i - sliding_window < j <= i``; None: all ``j <= i``.
            rotary: cosine and signed sine (T, 1, R), R even and at most D. Dimension i of the leading
                R is paired with i + R/2: ``x * cos + roll(x, R/2) * sin``. Pass unrotated ``q`` and ``k`` then; they
                may be overwritten. Only if ``fuses_rotary``.
            norm: weights of queries and keys, and epsilon, of an RMS norm before the rotation. Weights (D,) mean a norm
                over each head, (Hq * D,) and (Hkv * D,) one over all heads. Only if ``fuses_norm``.
            work: result of ``build_work_list`` in this forward pass for layers with these heads and this window.
            sinks: (Hq,) float32 scores of a key that has no value and that every query sees. Only if
                ``supports_sinks``.
            kv_scales: (2, Hkv) float32, scales of keys and of values. The caches hold ``x / scale``. None: 1.

        Returns (T, Hq, D) in the dtype of ``q``; 0 for padded tokens. Raises ValueError for unsupported arguments.
        """
        if rotary is not None and not self.fuses_rotary:
            raise ValueError(f"rotary: the backend {self.name!r} does not fuse it; rotate q and k before the call")
        if norm is not None and not self.fuses_norm:
            raise ValueError(f"norm: the backend {self.name!r} does not fuse it; normalise q and k before the call")
        if sinks is not None and not self.supports_sinks:
            raise ValueError(f"sinks: the backend {self.name!r} has none; use native, torch or triton")
        if kv[0].dtype != q.dtype and kv[0].dtype not in self.kv_dtypes:
            raise ValueError(f"kv: the backend {self.name!r} has none in {kv[0].dtype} for q in {q.dtype}")
        self.check(kv, meta)
        scales = {} if kv_scales is None else {"kv_scales": kv_scales}
        if self.fuses_rotary:
            self.write(q, k, v, *kv, meta.slot_mapping, *(rotary or (None, None)), *(norm or ()), **scales)
        else:
            self.write(k, v, *kv, meta.slot_mapping, **scales)
        return self.attend_cache(q, kv, meta, AttentionOptions(scale, sliding_window, work, sinks, kv_scales))

    def check(self, kv: KVCache, meta: PagedAttentionMetadata) -> None:
        """Raise ValueError for an unsupported cache or metadata. ``attend`` calls this before it stores anything."""

    def attend_cache(self, q: Tensor, kv: KVCache, meta: PagedAttentionMetadata, options: AttentionOptions) -> Tensor:
        """Return attention (T, Hq, D) over the cache for queries (T, Hq, D); 0 for padded tokens."""
        scale, window, *rest = options
        bounds = meta.num_decodes, meta.max_query_len, meta.max_seq_len
        rows = meta.block_table, meta.seq_lens, meta.query_start_loc, *bounds
        out: Tensor = self.kernel(q, *kv, *rows, scale, window or 0, *rest)
        return out


def device_refusal(device: torch.device, min_capability: tuple[int, int]) -> str | None:
    """Return why a device is not a CUDA device of at least compute capability ``min_capability``, or None if it is."""
    if device.type != "cuda":
        return f"device {device} is not CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(device) if any(min_capability) else min_capability
    if capability < min_capability:
        return "compute capability {}.{} is below {}.{}".format(*capability, *min_capability)
    return None
