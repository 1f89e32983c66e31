"""What paged-attention backends share: their metadata, the builder of it, how a step attends, what is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from bateleur.metadata.attention_metadata_builder import AttentionMetadataBuilder, BuildPhase, GraphSupport
from bateleur.metadata.common_attention_metadata import CommonAttentionMetadata
from bateleur.metadata.signature import Role, Signature

KVCache: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of a layer, each (num_blocks, block_size, Hkv, D)."""


@dataclass(frozen=True, slots=True)
class PagedAttentionMetadata:
    """What paged attention reads of a batch with R rows and T tokens, for one KV-cache group.

    Attributes:
        query_start_loc: (R + 1,) int32.
        seq_lens: (R,) int32.
        block_table: (R, max_blocks) int32.
        slot_mapping: (T,) int64, -1 for tokens that store nothing.
        num_decodes: leading rows where row ``r`` computes token ``r`` and nothing else; padded rows may be
            among them if they have no token.
        max_query_len, max_seq_len: host bounds over all rows.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int


class PagedAttentionBuilder:
    """Builder of :class:`PagedAttentionMetadata`: views only, and one host scalar."""

    reads = frozenset({"query_start_loc", "query_start_loc_cpu", "seq_lens", "block_tables", "slot_mappings"})
    seq_len_fill = 0

    def __init__(self, graph_support: GraphSupport = GraphSupport.ALWAYS) -> None:
        """``graph_support`` is what the backend's kernels allow."""
        self.graph_support = graph_support

    def build(
        self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN
    ) -> PagedAttentionMetadata:
        """Metadata for KV-cache group ``group``. Under capture only the promise of one token a row makes a decode.

        Raises:
            ValueError: the batch has no such group.
        """
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
        """Both bounds, and the rows that kernels take for decodes."""
        return Signature(
            (
                ("num_decodes", Role.FLOOR, meta.num_decodes),
                ("max_query_len", Role.BOUND, meta.max_query_len),
                ("max_seq_len", Role.BOUND, meta.max_seq_len),
            )
        )

    def addresses(self) -> Mapping[str, int]:
        """Nothing: all tensors are the batch's."""
        return {}


def _leading_single_token_rows(common: CommonAttentionMetadata, phase: BuildPhase) -> int:
    if phase is not BuildPhase.RUN and common.max_query_len > 1:
        return 0  # any row of a batch that replays this may have several tokens
    if common.max_query_len == 1:  # the promise covers padded rows too, so that a captured size is one form
        return min(common.num_reqs, common.num_tokens)
    if 0 < common.num_actual_tokens == common.num_actual_reqs * common.max_query_len:
        return 0  # all have as many
    starts = common.query_start_loc_cpu.numpy()
    if len(starts) > 1 and starts[1] - starts[0] != 1:
        return 0
    several = starts[1:] - starts[:-1] != 1
    first = int(several.argmax()) if len(several) else 0
    return first if len(several) and several[first] else common.num_reqs


class AttentionBackend:
    """A builder and kernels over a paged KV cache; a kind of it says which, and what it refuses.

    Block 0 of a cache is the null block: no request owns it, and its slot 0 stays all zeros. The rest of it, free
    blocks and table tails may hold anything, NaN too unless ``needs_finite_cache``.
    """

    name: ClassVar[str]
    """What :func:`get_backend` calls it."""
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    """Which batches its kernels may be captured for."""
    fuses_rotary: ClassVar[bool] = False
    """Whether ``attend`` takes ``rotary``; where not, the caller rotates queries and keys."""
    fuses_norm: ClassVar[bool] = False
    """Whether ``attend`` takes ``norm``, beside ``rotary``."""
    needs_finite_cache: ClassVar[bool] = False
    """Whether what a row must not see still has to be finite, as it is multiplied by a weight of 0.

    An engine then zeroes a block before it hands it to a request: the one that had it before may have left NaN.
    """
    tolerates_loose_bounds: ClassVar[bool] = False
    """Whether its kernels take any batch of so many rows and tokens, and as long under bounds far above the truth: then
    graphs of mixed batches hold them, whatever else runs between the pieces.
    """
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    """Of queries and caches."""
    min_capability: ClassVar[tuple[int, int] | None] = None
    """Compute capability of the CUDA devices it needs; None: it needs none."""
    device = torch.device("cpu")
    """Where its builders keep what they own; :func:`get_backend` sets it."""
    write: ClassVar[Callable[..., Any]]
    """With the arguments of :data:`bateleur.metadata.ops.write_kv`, or if it fuses those of ``rotate_and_write_kv``.

    Weights and epsilon of norms come only where ``fuses_norm``.
    """
    kernel: ClassVar[Callable[..., Any]]
    """Attention over what is stored, with the arguments of :data:`bateleur.metadata.ops.paged_attention`."""

    def builder(self) -> AttentionMetadataBuilder[PagedAttentionMetadata]:
        """A new builder of this backend's metadata, for one KV-cache group or many."""
        return PagedAttentionBuilder(self.graph_support)

    def unsupported_reason(
        self, head_dim: int, dtype: torch.dtype, device: torch.device, sliding_window: int | None = None
    ) -> str | None:
        """Why a configuration can't run here, or None if it can."""
        if head_dim < 1:
            return f"head_dim {head_dim} is not positive"
        if dtype not in self.dtypes:
            return f"dtype {dtype} is not one of {', '.join(map(str, self.dtypes))}"
        if sliding_window is not None and sliding_window < 1:
            return f"sliding_window {sliding_window} is not positive"
        reason = self.missing_requirement(head_dim, device)
        if reason is None and self.min_capability is not None:
            reason = _device_refusal(device, self.min_capability)
        return reason

    def missing_requirement(self, head_dim: int, device: torch.device) -> str | None:
        """What is missing for heads of this size here, or for any; None if nothing is."""
        return None

    def build_work_list(
        self, meta: PagedAttentionMetadata, kv: KVCache, num_heads: int, sliding_window: int | None = None
    ) -> Tensor | None:
        """Make the work list of a forward pass for all layers with equal heads and windows, or return None.

        A model calls it once in each pass, before its layers, and passes the result to every ``attend`` of the pass. A
        CUDA graph records the call. Only backends that ``tolerates_loose_bounds`` are asked. Without a list, a
        backend that has
        one makes it in every ``attend``.

        Args:
            meta: of this batch.
            kv: caches of one of the layers.
            num_heads: query heads of the layers.
            sliding_window: of the layers; None for none.
        """
        return None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KVCache,
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, Tensor, float] | None = None,
        work: Tensor | None = None,
    ) -> Tensor:
        """Store this step's keys and values, then attend over the cache.

        Args:
            q: (T, Hq, D) queries, Hq a multiple of Hkv.
            k, v: (T, Hkv, D) keys and values of the same tokens.
            kv: caches of the layer, written in place.
            meta: of this batch and this layer's group.
            scale: factor on the scores.
            sliding_window: query ``i`` sees key ``j`` iff ``i - sliding_window < j <= i``; None for all ``j
                <= i``.
            rotary: cosine and signed sine (T, 1, R) of the tokens' positions, R at most D and even: lane i of the
                leading R turns with lane i + R/2, ``x * cos + roll(x, R/2) * sin``. ``q`` and ``k`` are not yet
                rotated then; they may be overwritten. Only where ``fuses_rotary``.
            norm: weights of queries and of keys, of a head (D,) or of all heads (Hq * D,) and (Hkv * D,), and epsilon
                of a root mean square norm over each head, or over all of them, before they turn. Only where
                ``fuses_norm``.
            work: what ``divide`` returned in this pass for layers with these heads and this window.

        Returns:
            (T, Hq, D) in the dtype of ``q``; 0 for padded tokens.
        """
        if rotary is not None and not self.fuses_rotary:
            raise ValueError(
                f"rotary: the backend {self.name!r} takes queries and keys that are rotated already"
            )
        if norm is not None and not self.fuses_norm:
            raise ValueError(
                f"norm: the backend {self.name!r} takes queries and keys that are normalised already"
            )
        self.check(kv, meta)
        if self.fuses_rotary:
            self.write(q, k, v, *kv, meta.slot_mapping, *(rotary or (None, None)), *(norm or ()))
        else:
            self.write(k, v, *kv, meta.slot_mapping)
        return self.attend_cache(q, kv, meta, scale, sliding_window, work)

    def check(self, kv: KVCache, meta: PagedAttentionMetadata) -> None:
        """Raise `ValueError` for what the backend can't take, before anything is stored."""

    def attend_cache(
        self,
        q: Tensor,
        kv: KVCache,
        meta: PagedAttentionMetadata,
        scale: float,
        sliding_window: int | None,
        work: Tensor | None = None,
    ) -> Tensor:
        """Attention (T, Hq, D) over what is stored; 0 for tokens of no row."""
        out: Tensor = self.kernel(q, *kv, *kernel_row_args(meta), scale, sliding_window or 0)
        return out


kernel_row_args = attrgetter(
    "block_table", "seq_lens", "query_start_loc", "num_decodes", "max_query_len", "max_seq_len"
)
"""What kernels are told of rows, in the order of their arguments."""


def _device_refusal(device: torch.device, least: tuple[int, int]) -> str | None:
    if device.type != "cuda":
        return f"device {device} is not CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(device) if any(least) else least
    if capability < least:
        return "compute capability {}.{} is below {}.{}".format(*capability, *least)
    return None
