"""A head for multi-token prediction (MTP) that was trained with its target, with layers of the target's types.

E is the embedding of a token. f is the target's hidden state after its final norm, or the head's own output for the
previous draft:

    h = fc(cat(token_norm(E), hidden_norm(f)))
    h = h + sublayer(norm(h))            for each attention, MLP and experts sublayer
    logits = lm_head(final_norm(h))      and final_norm(h) is the input of the next draft

Embedding and `lm_head` are the target's, sharded over several ranks. The token is the one after the position of f;
rotary embedding uses the position of f.

Shapes: T tokens, R rows that draft, M hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from bateleur.cudagraph.execution import Execution
from bateleur.eagle import TargetNeeds
from bateleur.eagle.heads import Attend, HeadSpec
from bateleur.runner.distributed.expert_parallel import ExpertParallel
from bateleur.runner.models import HybridDecoder, StepContext
from bateleur.runner.models.attention import Attention
from bateleur.runner.models.context import LayerStep
from bateleur.runner.models.grouped import GroupedProjection
from bateleur.runner.models.matrix import Projection, empty_projection
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.residual import ResidualStream, build_layers
from bateleur.runner.models.spec import ModelSpec

_NO_STEP = cast(Execution[StepContext], None)
"""Only mixers with a recurrent state read it, and no head has one."""


@dataclass(frozen=True, slots=True)
class _HeadStep(LayerStep):
    """Arguments of one pass of a head. own_attention: attention over the head's own caches."""

    own_attention: Attend
    fuses_rotary: ClassVar[bool] = False  # `Attend` takes normalised and rotated queries and keys
    fuses_norm: ClassVar[bool] = False

    def attend(self, run: Callable[..., Tensor], index: int, *tensors: Tensor) -> Tensor:
        """Return the attention of layer `index` over the head's caches: (T, query heads, head size).
        run: not used. tensors: queries, keys and values.
        """
        q, k, v = tensors
        return self.own_attention(index, q, k, v)


class MtpHead:
    """An MTP head, a `bateleur.eagle.heads.Head`. Its weights are uninitialised until a loader fills them.
    spec: sizes as every `Head` has them. module: sizes and types of its layers. embedding_first: whether the embedding
    is the first of the two inputs of `fc`. target_ids: None, because the head has the target's vocabulary.
    """

    target_ids: Tensor | None = None

    def __init__(self, module: ModelSpec, target: HybridDecoder, exchange: ExpertParallel | None = None) -> None:
        """module: the target's spec with the layers of the head; attention of one size, no recurrent layers.
        exchange: exchanges tokens with ranks that have other experts, see `Experts`. Raises ValueError for attention
        layers of different sizes or windows.
        """
        self.shard = target.shard
        like, size, eps = target.embedding, module.hidden_size, module.norm_eps
        self.spec, self.module, self.embedding_first = _spec_of(module), module, True
        self._target, self._last_tie, self.exchange = target, 0, exchange
        norms = (RMSNorm(size, eps, like, exact=module.exact_norms) for _ in range(3))
        self.token_norm, self.hidden_norm, self.final_norm = norms
        self.fc_proj = empty_projection(size, 2 * size, like)
        ropes = list(dict.fromkeys(layer.rope for layer in module.attention if layer.rope is not None))
        self._tables = [target.rotary_table(rope) for rope in ropes]
        self._residuals = build_layers(module, like, ropes, {}, exchange)
        for index, residual in enumerate(self._residuals):
            if any(isinstance(mixer, Attention) for _, mixer, _ in residual.parts):
                self._last_tie = index

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to load, by weight name."""
        norms = {name: getattr(self, name).weight for name in ("token_norm", "hidden_norm", "final_norm")}
        named = self.fc_proj.tensors("fc_proj") | norms
        for residual in self._residuals:
            named |= residual.weights()
        return named

    @property
    def matrices(self) -> dict[str, Projection | GroupedProjection]:
        """Projections of the head, by the names of their weights."""
        named: dict[str, Projection | GroupedProjection] = {"fc_proj": self.fc_proj}
        for residual in self._residuals:
            named |= residual.matrices
        return named

    def pack(self, *, recorded: bool = False) -> None:
        """Store the matrices in faster CPU layouts, see `Projection.pack`. recorded: CUDA graphs will be captured."""
        for projection in self.matrices.values():
            projection.pack(recorded=recorded)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return `features[0]`, the target's final hidden states (T, M), in the target's dtype."""
        return features[0].to(self._target.dtype)

    def reserve_positions(self, num_positions: int) -> None:
        """Compute the head's rotary tables up to `num_positions`; must be called before a pass."""
        for table in self._tables:
            table.reserve(num_positions)

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one draft pass on tokens `ids` (T,) and hidden states (T, M) of the positions before them.
        Returns the input of `logits` and the hidden states for the next pass, (T, M) each, or (R, M) for the tokens
        with indices `rows` (R,). See `Head.forward`.
        """
        pair = self.token_norm(self._target.embed(ids)), self.hidden_norm(hidden)
        h_TM = self.fc_proj(torch.cat(pair if self.embedding_first else pair[::-1], -1))
        step = _HeadStep(_NO_STEP, tuple(table.at(positions) for table in self._tables), attend)
        stream = ResidualStream(h_TM, self._target.dtype)
        for index, residual in enumerate(self._residuals):
            residual.add_to(stream, step)
            if index == self._last_tie and rows is not None:  # no layer after it mixes tokens
                stream = stream.select(rows)
                if not len(rows):  # keys and values are stored, and no output is needed
                    return stream.sum(), stream.sum()
        final_TM = stream.normed(self.final_norm)
        return final_TM, final_TM if self.spec.recycle == "post_norm" else stream.sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the head's hidden states, computed by the target's output projection."""
        return self._target.logits(hidden)


def _spec_of(module: ModelSpec) -> HeadSpec:
    sizes: list[tuple[Any, ...]] = [
        (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window) for layer in module.attention
    ]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the attention layers of the MTP head have (heads, KV heads, lanes, window) {sizes}; they must agree"
        )
    heads, kv_heads, lanes, window = sizes[0]
    assert all(layer.scale == layer.head_dim**-0.5 for layer in module.attention), "the scale of `Attend`"
    return HeadSpec(
        kind="mtp",
        hidden_size=module.hidden_size,
        target_hidden_size=module.hidden_size,
        vocab_size=module.vocab_size,
        draft_vocab_size=module.vocab_size,
        num_layers=len(sizes),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=lanes,
        intermediate_size=1,
        norm_eps=module.norm_eps,
        needs=TargetNeeds(hidden=True),
        max_positions=module.max_position_embeddings,
        sliding_window=window,
        recycle="post_norm",
    )


class DraftSync:
    """Makes all ranks run equally many draft passes, by one exchange of two integers. Each pass of the head runs the
    collectives of its experts, but policies may want different numbers on each rank, and an idle rank wants none.
    """

    def __init__(self, head: MtpHead, exchange: ExpertParallel) -> None:
        self._head, self._exchange = head, exchange

    def agree(self, num_rows: int, num_drafts: int) -> int:
        """Exchange the numbers of requests and drafts of all ranks; return the largest number of drafts."""
        by_rank = self._exchange.ranks.gather_ints([num_rows, num_drafts])
        self._exchange.num_rows = max(rows for rows, _ in by_rank)
        return max(drafts for _, drafts in by_rank)

    def idle(self) -> int:
        """Take part in the proposals of other ranks, on a rank without requests; returns their number of drafts.
        A dummy token goes through the head, and nothing is stored.
        """
        drafts = self.agree(1, 0)
        for _ in range(drafts):
            self._pass()
        return drafts

    def _pass(self) -> None:
        like = self._head.fc_proj.weight
        zero = torch.zeros(1, dtype=torch.int64, device=like.device)
        hidden = torch.zeros(1, like.shape[0], dtype=like.dtype, device=like.device)
        self._head.forward(zero, hidden, zero, lambda layer, q, k, v: torch.zeros_like(q))
