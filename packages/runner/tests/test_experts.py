"""Routers and grouped products compared with loops in float64, and without reading values on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bateleur.cudagraph._host_sync import is_composite, waits_for_device
from bateleur.mamba import ShortConv
from bateleur.metadata.dispatch import Implementations
from bateleur.runner.models import grouped
from bateleur.runner.models.experts import Experts
from bateleur.runner.models.grouped import GroupedProjection, grouped_product, masked_products
from bateleur.runner.models.router import route, sort_places
from bateleur.runner.models.spec import (
    AttentionLayer,
    DeltaLayer,
    ExpertsLayer,
    MlpLayer,
    ModelSpec,
    ParallelLayer,
    RecurrentLayer,
    RouterSpec,
)

ROUTERS = {
    "Qwen3.5 and Granite": RouterSpec(),
    "Qwen3-Next": RouterSpec(normalised=False),
    "NemotronH and Kimi": RouterSpec(
        scores="sigmoid", corrected=True, sum_eps=1e-20, scale=2.5, num_groups=3, top_groups=2
    ),
    "LFM2": RouterSpec(scores="sigmoid", corrected=True, sum_eps=1e-6),
    "LFM2 without a bias": RouterSpec(scores="sigmoid", normalised=False, scale=0.5),
}


def by_hand(logits: list[float], spec: RouterSpec, top_k: int, correction: list[float]) -> dict[int, float]:
    """Return the weights by expert of one token."""
    count = len(logits)
    if spec.scores == "softmax":
        total = math.fsum(math.exp(each) for each in logits)
        scores = [math.exp(each) / total for each in logits]
    else:
        scores = [1.0 / (1.0 + math.exp(-each)) for each in logits]
    choice = [score + (extra if spec.corrected else 0.0) for score, extra in zip(scores, correction, strict=True)]
    size = count // spec.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(spec.num_groups)]
    groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
    allowed = [e for group in groups[: spec.top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    total = math.fsum(scores[e] for e in chosen) + spec.sum_eps if spec.normalised else 1.0
    return {e: spec.scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_a_router_is_what_it_is_by_hand(spec: RouterSpec, top_k: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(50, 12, generator=generator) * 3
    correction = torch.randn(12, generator=generator)
    weights, experts = route(logits, spec, top_k, correction if spec.corrected else None)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    for row in range(50):
        wanted = by_hand(logits[row].tolist(), spec, top_k, correction.tolist())
        found = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("count", [1, 2, 7, 12, 64])
def test_a_token_has_its_experts_whoever_stands_beside_it(spec: RouterSpec, count: int) -> None:
    """To the last bit, also for equal logits: on a CPU, sigmoids at the end of a tensor had other bits."""
    if spec.num_groups > 1 and count % (2 * spec.num_groups):
        pytest.skip("groups have at least two experts each")
    logits = torch.randn(33, count, generator=torch.Generator().manual_seed(count))
    logits[1::3] = logits[1::3, :1]
    correction = torch.zeros(count) if spec.corrected else None
    weights, experts = route(logits, spec, min(3, count), correction)
    for t in range(33):
        alone = route(logits[t : t + 1], spec, min(3, count), correction)
        assert torch.equal(alone[0][0], weights[t])
        assert torch.equal(alone[1][0], experts[t])


def test_logits_that_are_far_apart_make_no_nan() -> None:
    logits = torch.tensor([[3e4, -3e4, 2e4, 0.0]])
    for spec in ROUTERS.values():
        if spec.num_groups == 1:
            weights, experts = route(logits, spec, 2)
            assert weights.isfinite().all()
            assert experts.tolist() == [[0, 2]]


@pytest.fixture(params=["by group", "masked", "torch", "packed"])
def product(request: pytest.FixtureRequest) -> Any:
    """The implementations of a grouped product, as a function of rows, matrices and ends."""
    if request.param == "by group":
        return grouped_product
    if request.param == "masked":
        return masked_products
    if request.param == "torch":
        return lambda x, weight, ends: torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    def packed(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        projection = GroupedProjection(weight)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bateleur.runner.models.matrix._FEW_ENTRIES", 1)
            projection.pack()
        assert torch.equal(projection.weight, weight)
        return projection(x, ends)

    return packed


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [0, 4, 5, 0], [0, 0, 1, 0]])
def test_each_row_is_multiplied_with_the_matrix_of_its_group(product: Any, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 12, 8, generator=generator)
    x = torch.randn(sum(counts), 8, generator=generator)
    ends = torch.tensor(counts).cumsum(0).int()
    groups = torch.arange(4).repeat_interleave(torch.tensor(counts))
    wanted = torch.einsum("sk,snk->sn", x.double(), weight.double()[groups])
    torch.testing.assert_close(product(x, weight, ends).double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_stands_in_other_rows_does_not_matter(product: Any) -> None:
    weight, x = torch.randn(4, 12, 8), torch.randn(9, 8)
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    clean = product(x, weight, ends)
    x[4], x[8] = torch.nan, torch.inf
    others = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(product(x, weight, ends)[others], clean[others])


def naive(layer: Experts, x: Tensor) -> Tensor:
    """The branch token by token and expert by expert, in float64."""
    spec, weights = layer.spec, {name: weight.double() for name, weight in layer.weights().items()}

    def mlp(x: Tensor, up: Tensor, down: Tensor, spec: MlpLayer | ExpertsLayer) -> Tensor:
        wide = up @ x
        size = spec.intermediate_size
        gate = wide[:size]
        gate = gate * gate.sigmoid() if spec.activation == "silu" else gate.clamp(min=0) ** 2
        return down @ (gate * wide[size:] if spec.gated else gate)

    rows = []
    for token in x.double():
        logits = (weights["router_proj"] @ token).tolist()
        correction = weights.get("correction", torch.zeros(spec.num_experts)).tolist()
        inner = token if spec.latent_size is None else weights["latent_in_proj"] @ token
        y = torch.zeros_like(inner)
        for e, factor in by_hand(logits, spec.router, spec.top_k, correction).items():
            y = y + factor * mlp(inner, weights["up_proj"][e], weights["down_proj"][e], spec)
        y = y if spec.latent_size is None else weights["latent_out_proj"] @ y
        if spec.shared is not None:
            shared = mlp(token, weights["shared_up_proj"], weights["shared_down_proj"], spec.shared)
            gate = (weights["shared_gate_proj"] @ token).sigmoid() if spec.shared_gate else 1.0
            y = y + gate * shared
        rows.append(y)
    return torch.stack(rows)


LAYERS = {
    "Qwen": ExpertsLayer(
        num_experts=9, top_k=4, intermediate_size=12, router=RouterSpec(), shared=MlpLayer(20), shared_gate=True
    ),
    "Nemotron Super": ExpertsLayer(
        num_experts=12,
        top_k=5,
        intermediate_size=12,
        activation="relu2",
        gated=False,
        router=ROUTERS["NemotronH and Kimi"],
        shared=MlpLayer(20, "relu2", gated=False),
        latent_size=8,
    ),
    "LFM2": ExpertsLayer(num_experts=5, top_k=2, intermediate_size=8, router=ROUTERS["LFM2"]),
}


def made(spec: ExpertsLayer, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Experts:
    layer = Experts(spec, torch.empty(1, 16, dtype=dtype, device=device))
    generator = torch.Generator(device).manual_seed(1)
    for weight in layer.weights().values():
        weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5, generator=generator)
    return layer


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Experts:
    return made(LAYERS[request.param])


STEP: Any = SimpleNamespace(adapters=None)  # all that experts read of a step


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_a_branch_is_what_it_is_token_by_token(layer: Experts, tokens: int) -> None:
    x = torch.randn(tokens, 16)
    torch.testing.assert_close(layer.forward(x, STEP).double(), naive(layer, x), rtol=1e-4, atol=1e-4)


def test_a_token_with_nan_harms_no_other(layer: Experts) -> None:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    clean = layer.forward(x, STEP)
    x[2] = torch.nan
    y = layer.forward(x, STEP)
    others = [0, 1, 3, 4, 5]
    assert y[2].isnan().all()
    # the token with NaN changes which rows are multiplied together, and so the order of sums: float32 rounding, no more
    torch.testing.assert_close(y[others], clean[others], rtol=1e-4, atol=1e-4)


class OnDevice(TorchDispatchMode):
    """Refuses operators that would wait for values if the tensors were on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        assert not waits_for_device(func, args, kwargs, lambda _: True), func
        return func(*args, **kwargs)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA's form of grouped products, visible to modes; the operator would hide it."""
    monkeypatch.setattr(grouped, "_grouped_product", masked_products)
    with OnDevice():
        yield


@pytest.mark.usefixtures("as_on_cuda")
def test_nothing_waits_for_a_value_on_the_device(layer: Experts) -> None:
    x = torch.randn(7, 16)
    assert layer.forward(x, STEP).shape == x.shape


@pytest.mark.usefixtures("as_on_cuda")
def test_a_wait_would_be_seen() -> None:
    experts = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(AssertionError, match="aten"):
        sort_places(experts, 3)[2][1].item()


@pytest.mark.parametrize(
    ("dtype", "columns", "capability", "has"),
    [
        (torch.bfloat16, 16, (9, 0), True),
        (torch.bfloat16, 16, (10, 3), True),
        (torch.bfloat16, 16, (8, 0), False),
        (torch.bfloat16, 16, (8, 9), False),
        (torch.bfloat16, 16, (12, 0), False),
        (torch.bfloat16, 20, (9, 0), False),
        (torch.float16, 16, (9, 0), False),
        (torch.float32, 16, (9, 0), False),
    ],
)
def test_torch_is_asked_only_for_what_it_does_on_the_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, capability: tuple[int, int], has: bool
) -> None:
    """For other dtypes and GPUs torch reads the ends on the host, and refuses rows that are not 16-byte aligned."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(grouped, "generation", grouped.generation.__wrapped__)  # which is not kept
    x, weight = torch.empty(3, columns, dtype=dtype), torch.empty(2, 8, columns, dtype=dtype)
    assert grouped.torch_supports(x, weight) == has


@pytest.mark.parametrize(("inner", "asked"), [(16, 2), (12, 1), (20, 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_on_cuda_torch_takes_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, inner: int, asked: int, gated: bool
) -> None:
    """On tensors without values: torch checks dtypes, strides and alignment; 12 numbers are 24 bytes."""
    calls = []
    product = torch.nn.functional.grouped_mm

    def counted(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(x.shape)
        return product(x, weight, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    monkeypatch.setattr(grouped, "generation", lambda _: 9)
    monkeypatch.setattr(grouped, "_grouped_product", grouped_product)
    monkeypatch.setattr(
        grouped, "FORMS", Implementations(masked_products)
    )  # no kernel is launched on what has no memory
    spec = ExpertsLayer(num_experts=4, top_k=2, intermediate_size=inner, gated=gated, router=RouterSpec())
    with FakeTensorMode():
        layer = Experts(spec, torch.empty(1, 16, dtype=torch.bfloat16, device="cuda"))
        y = layer.forward(torch.empty(5, 16, dtype=torch.bfloat16, device="cuda"), STEP)
    assert (y.shape, y.dtype, y.device.type) == ((5, 16), torch.bfloat16, "cuda")
    assert len(calls) == asked


def test_packed_groups_take_no_rows_too() -> None:
    product = grouped.GroupedProjection(torch.zeros(2, 512, 256))
    product.pack()
    assert product.stored is None
    assert product(torch.zeros(0, 256), torch.zeros(2, dtype=torch.int32)).shape == (0, 512)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_branch_is_captured_on_cuda(layer: Experts, dtype: torch.dtype) -> None:
    ours = made(layer.spec, "cuda", dtype)
    x = torch.randn(8, 16, device="cuda", dtype=dtype)
    wanted = naive(ours, x)
    graph = torch.cuda.CUDAGraph()
    ours.forward(x, STEP)
    with torch.cuda.graph(graph):
        y = ours.forward(x, STEP)
    graph.replay()
    # Entries are sums of large terms of both signs, so the error is relative to the norm.
    assert (y.double() - wanted).norm() <= (1e-5 if dtype == torch.float32 else 4e-2) * wanted.norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ({"top_k": 10}, "top_k is 10; it must be at most 9 of num_experts = 9, in 1 of 1 groups"),
        ({"activation": "gelu"}, "activation is 'gelu'; supported are 'relu2', 'silu', "),
        ({"shared": None}, "shared_gate is True and shared None; it must be False without shared experts"),
        ({"latent_size": 0}, "latent_size is 0; it must be at least 1"),
    ],
)
def test_layers_that_can_not_be(fields: dict[str, Any], message: str) -> None:
    known = {"num_experts": 9, "top_k": 4, "intermediate_size": 12, "router": RouterSpec()}
    with pytest.raises(ValueError, match=message):
        ExpertsLayer(**(known | {"shared": MlpLayer(20), "shared_gate": True} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": "tanh"}, "scores is 'tanh'; supported are 'softmax' and 'sigmoid'"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups is 3; it must be at most num_groups = 2"),
        ({"corrected": True}, "scores is 'softmax'; a correction and groups need 'sigmoid'"),
    ],
)
def test_routers_that_can_not_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterSpec(**fields)


@pytest.mark.parametrize(("groups", "message"), [(2, "must divide"), (9, "a group needs two")])
def test_groups_that_can_not_be(groups: int, message: str) -> None:
    router = RouterSpec(scores="sigmoid", num_groups=groups)
    with pytest.raises(ValueError, match=f"num_groups is {groups}; .*{message}"):
        ExpertsLayer(num_experts=9, top_k=1, intermediate_size=12, router=router)


MLP = MlpLayer(8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MlpLayer(0), "intermediate_size is 0; it must be at least 1"),
        (lambda: AttentionLayer(8, 3, 16, 0.25), "num_kv_heads is 3; it must divide num_heads = 8"),
        (lambda: AttentionLayer(8, 0, 16, 0.25), "num_kv_heads is 0; it must be at least 1"),
        (lambda: AttentionLayer(8, 2, 16, 0.25, sliding_window=0), "sliding_window is 0; it must be at least 1"),
        (lambda: RecurrentLayer(ShortConv(8), 0), "chunk_size is 0; it must be at least 1"),
        (lambda: DeltaLayer(ShortConv(8), 8, 1e-6, rank=0), "rank is 0; it must be at least 1"),
        (lambda: ParallelLayer(()), "parts has 0 entries and factors 1; each part needs a factor"),
        (lambda: ParallelLayer((MLP,), (1.0, 2.0)), "parts has 1 entries and factors 2; each part needs a factor"),
        (
            lambda: ParallelLayer((MLP, MLP), (1.0, 1.0), norm_last=True),
            "norm_last or output_norm is True; it goes with one part, and parts has 2 entries",
        ),
        (
            lambda: ParallelLayer((MLP,), norm_last=True, output_norm=True),
            "norm_last and output_norm are True; what a part returns has one norm",
        ),
        (lambda: ModelSpec("", 0, 8, (MLP,), 1e-5), "vocab_size is 0; it must be at least 1"),
        (lambda: ModelSpec("", 9, 8, (MLP,), 1e-5, logits_divisor=0.0), "logits_divisor is 0; logits are divided by"),
        (
            lambda: ModelSpec("", 9, 8, (MLP,) * 3, 1e-5, branches_per_layer=2),
            "layers has 3 entries; it must be a multiple of branches_per_layer = 2",
        ),
    ],
)
def test_models_that_can_not_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
