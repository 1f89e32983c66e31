"""The conformance checks: shipped builders and backends pass, and each class of defect is reported by its letter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bateleur.metadata import (
    BatchLimits,
    BuildPhase,
    CommonAttentionMetadata,
    GraphSupport,
    KVCacheGroup,
    PagedAttentionBuilder,
    Role,
    Signature,
    get_backend,
    ops,
)
from bateleur.metadata.backends import _load, _torch_ops, backend_names, unsupported_reason
from bateleur.metadata.backends.base import LayerConfig
from bateleur.metadata.backends.paged import TritonBackend
from bateleur.metadata.conformance import ConformanceError, Violation, backend_checks, check_backend, check_builder

LIMITS = BatchLimits(max_num_reqs=7, max_num_tokens=31, max_model_len=19)
SUPPORTS = list(GraphSupport)


def backend_on(name: str, device: str) -> Any:
    try:
        return get_backend(name, device=device, dtype=torch.float32, head_dim=16)
    except ValueError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("name", backend_names())
def test_shipped_builders_conform(name: str) -> None:
    """All builders, also of backends whose kernels cannot run here: building runs no kernel."""
    builder = _load(name).builder()
    report = check_builder(builder, LIMITS)
    assert report.num_builds >= 16
    assert bool(report.keys) == (builder.graph_support > GraphSupport.NEVER)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("group", [0, 1])
def test_the_paged_builder_conforms_at_every_support_and_group(support: GraphSupport, group: int) -> None:
    groups = (KVCacheGroup(5, 4), KVCacheGroup(16, 2, lookahead_tokens=2))
    report = check_builder(PagedAttentionBuilder(support), LIMITS, groups=groups, group=group, query_lens=(1, 3))
    assert len(report.keys) == {0: 0, 1: 3, 2: 6, 3: 8}[support]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", backend_names())
def test_gpu_shipped_builders_conform(name: str) -> None:
    check_builder(backend_on(name, "cuda").builder(), LIMITS, device="cuda")


class Rows:
    """A correct builder with its own buffer: position of the newest key, -1 in padded rows."""

    reads = frozenset({"seq_lens", "seq_lens_cpu_upper_bound"})
    seq_len_fill = 0
    graph_support = GraphSupport.ALWAYS

    def __init__(self) -> None:
        self.buffer = torch.full((LIMITS.max_num_reqs,), 99, dtype=torch.int32)

    def build(self, common: CommonAttentionMetadata, group: int, phase: BuildPhase = BuildPhase.RUN) -> Any:
        return {"newest": self.newest(common), "longest": common.max_seq_len}

    def newest(self, common: CommonAttentionMetadata) -> Any:
        return torch.sub(common.seq_lens, 1, out=self.buffer[: common.num_reqs])

    def signature(self, meta: Any) -> Signature:
        return Signature((("longest", Role.BOUND, meta["longest"]),))

    def addresses(self) -> dict[str, int]:
        return {"buffer": self.buffer.data_ptr()}


def broken(base: type[Rows] = Rows, **methods: Any) -> type[Rows]:
    return type("Broken", (base,), methods)


def stale_tail(self: Any, common: Any) -> Any:
    real = common.num_actual_reqs
    self.buffer[:real] = common.seq_lens[:real] - 1
    return self.buffer[: common.num_reqs]


def longest_ever(self: Any, common: Any, group: int, phase: Any = None) -> Any:
    self.most = max(getattr(self, "most", 0), common.max_seq_len)
    return {"newest": self.newest(common), "longest": self.most}


def same_object(self: Any, common: Any, group: int, phase: Any = None) -> Any:
    meta = self.__dict__.setdefault("meta", {})
    meta.update(newest=self.newest(common), longest=common.max_seq_len)
    return meta


def shared_part(self: Any, common: Any, group: int, phase: Any = None) -> Any:
    plan = self.__dict__.setdefault("plan", {})
    return {"newest": self.newest(common), "longest": common.max_seq_len, "plan": plan}


def moving(self: Any, common: Any) -> Any:
    self.turn = 1 - getattr(self, "turn", 0)
    return torch.sub(common.seq_lens, 1, out=(self.buffer, self.other)[self.turn][: common.num_reqs])


class Pair(Rows):
    """A builder with two declared buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.buffer.clone()

    def addresses(self) -> dict[str, int]:
        return {"buffer": self.buffer.data_ptr(), "other": self.other.data_ptr()}


def grown(self: Any, common: Any) -> Any:
    if len(self.buffer) < 3 * common.num_reqs:
        self.buffer = torch.zeros(3 * common.num_reqs, dtype=torch.int32)
    return torch.sub(common.seq_lens, 1, out=self.buffer[: common.num_reqs])


def fills_seq_lens(self: Any, common: Any) -> Any:
    common.seq_lens[common.num_actual_reqs :] = 1
    return Rows.newest(self, common)


def fills_bound_in_warmup(self: Any, common: Any, group: int, phase: Any = None) -> Any:
    if phase is BuildPhase.WARMUP:
        common.seq_len_bound.upper[:] += 1
    return Rows.build(self, common, group)


def with_value(read: Callable[[Any], Any]) -> Callable[..., Any]:
    def newest(self: Any, common: Any) -> Any:
        read(common.seq_lens * 1)
        return Rows.newest(self, common)

    return newest


def scatter_by_mask(x: Any) -> None:
    pair = torch.cat((x[:1], x[:1]))
    pair[pair == pair] = pair * 2


def reads_back(self: Any, common: Any) -> Any:
    torch._foreach_copy_([self.buffer[: common.num_reqs]], [common.seq_lens])  # returns nothing, but writes
    self.buffer.tolist()
    return Rows.newest(self, common)


def unfilled_under_capture(self: Any, common: Any, group: int, phase: Any = None) -> Any:
    if phase is not BuildPhase.CAPTURE:
        return Rows.build(self, common, group)
    return {"newest": self.buffer[: common.num_reqs], "longest": common.max_seq_len}


def with_scalar(self: Any, common: Any, group: int, phase: Any = None) -> Any:
    return {**Rows.build(self, common, group), "wide": bool(common.seq_len_bound.max() > 9)}


CASES = {
    "A: padding keeps an earlier batch": ("AD", broken(newest=stale_tail)),
    "A: a capture leaves its buffer as it was": ("A", broken(build=unfilled_under_capture)),
    "C: a fresh tensor for each step": ("C", broken(newest=lambda self, common: common.seq_lens - 1)),
    "C: two buffers in turn": ("C", broken(Pair, newest=moving)),
    "C: a buffer that is not declared": ("C", broken(addresses=lambda self: {})),
    "C: a workspace that grows": ("C", broken(newest=grown)),
    "D: history decides": ("AD", broken(build=longest_ever)),
    "D: one object for all builds": ("D", broken(build=same_object)),
    "D: a shared part that may be filled later": ("D", broken(build=shared_part)),
    "E: a bound that the batch decides is called control": (
        "E",
        broken(signature=lambda self, meta: Signature((("longest", Role.CONTROL, meta["longest"]),))),
    ),
    "G: a field that is not declared": ("G", broken(reads=frozenset({"seq_lens_cpu_upper_bound"}))),
    "G: a half of the bound that is not declared": (
        "G",
        broken(newest=lambda self, common: (common.seq_len_bound.per_row(0), Rows.newest(self, common))[1]),
    ),
    "G: slicing hides nothing": (
        "G",
        broken(newest=lambda self, common: (common.unpadded().positions, Rows.newest(self, common))[1]),
    ),
    "G: a field that no batch carries": ("G", broken(reads=frozenset({"seq_lens", "colours"}))),
    "G: a fill that no stager applies": ("G", broken(seq_len_fill=7)),
    "G: a builder that fails": ("G", broken(newest=lambda self, common: common.no_such_field)),
    "L: padded rows are filled by the builder": ("L", broken(newest=fills_seq_lens)),
    "L: a warm-up writes a host field": ("L", broken(build=fills_bound_in_warmup)),
    "M: item": ("M", broken(newest=with_value(lambda x: x.max().item()))),
    "M: int": ("M", broken(newest=with_value(lambda x: int(x[0])))),
    "M: a branch": ("M", broken(newest=with_value(lambda x: bool(x.any())))),
    "M: tolist": ("M", broken(newest=with_value(lambda x: x.tolist()))),
    "M: numpy": ("M", broken(newest=with_value(lambda x: x.numpy()))),
    "M: asarray": ("M", broken(newest=with_value(lambda x: np.asarray(x)))),
    "M: cpu": ("M", broken(newest=with_value(lambda x: x.cpu()))),
    "M: nonzero": ("M", broken(newest=with_value(lambda x: x.nonzero()))),
    "M: a mask as index": ("M", broken(newest=with_value(lambda x: x[x > 0]))),
    "M: a mask for as many values": ("M", broken(newest=with_value(scatter_by_mask))),
    "M: a value copied to a buffer before": ("M", broken(newest=reads_back)),
    "M: a size that values decide": (
        "M",
        broken(newest=with_value(lambda x: torch.arange(len(x)).repeat_interleave(x))),
    ),
    "M: a decision the signature does not tell": ("M", broken(build=with_scalar)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_broken_builder_is_found(case: str) -> None:
    letters, kind = CASES[case]
    with pytest.raises(ConformanceError) as caught:
        check_builder(kind(), LIMITS)
    found = caught.value.letters
    assert case[0] in found
    assert set(found) <= set(letters), caught.value
    assert str(caught.value).startswith("Broken breaks the contract:\n  [")
    assert all(violation.text in str(caught.value) for violation in caught.value.violations)


def test_what_is_allowed_passes() -> None:
    """Reads of host fields, fills by mask, copies on the device, parts that never change."""

    def newest(self: Any, common: Any) -> Any:
        assert int(common.query_start_loc_cpu[0]) == 0
        assert common.seq_len_bound.upper[:1].tolist()
        common.is_prefilling.numpy().any()
        scratch = common.seq_lens.to(torch.int32, copy=True)
        scratch[scratch > 3] = 0
        scratch.index_put_((scratch > 3,), torch.zeros((), dtype=torch.int32, device=scratch.device))
        torch.repeat_interleave(scratch, scratch * 0 + 1, output_size=len(scratch))
        return Rows.newest(self, common)

    good = broken(newest=newest, reads=Rows.reads | {"query_start_loc_cpu", "is_prefilling"})
    assert check_builder(good(), LIMITS).read == good.reads


def test_a_builder_that_allocates_conforms_if_it_is_never_captured() -> None:
    fresh = broken(newest=lambda self, common: common.seq_lens - 1, graph_support=GraphSupport.NEVER)
    assert check_builder(fresh(), LIMITS).keys == ()


def test_only_batches_that_the_support_allows_are_asked_for() -> None:
    def strict(self: Any, common: Any, group: int, phase: Any = None) -> Any:
        one_each = common.max_query_len == 1
        newest = Rows.newest(self, common) if one_each else common.seq_lens - 1
        return {"newest": newest, "longest": common.max_seq_len}

    check_builder(broken(build=strict, graph_support=GraphSupport.SINGLE_TOKEN)(), LIMITS)
    for support in (GraphSupport.UNIFORM, GraphSupport.ALWAYS):
        with pytest.raises(ConformanceError, match=r"\[C\] newest .* 2 a row"):
            check_builder(broken(build=strict, graph_support=support)(), LIMITS)
    check_builder(broken(build=strict, graph_support=GraphSupport.UNIFORM)(), LIMITS, query_lens=(1,))


def test_metadata_of_any_shape_is_walked() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        rows: np.ndarray[Any, Any]
        pair: tuple[torch.Tensor, int]

    def build(self: Any, common: Any, group: int, phase: Any = None) -> Any:
        stale = self.__dict__.setdefault("host", np.zeros(7, np.int32))
        stale[: common.num_actual_reqs] = common.seq_len_bound.upper[: common.num_actual_reqs]
        return [Inner(stale[: common.num_reqs], (self.newest(common), 3))]

    kind = broken(build=build, signature=lambda self, meta: Signature())
    with pytest.raises(ConformanceError, match=r"\[A\] 0.rows depends on larger batches built before"):
        check_builder(kind(), LIMITS)


def test_a_builder_that_cannot_be_copied_is_made_anew() -> None:
    def refuse(self: Any, memo: Any) -> Any:
        raise TypeError("holds a handle")

    kind = broken(__deepcopy__=refuse)
    with pytest.raises(TypeError, match="holds a handle"):
        check_builder(kind(), LIMITS)
    check_builder(kind(), LIMITS, fresh=kind)


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="group: 1 is not one of the 1 groups"):
        check_builder(Rows(), LIMITS, group=1)


# -- backends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in backend_names()] + [(name, torch.bfloat16) for name in ("torch", "native")],
)
def test_T_A4_shipped_backends_conform(name: str, dtype: torch.dtype) -> None:
    report = check_backend(backend_on(name, "cpu"), dtype=dtype, block_sizes=(5,), head_dims=(24,))
    assert report.num_cases == 32


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [(name, kv_dtype) for name in ("reference", "torch", "native") for kv_dtype in (FP8, torch.bfloat16)]
    + [("reference", torch.float16), ("torch", torch.float16)],
)
def test_shipped_backends_conform_with_caches_of_another_dtype(
    name: str, kv_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    report = check_backend(backend_on(name, "cpu"), dtype=dtype, kv_dtype=kv_dtype, block_sizes=(5,), head_dims=(24,))
    assert report.num_cases == 32


@pytest.mark.parametrize("change", ["saturates", "scales"])
def test_a_wrong_write_to_an_fp8_cache_is_found(change: str) -> None:
    def write(k: Any, v: Any, *cache: Any, kv_scales: Any) -> None:
        factors = {"saturates": (1e3, 1.0), "scales": (1.0, 1.3)}[change]
        ops.write_kv(k * factors[0], v, *cache, kv_scales * factors[1])

    backend = backend_on("torch", "cpu")
    backend.write = write
    with pytest.raises(ConformanceError) as caught:
        check_backend(backend, kv_dtype=FP8, heads=((6, 2),), head_dims=(16,), block_sizes=(5,))
    assert "W" in caught.value.letters


@pytest.mark.parametrize(
    ("name", "reason"), [("flashinfer", "float8"), ("torch_varlen", "float8"), ("native", "float16")]
)
def test_a_backend_refuses_caches_that_it_has_no_kernel_for(name: str, reason: str) -> None:
    kv_dtype = getattr(torch, "float8_e4m3fn" if reason == "float8" else reason)
    refused = unsupported_reason(name, LayerConfig(64, torch.bfloat16, torch.device("cpu"), kv_dtype=kv_dtype))
    assert refused == f"it has no KV cache in {kv_dtype} for queries in torch.bfloat16"


@pytest.mark.parametrize("name", ["flashinfer", "torch_varlen"])
def test_a_backend_without_sinks_refuses_them_before_anything_else(name: str) -> None:
    config = LayerConfig(0, torch.int8, torch.device("cpu"), sinks=True)
    assert _load(name).unsupported_reason(config) == "attention sinks are not supported"
    assert unsupported_reason(name, config) == "attention sinks are not supported"


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (16, 64, 80, 128, 256)
LAYOUTS = (((4, 4), 16), ((6, 2), 32), ((4, 4), 32), ((6, 2), 16))
"""Heads and block size. Tests use them in turn, because compiling a kernel takes seconds."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "layout"),
    [
        (dtype, head_dim, LAYOUTS[(i + j) % len(LAYOUTS)])
        for i, dtype in enumerate(DTYPES)
        for j, head_dim in enumerate(HEAD_DIMS)
    ],
)
@pytest.mark.parametrize("name", backend_names())
def test_T_A4_gpu_shipped_backends_conform(
    name: str, dtype: torch.dtype, head_dim: int, layout: tuple[tuple[int, int], int]
) -> None:
    backend, (heads, block_size) = backend_on(name, "cuda"), layout
    reason = backend.unsupported_reason(LayerConfig(head_dim, dtype, torch.device("cuda")))
    if reason is not None:
        pytest.skip(reason)
    options = {"heads": (heads,), "head_dims": (head_dim,), "block_sizes": (block_size,)}
    assert check_backend(backend, device="cuda", dtype=dtype, **options).num_cases


class Wrong:
    """The torch backend with one defect."""

    def __init__(self, **changes: Any) -> None:
        self.inner: Any = get_backend("torch", device="cpu", dtype=torch.float32, head_dim=16)
        self.changes = changes

    def __getattr__(self, name: str) -> Any:
        return self.changes.get(name) or getattr(self.inner, name)

    def attend(self, q: Any, k: Any, v: Any, kv: Any, meta: Any, scale: float, window: Any = None, **sinks: Any) -> Any:
        changed = {name: value(meta, q) for name, value in self.changes.items() if hasattr(meta, name)}
        scale *= self.changes.get("scale", 1)
        window = window and window + self.changes.get("window", 0)
        sinks = {name: sink + self.changes.get(name, 0) for name, sink in sinks.items()}
        out = self.inner.attend(q, k, v, kv, dataclasses.replace(meta, **changed), scale, window, **sinks)
        out = out + self.changes.get("padding", 0) * torch.isnan(q[:, :, :1])
        real = int(meta.query_start_loc[-1])
        out[:real] += self.changes.get("leak", 0) * q[real:].nan_to_num(nan=0).mean()
        return out


def _all_visible(meta: Any, q: Any) -> Any:
    """Every row reads one key too many."""
    return meta.seq_lens + 1


@pytest.mark.parametrize(
    ("letter", "changes"),
    [
        ("N", {"scale": 1.01}),
        ("N", {"window": 1}),
        ("N", {"sinks": 0.01}),
        ("N", {"seq_lens": _all_visible}),
        ("W", {"slot_mapping": lambda meta, q: meta.slot_mapping.clamp(min=0)}),
        ("W", {"slot_mapping": lambda meta, q: (meta.slot_mapping - 1).clamp(min=-1)}),
        ("A", {"padding": 1.0}),
    ],
)
def test_a_wrong_backend_is_found(letter: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_backend(Wrong(**changes), heads=((6, 2),), head_dims=(16,), block_sizes=(5,))
    assert letter in caught.value.letters, caught.value


def test_T_A4_what_only_some_garbage_changes_is_found() -> None:
    """NaN is not the only garbage: a kernel that drops NaN still leaks the rest."""
    with pytest.raises(ConformanceError, match=r"\[A\] real rows depend on memory that must not be read") as caught:
        check_backend(Wrong(leak=1.0), heads=((6, 2),), head_dims=(16,), block_sizes=(5,))
    assert caught.value.letters == ("A",)


def test_letters_may_be_names_of_checks() -> None:
    error = ConformanceError("it", [Violation(name, "") for name in ("schedule", "declaration", "schedule")])
    assert error.letters == ("declaration", "schedule")


@pytest.mark.parametrize("defect", [None, "epsilon", "weight", "sine"])
def test_a_wrong_fused_norm_or_rotation_is_found(defect: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch form of the operators that fuse both, with a defect in their shared functions."""
    norm, rotary = _torch_ops.rms_norm, _torch_ops.apply_rotary
    changed: dict[str, dict[str, Any]] = {
        "epsilon": {"rms_norm": lambda x, weight, eps, whole: norm(x, weight, 100 * eps, whole)},
        "weight": {"rms_norm": lambda x, weight, eps, whole: norm(x, 1.01 * weight, eps, whole)},
        "sine": {"apply_rotary": lambda x, cos, sin: rotary(x, cos, -sin)},
    }
    for name, function in changed.get(defect or "", {}).items():
        for module in (_torch_ops, backend_checks):  # in both, as if the checks called it too
            monkeypatch.setattr(module, name, function, raising=module is _torch_ops)
    backend = TritonBackend()
    monkeypatch.setattr(backend, "unsupported_reason", lambda config: None)  # on a CPU it runs in torch
    options: Any = {"heads": ((6, 2),), "head_dims": (16,), "block_sizes": (5,)}
    if defect is None:
        assert check_backend(backend, **options).num_cases
        return
    with pytest.raises(ConformanceError) as caught:
        check_backend(backend, **options)
    assert {"N", "W"} & set(caught.value.letters), caught.value


def test_a_backend_that_supports_nothing_is_refused() -> None:
    refusing = Wrong(unsupported_reason=lambda *_: "tired")
    with pytest.raises(ValueError, match=r"supports none of the configurations; head_dim 16, .* tired"):
        check_backend(refusing)
