"""Description of a model by plain numbers. It is read from a checkpoint's config and used by layers and caches.

A model is a stack of residual branches: `h = h + residual_multiplier * branch(norm(h))`. NemotronH has one branch per
layer; Bamba, GraniteMoeHybrid and Llama have two (attention or a recurrence, then an MLP), so their `layers` is twice
as long. Branches that read the same norm, as in Falcon-H1, are the parts of a `ParallelLayer`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from bateleur.mamba import GatedDelta, KimiDelta, Mamba2, Recurrence, ShortConv
from bateleur.runner.models.rope import DynamicRope, RopeSpec

Activation = Literal["relu2", "silu", "gelu_tanh", "clamped_swiglu"]
"""`clamped_swiglu` is gpt-oss's: `g * sigmoid(1.702 g) * (u + 1)` of a gate g of at most 7 and u in [-7, 7]."""
GatedNorm = Literal["gate first", "norm first", "gate only"]
"""Order of norm and gate on the outputs of a recurrent layer."""
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Describes causal grouped-query attention, or a rank's part of it.

    `qk_norm_eps`: epsilon of norms over each query and key head, or over all heads of a token (`qk_norm_whole`).
    `of_heads`: numbers of query and key heads in the whole layer, for a rank's part with `qk_norm_whole`; else None.
    `k_scales`, `v_scales`: for FP8 KV caches. `gated`: outputs times the sigmoid of a gate. `sinks`: attention sinks.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the dot product of query and key."""
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None
    """Query i sees keys j with i - sliding_window < j <= i; None sees all."""
    qk_norm_eps: float | None = None
    """Epsilon of the RMS norms of queries and keys, before rotation; None: no norms."""
    qk_norm_whole: bool = False
    """Whether norms of queries and keys are over all heads of a token, not over each head."""
    gated: bool = False
    """Whether attention outputs are multiplied by the sigmoid of a gate from the same projection."""
    sinks: bool = False
    """Whether each head has an attention sink: a learned score of a key without a value."""
    of_heads: tuple[int, int] | None = None
    """Numbers of query and key heads in the whole layer, for a rank's part with `qk_norm_whole`; else None."""
    k_scales: tuple[float, ...] = ()
    v_scales: tuple[float, ...] = ()
    """Scale of each key or value head in an FP8 cache, from the checkpoint. () if it has none: 1.0."""

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}")
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim is {self.rope.rotary_dim}; it must not exceed head_dim = {self.head_dim}")
        if self.sliding_window is not None:
            _positive(self, "sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer(AttentionLayer):
    """Describes attention without rotary embedding. Keys and values are projected from a latent (MLA) of size `rank`.

    A key has `key_dim` projected elements and `shared_dim` that all heads share, a value `value_dim`. In the KV cache,
    both are padded to `head_dim` elements, the larger of their sizes.
    """

    rank: int
    """Elements of the latent."""
    key_dim: int
    """Elements of a key that are projected from the latent."""
    shared_dim: int
    """Elements of a key that all heads share."""
    value_dim: int
    norm_eps: float
    """Epsilon of the latent's norm."""

    def __post_init__(self) -> None:
        AttentionLayer.__post_init__(self)
        _positive(self, "rank", "key_dim", "shared_dim", "value_dim")


@dataclass(frozen=True, slots=True)
class MlpLayer:
    """Describes a feed-forward branch: `down(act(up(x)))`, or `down(act(gate(x)) * up(x))` if gated."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        _positive(self, "intermediate_size")
        _known(self.activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Describes how a token's experts and their weights follow from one logit (plus a `bias`) per expert.

    softmax: choose the experts with the largest logits. sigmoid: choose the experts with the largest scores, optionally
    with a correction (`e_score_correction_bias`) added for the choice, and only out of the `top_groups` best groups.
    Weights are softmax or sigmoid scores, divided by their sum (plus `sum_eps`) if `normalised`, and times `scale`.
    """

    scores: Scores = "softmax"
    normalised: bool = True
    """Whether weights are divided by their sum before they are scaled."""
    sum_eps: float = 0.0
    """Added to the sum of weights before the division."""
    scale: float = 1.0
    bias: bool = False
    """Whether logits have a bias."""
    corrected: bool = False
    """Whether scores have a correction, a weight of the model."""
    num_groups: int = 1
    top_groups: int = 1
    """Number of groups to choose from, ranked by the sum of their two best scores."""

    def __post_init__(self) -> None:
        _positive(self, "num_groups", "top_groups")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores is {self.scores!r}; supported are 'softmax' and 'sigmoid'")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups}; it must be at most num_groups = {self.num_groups}")
        if self.scores == "softmax" and (self.corrected or self.num_groups > 1):
            raise ValueError("scores is 'softmax'; a correction and groups need 'sigmoid'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLayer:
    """Describes a mixture of experts: a token takes `top_k` of many MLPs, weighted by a router, and maybe a shared MLP.

    Tokens may be projected to `latent_size` for the experts. `own`: range of this rank's experts; None: all.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    """Intermediate size of each expert."""
    activation: Activation = "silu"
    gated: bool = True
    router: RouterSpec
    bias: bool = False
    """Whether the projections of experts have biases."""
    shared: MlpLayer | None = None
    """MLP that every token takes."""
    shared_gate: bool = False
    """Whether the shared MLP's output is multiplied by the sigmoid of a projection of the token to one number."""
    latent_size: int | None = None
    """Width of the experts if tokens are projected to it and back; None: the hidden size."""
    latent_bias: bool = False
    own: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _positive(self, "num_experts", "top_k", "intermediate_size")
        if self.latent_size is not None:
            _positive(self, "latent_size")
        _known(self.activation)
        count, groups = self.num_experts, self.router.num_groups
        if count % groups:
            raise ValueError(f"num_groups is {groups}; it must divide num_experts = {count}")
        if groups > 1 and count < 2 * groups:
            raise ValueError(f"num_groups is {groups}; a group needs two of num_experts = {count}")
        if self.top_k > (most := count // groups * self.router.top_groups):
            raise ValueError(
                f"top_k is {self.top_k}; it must be at most {most} of num_experts = {count}, in "
                f"{self.router.top_groups} of {groups} groups"
            )
        if self.shared_gate and self.shared is None:
            raise ValueError("shared_gate is True and shared None; it must be False without shared experts")

    @property
    def num_own(self) -> int:
        """Number of experts on this rank."""
        return self.num_experts if self.own is None else self.own[1] - self.own[0]


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Base class for descriptions of recurrent layers: the recurrence (`state`), and the chunk size of its scans."""

    state: Recurrence
    chunk_size: int
    """Maximum tokens of a chunk in a scan."""

    def __post_init__(self) -> None:
        _positive(self, "chunk_size")


@dataclass(frozen=True, slots=True)
class MambaLayer(RecurrentLayer):
    """Describes a Mamba-2 layer, or a rank's part of it. of_groups: index of the part's norm group, count of groups."""

    state: Mamba2
    conv_bias: bool
    proj_bias: bool
    norm_eps: float
    norm: GatedNorm = "gate first"
    of_groups: tuple[int, int] | None = None
    """In a rank's part, if there are fewer groups than ranks: index of its group, and number of groups."""


@dataclass(frozen=True, slots=True)
class DeltaLayer(RecurrentLayer):
    """Describes a gated delta net or Kimi delta attention. The norm of each value head is followed by a gate.

    Gates and decays are projections of the token, low-rank ones if `rank` is set.
    """

    state: GatedDelta | KimiDelta
    norm_eps: float
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    rank: int | None = None
    """Rank of low-rank projections to gates and decays; None if they are single matrices."""

    def __post_init__(self) -> None:
        RecurrentLayer.__post_init__(self)
        if self.rank is not None:
            _positive(self, "rank")


@dataclass(frozen=True, slots=True)
class ShortConvLayer(RecurrentLayer):
    """Describes `out(C * conv(B * x))`, a short convolution. B, C, x: projections as wide as the residual stream."""

    state: ShortConv
    bias: bool = False
    """Whether projections and convolution have biases."""


SingleLayer = AttentionLayer | MlpLayer | ExpertsLayer | MambaLayer | DeltaLayer | ShortConvLayer


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """Describes branches that read the same norm. Their outputs, times `factors`, are added to the residual stream.

    A single branch may have the norm after it instead (`norm_last`), or a second norm after it (`output_norm`).
    """

    parts: tuple[SingleLayer, ...]
    factors: tuple[float, ...] = (1.0,)
    norm_last: bool = False
    """Whether the only part reads the stream without a norm, and its output is normalised instead."""
    output_norm: bool = False
    """Whether a second norm is applied to the output of the only part."""

    def __post_init__(self) -> None:
        if (self.norm_last or self.output_norm) and len(self.parts) > 1:
            raise ValueError(
                f"norm_last or output_norm is True; it goes with one part, and parts has {len(self.parts)} entries"
            )
        if self.norm_last and self.output_norm:
            raise ValueError("norm_last and output_norm are True; what a part returns has one norm")
        if not self.parts or len(self.parts) != len(self.factors):
            raise ValueError(
                f"parts has {len(self.parts)} entries and factors {len(self.factors)}; each part needs a factor"
            )


Layer = SingleLayer | ParallelLayer


def parts_of(layer: Layer) -> tuple[SingleLayer, ...]:
    """Return the branches (attention, recurrence, MLP, experts) of a layer: itself, or a parallel layer's parts."""
    return layer.parts if isinstance(layer, ParallelLayer) else (layer,)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describes a decoder-only model of attention, MLP, experts and recurrent branches.

    Embeddings are multiplied by `embedding_multiplier` (rounded to the model's dtype if `rounds_multiplier`), branch
    outputs by `residual_multiplier`. Logits are divided by `logits_divisor`. `foreign_tokens`: placeholders of images,
    not supported. `exact_norms`: norms have float32 weights. `branches_per_layer`: entries of `layers` per model layer.
    `max_position_embeddings`: default maximum tokens of a request. Users may raise it to `max_scaled_positions` if > 0.
    """

    architecture: str
    """Name of the Hugging Face class, such as `NemotronHForCausalLM`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    """Whether the multiplier is rounded to the model's dtype first, as in Gemma."""
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    """Default maximum tokens of a request."""
    max_scaled_positions: int = 0
    """With scaled rotary embedding: largest maximum length that a user may choose; 0: `max_position_embeddings`."""
    eos_token_ids: tuple[int, ...] = ()
    foreign_tokens: tuple[tuple[int, str], ...] = ()
    """Placeholder ids of images and videos, and the checkpoint fields that name them."""
    residual_in_fp32: bool = False
    exact_norms: bool = False
    """Whether norms have float32 weights in any dtype, because weights stored as w - 1 lose bits in other dtypes."""
    kv_cache_dtype: str = "auto"
    """KV cache that the checkpoint asks for: "auto", "fp8", or one that is not supported."""
    branches_per_layer: int = 1
    """Entries of `layers` per layer of the checkpoint: 2 for a mixer and an MLP."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "hidden_size", "max_position_embeddings")
        if not self.layers:
            raise ValueError("layers is empty; a model needs at least one")
        if len(self.layers) % self.branches_per_layer:
            raise ValueError(
                f"layers has {len(self.layers)} entries; it must be a multiple of branches_per_layer = "
                f"{self.branches_per_layer}"
            )
        if self.logits_divisor == 0.0:
            raise ValueError("logits_divisor is 0; logits are divided by it")

    def prefixed(self, i: int) -> list[tuple[str, SingleLayer]]:
        """Return layer i's branches by weight prefix: `layers.i.`, or `layers.i.j.` for part j of a `ParallelLayer`."""
        if isinstance(layer := self.layers[i], ParallelLayer):
            return [(f"layers.{i}.{j}.", part) for j, part in enumerate(layer.parts)]
        return [(f"layers.{i}.", layer)]

    def with_branches(self, change: Callable[[str, SingleLayer], SingleLayer]) -> Self:
        """Return the spec with `change(prefix, branch)` in place of each branch. For prefixes see `prefixed`."""
        layers: list[Layer] = []
        for i, layer in enumerate(self.layers):
            parts = tuple(change(prefix, part) for prefix, part in self.prefixed(i))
            layers.append(replace(layer, parts=parts) if isinstance(layer, ParallelLayer) else parts[0])
        return replace(self, layers=tuple(layers))

    @property
    def longest(self) -> int:
        """The largest `max_model_len` that a user may choose."""
        return max(self.max_position_embeddings, self.max_scaled_positions)

    @property
    def has_length_dependent_rope(self) -> bool:
        """Whether rotated keys depend on the length of the prompt, not only on their position."""
        return any(layer.rope is not None and layer.rope.beyond is not None for layer in self.attention)

    def rope_length(self, prompt_len: int) -> int:
        """Return a number that is equal for prompts with the same rotary frequencies.

        0 for prompts up to the model's original length. Longer ones: `prompt_len` if their frequencies depend on it
        (dynamic scaling), else the original length + 1.
        """
        lengths = [0]
        for layer in self.attention:
            if layer.rope is not None and (beyond := layer.rope.beyond) and prompt_len > beyond.original_length:
                dynamic = isinstance(beyond, DynamicRope)
                lengths.append(prompt_len if dynamic else beyond.original_length + 1)
        return max(lengths)

    @property
    def num_layers(self) -> int:
        """Number of layers as the checkpoint counts them."""
        return len(self.layers) // self.branches_per_layer

    @property
    def widest_head(self) -> int:
        """The largest head size of an attention layer; 1 without attention."""
        return max((layer.head_dim for layer in self.attention), default=1)

    @property
    def has_sinks(self) -> bool:
        """Whether an attention layer has sinks."""
        return any(layer.sinks for layer in self.attention)

    @property
    def mixers(self) -> tuple[SingleLayer, ...]:
        """Residual branches of all layers in order, including those of parallel layers."""
        return tuple(part for layer in self.layers for part in parts_of(layer))

    @property
    def attention(self) -> tuple[AttentionLayer, ...]:
        """Attention layers, in the order of their KV caches."""
        return tuple(each for each in self.mixers if isinstance(each, AttentionLayer))

    @property
    def recurrent(self) -> tuple[RecurrentLayer, ...]:
        """Recurrent layers, in the order of the state pool."""
        return tuple(each for each in self.mixers if isinstance(each, RecurrentLayer))


def _positive(spec: object, *names: str) -> None:
    for name in names:
        if (value := getattr(spec, name)) < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _known(activation: str) -> None:
    if activation not in (known := get_args(Activation)):
        raise ValueError(f"activation is {activation!r}; supported are {', '.join(map(repr, known))}")
