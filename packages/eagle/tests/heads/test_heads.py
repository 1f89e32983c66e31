"""Each head against its formula, written out one token, one head and one lane at a time in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bateleur.eagle.heads import DenseAttend, Head, HeadSpec
from bateleur.eagle.heads.layers import RMSNorm
from bateleur.eagle.heads.weights import Weights

Tensors = dict[str, Tensor]
NUM = 7


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * weight / ((x * x).sum() / x.numel() + eps).sqrt()


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Lane i and lane i + half are the parts of a complex number."""
    half = x.numel() // 2
    angles = [position * theta ** (-i / half) for i in range(half)]
    turned = torch.complex(x[:half], x[half:]) * torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles])
    return torch.cat((turned.real, turned.imag))


class Naive:
    """One sequence, token by token; keys and values of a layer are lists."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], theta: float = 500.0) -> None:
        self.w = tensors
        self.config = {**config, **config.get("eagle_config", {})}
        self.theta = theta
        self.cache: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))

    def attention(self, name: str, x: Tensor, position: int) -> Tensor:
        heads, size = self.config["num_attention_heads"], self.config["head_dim"]
        group = heads // self.config["num_key_value_heads"]
        q, k, v = (self.linear(f"{name}.{shard}_proj", x).view(-1, size) for shard in "qkv")
        if f"{name}.q_norm.weight" in self.w:
            q = torch.stack([norm(head, self.w[f"{name}.q_norm.weight"]) for head in q])
            k = torch.stack([norm(head, self.w[f"{name}.k_norm.weight"]) for head in k])
        q = torch.stack([turn(head, position, self.theta) for head in q])
        k = torch.stack([turn(head, position, self.theta) for head in k])
        past = self.cache.setdefault(name, [])
        past.append((k, v))
        outputs = []
        for i in range(heads):
            weights = torch.stack([(q[i] * k[i // group]).sum() / math.sqrt(size) for k, _ in past]).exp()
            values = torch.stack([v[i // group] for _, v in past])
            outputs.append((weights[:, None] * values).sum(0) / weights.sum())
        return self.linear(f"{name}.o_proj", torch.cat(outputs))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + (-gate).exp()) * up)

    def branch_mlp(self, name: str, h: Tensor) -> Tensor:
        return h + self.mlp(f"{name}.mlp", norm(h, self.w[f"{name}.post_attention_layernorm.weight"]))

    def llama_layer(self, name: str, h: Tensor, position: int) -> Tensor:
        x = norm(h, self.w[f"{name}.input_layernorm.weight"])
        return self.branch_mlp(name, h + self.attention(f"{name}.self_attn", x, position))

    def fuse(self, taps: list[Tensor]) -> Tensor:
        if self.config.get("fc_norm"):
            taps = [norm(tap, self.w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
        wide = torch.cat(taps)
        if self.config.get("norm_before_fc"):
            wide = norm(wide, self.w["input_norm.weight"])
        return self.linear("fc", wide)

    def eagle3(self, token: Tensor, g: Tensor, position: int) -> tuple[Tensor, Tensor]:
        name, normed = "midlayer", norm(g, self.w["midlayer.hidden_norm.weight"])
        x = torch.cat((norm(token, self.w[f"{name}.input_layernorm.weight"]), normed))
        start = normed if self.config.get("norm_before_residual") else g
        h = self.branch_mlp(name, start + self.attention(f"{name}.self_attn", x, position))
        for i in range(1, self.config["num_hidden_layers"]):
            h = self.llama_layer(f"layers.{i}", h, position)
        out = norm(h, self.w["norm.weight"])
        return out, out if self.config.get("norm_output") else h

    def eagle1(self, token: Tensor, f: Tensor, position: int) -> tuple[Tensor, Tensor]:
        h = self.linear("fc", torch.cat((token, f)))
        h = self.branch_mlp("layers.0", h + self.attention("layers.0.self_attn", h, position))
        for i in range(1, self.config["num_hidden_layers"]):
            h = self.llama_layer(f"layers.{i}", h, position)
        return h, h


def run(head: Head, features: list[Tensor], ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return head.forward(ids, head.fuse(features), positions, DenseAttend(head.spec))


def close(found: Tensor, expected: Tensor) -> None:
    # Angles are float32 in every dtype.
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def vary(lab: Any, name: str) -> tuple[dict[str, Any], Tensors]:
    """The EAGLE-3 head of `lab.eagle3()`, one switch thrown."""
    taps = {"two taps": (3, 7), "five taps": (0, 9, 4, 1, 10)}.get(name, (2, 5, 10))
    config, w = lab.eagle3(taps)
    size = lab.H
    match name:
        case "norm_before_residual" | "norm_output":
            config[name] = True
        case "norm_before_fc":
            config["eagle_config"][name] = True
            w["input_norm.weight"] = 1 + lab.random(3 * lab.Ht)
        case "fc_norm":
            config[name] = True
            w |= {f"fc_norm.{i}.weight": 1 + lab.random(lab.Ht) for i in range(3)}
        case "qk_norm":
            w |= {f"midlayer.self_attn.{x}_norm.weight": 1 + lab.random(lab.D) for x in "qk"}
        case "biases":
            config |= {"attention_bias": True, "mlp_bias": True}
            rows = {"self_attn.q": lab.HEADS * lab.D, "self_attn.k": lab.KV_HEADS * lab.D}
            rows |= {"self_attn.v": lab.KV_HEADS * lab.D, "self_attn.o": size}
            rows |= {"mlp.gate": lab.F, "mlp.up": lab.F, "mlp.down": size}
            w |= {f"midlayer.{shard}_proj.bias": lab.random(n) for shard, n in rows.items()}
            w["fc.bias"] = lab.random(size)
        case "two layers":
            config["num_hidden_layers"] = 2
            w |= lab.layer("layers.1", size) | {"layers.1.input_layernorm.weight": 1 + lab.random(size)}
        case "rope_theta":
            config[name] = 40.0
    return config, w


EAGLE3 = [
    "plain",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
    "two taps",
    "five taps",
    "qk_norm",
    "biases",
    "two layers",
    "rope_theta",
]


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_is_its_formula(checkpoints: Any, name: str) -> None:
    lab = checkpoints
    config, w = vary(lab, name)
    head, _ = lab.load(config, w)
    taps = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert head.spec.needs.taps == tuple(taps)
    features = [lab.random(NUM, lab.Ht) for _ in taps]
    ids, positions = torch.randint(0, lab.V, (NUM,)), torch.arange(NUM) + 4
    out, recycled = run(head, features, ids, positions)

    naive = Naive(w, config, config["rope_theta"])
    for t in range(NUM):
        g = naive.fuse([tap[t] for tap in features])
        expected = naive.eagle3(lab.target.embedding[ids[t]], g, int(positions[t]))
        close(out[t], expected[0])
        close(recycled[t], expected[1])
    logits = head.logits(out)
    assert logits.dtype == torch.float32
    close(logits.double(), out @ w["lm_head.weight"].T)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"])
def test_each_switch_of_3_1_changes_the_result(checkpoints: Any, name: str) -> None:
    """Same weights, one switch: what the switch is about changes, and nothing else."""
    lab = checkpoints
    config, w = vary(lab, name)
    on, _ = lab.load(config, w)
    config.pop(name, None)
    config["eagle_config"].pop(name, None)
    off, _ = lab.load(config, {k: v for k, v in w.items() if "fc_norm" not in k and k != "input_norm.weight"})
    features = [lab.random(NUM, lab.Ht) for _ in range(3)]
    ids, positions = torch.arange(NUM), torch.arange(NUM)
    fused = not torch.equal(on.fuse(features), off.fuse(features))
    assert fused == (name in ("fc_norm", "norm_before_fc"))
    (out, recycled), (plain_out, plain_recycled) = (run(h, features, ids, positions) for h in (on, off))
    assert torch.equal(out, plain_out) == (name == "norm_output")
    assert not torch.allclose(recycled, plain_recycled, atol=1e-2)


def test_fc_norm_and_norm_before_fc_norm_different_things(checkpoints: Any) -> None:
    """With unit weights, scaling one tap leaves `fc_norm` unmoved and moves `norm_before_fc`."""
    lab = checkpoints
    moved = {}
    for name in ("fc_norm", "norm_before_fc"):
        config, w = vary(lab, name)
        w = {k: torch.ones_like(v) if "fc_norm" in k or k == "input_norm.weight" else v for k, v in w.items()}
        head, _ = lab.load(config, w)
        taps = [lab.random(3, lab.Ht) + 1 for _ in range(3)]
        moved[name] = (head.fuse(taps) - head.fuse([taps[0] * 50, *taps[1:]])).abs().max()
    assert moved["fc_norm"] < 1e-3 < 0.05 < moved["norm_before_fc"]


def test_eagle3_fed_the_final_hidden_state(checkpoints: Any) -> None:
    lab = checkpoints
    config, w = lab.eagle3()
    config["eagle_config"] = {"use_aux_hidden_state": False}
    head, report = lab.load(config, {k: v for k, v in w.items() if k != "fc.weight"})
    assert head.spec.needs.hidden
    assert not head.spec.needs.taps
    assert report.notes == ("fed the final hidden state",)
    f = lab.random(NUM, lab.H)
    assert torch.equal(head.fuse([f]), f)


@pytest.mark.parametrize(("layers", "bias"), [(1, False), (1, True), (2, False)])
def test_eagle1_is_its_formula(checkpoints: Any, layers: int, bias: bool) -> None:
    lab = checkpoints
    config, w = lab.eagle1(layers)
    if bias:
        w["fc.bias"] = lab.random(lab.H)
    head, _ = lab.load(config, w)
    assert head.spec.needs.hidden
    assert head.target_ids is None
    f, ids, positions = lab.random(NUM, lab.H), torch.randint(0, lab.V, (NUM,)), torch.arange(NUM) + 3
    out, recycled = run(head, [f], ids, positions)
    assert recycled is out
    naive = Naive(w, config)
    for t in range(NUM):
        expected, _ = naive.eagle1(lab.target.embedding[ids[t]], f[t], int(positions[t]))
        close(out[t], expected)
    close(head.logits(out).double(), out @ lab.target.lm_head.T)


@pytest.mark.parametrize("output", [False, True])
def test_d2_what_is_recycled(checkpoints: Any, output: bool) -> None:
    """A chain of three drafts equals the formula run on over its own results; the other hidden state does not."""
    lab = checkpoints
    config, w = lab.eagle3()
    config["norm_output"] = output
    head, _ = lab.load(config, w)
    assert head.spec.recycle == ("post_norm" if output else "pre_norm")
    taps, ids = [lab.random(4, lab.Ht) for _ in range(3)], torch.tensor([3, 9, 1, 30])
    attend = DenseAttend(head.spec)
    out, fed = head.forward(ids, head.fuse(taps), torch.arange(4), attend)
    naive = Naive(w, config)
    for t in range(4):
        expected = naive.eagle3(lab.target.embedding[ids[t]], naive.fuse([tap[t] for tap in taps]), t)
    for step in range(3):
        draft = int(head.target_ids[head.logits(out[-1:]).argmax()])  # type: ignore[index]
        wrong = out if not output else out * 2
        if step == 0:
            other, _ = head.forward(torch.tensor([draft]), wrong[-1:], torch.tensor([4]), attend)
            attend.truncate(4)
        out, fed = head.forward(torch.tensor([draft]), fed[-1:], torch.tensor([4 + step]), attend)
        expected = naive.eagle3(lab.target.embedding[draft], expected[1], 4 + step)
        close(out[0], expected[0])
        close(fed[0], expected[1])
        if step == 0:
            assert not torch.allclose(other[0], expected[0], atol=1e-3)


def test_d5_head_narrower_than_its_target(checkpoints: Any) -> None:
    """Taps are as wide as the target, everything behind `fc` as wide as the head, which has its own embedding."""
    lab = checkpoints
    target = lab.make_target(hidden=24)
    config, w = lab.eagle3()
    config["target_hidden_size"] = 24
    w["fc.weight"] = lab.random(lab.H, 72)
    w["embed_tokens.weight"] = lab.random(lab.V, lab.H)
    head, report = lab.load(config, w, target=target)
    assert report.shared == ()
    assert (head.spec.hidden_size, head.spec.target_hidden_size) == (lab.H, 24)
    taps, ids = [lab.random(NUM, 24) for _ in range(3)], torch.arange(NUM)
    out, _ = run(head, taps, ids, torch.arange(NUM))
    naive = Naive(w, config)
    for t in range(NUM):
        expected = naive.eagle3(w["embed_tokens.weight"][t], naive.fuse([tap[t] for tap in taps]), t)
        close(out[t], expected[0])


def test_d6_scaled_rotary_embedding(checkpoints: Any) -> None:
    lab = checkpoints
    config, w = lab.eagle3()

    def turns(**fields: Any) -> tuple[float, ...]:
        head, _ = lab.load({**config, **fields}, w)
        return head.spec.rope.inv_freq  # type: ignore[union-attr]

    plain = tuple(500.0 ** (-i / 3) for i in range(3))
    assert turns() == pytest.approx(plain)
    assert turns(rope_theta=None, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}) == turns()
    assert turns(rope_theta=None) == pytest.approx([10000.0 ** (-i / 3) for i in range(3)])
    assert turns(rope_scaling={"type": "linear", "factor": 4.0}) == pytest.approx([x / 4 for x in plain])
    assert turns(partial_rotary_factor=2 / 3) == pytest.approx([1.0, 500.0**-0.5])
    # Llama 3.1: periods in the trained context are 95, 12 and 1.5 here: kept, kept, and a sixth of the way from 1 to 4.
    scaled = turns(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 600,
        }
    )
    blend = (600 * plain[2] / (2 * math.pi) - 1) / 3
    assert 0 < blend < 1
    assert scaled == pytest.approx([*plain[:2], blend * plain[2] + (1 - blend) * plain[2] / 8])


def test_partial_rotary_leaves_the_other_lanes(checkpoints: Any) -> None:
    lab = checkpoints
    config, w = lab.eagle3()
    head, _ = lab.load({**config, "partial_rotary_factor": 2 / 3}, w)
    seen: list[Tensor] = []

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return q

    taps = [lab.random(1, lab.Ht) for _ in range(3)]
    for position in (0, 5):
        head.forward(torch.tensor([1]), head.fuse(taps), torch.tensor([position]), attend)
    assert torch.equal(seen[0][..., 4:], seen[1][..., 4:])
    assert not torch.isclose(seen[0][..., :4], seen[1][..., :4]).any()


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_tokens_of_rejected_rows_reach_nobody_before_them(checkpoints: Any, kind: str) -> None:
    """Any id, hidden state and position behind a row leaves it as it is, bit for bit; no position is out of range."""
    lab = checkpoints
    head, _ = lab.load(*getattr(lab, kind)())
    hidden, ids = lab.random(NUM, lab.H), torch.randint(0, lab.V, (NUM,))
    positions = torch.arange(NUM)
    out, fed = head.forward(ids, hidden, positions, DenseAttend(head.spec))
    hidden, ids, positions = hidden.clone(), ids.clone(), positions.clone()
    hidden[4:], ids[4:], positions[4:] = 1e4, 0, 10**7
    again, fed_again = head.forward(ids, hidden, positions, DenseAttend(head.spec))
    assert torch.equal(out[:4], again[:4])
    assert torch.equal(fed[:4], fed_again[:4])


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_pass_reads_nothing_back(checkpoints: Any, kind: str) -> None:
    """Tensors without contents suffice, so no step of it waits for a device, and all of it can be recorded."""
    lab = checkpoints
    head, _ = lab.load(*getattr(lab, kind)())
    with FakeTensorMode(allow_non_fake_inputs=True):
        features = [torch.empty(NUM, lab.H) for _ in range(max(1, len(head.spec.needs.taps)))]
        ids, positions = torch.zeros(NUM, dtype=torch.int32), torch.zeros(NUM, dtype=torch.int64)
        out, _ = head.forward(ids, head.fuse(features), positions, lambda _, q, k, v: q)
        assert head.logits(out[:2]).shape == (2, head.spec.draft_vocab_size)
        with pytest.raises(DataDependentOutputException):
            int(out[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_every_dtype_near_float64(checkpoints: Any, kind: str, dtype: torch.dtype) -> None:
    """The target's features and shared tensors may be of another dtype than the head."""
    lab = checkpoints
    config, w = getattr(lab, kind)()
    exact, _ = lab.load(config, w)
    head, _ = lab.load(config, w, dtype=dtype)
    features = [lab.random(NUM, lab.H) for _ in range(max(1, len(head.spec.needs.taps)))]
    ids, positions = torch.arange(NUM), torch.arange(NUM)
    out, recycled = run(head, features, ids, positions)
    assert out.dtype == recycled.dtype == dtype
    assert head.logits(out).dtype == torch.float32
    expected, _ = run(exact, features, ids, positions)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    scale = expected.abs().max()
    assert (out.double() - expected).abs().max() < tolerance * scale


def test_dense_attend_is_causal_windowed_and_forgets(checkpoints: Any) -> None:
    """Token by token equals all at once; a window hides what is behind it."""
    lab = checkpoints
    config, w = lab.eagle3()
    window = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"]}
    head, _ = lab.load({**config, **window}, w)
    assert head.spec.sliding_window == 3
    q, k, v = lab.random(NUM, 4, 6), lab.random(NUM, 2, 6), lab.random(NUM, 2, 6)
    whole = DenseAttend(head.spec)(0, q, k, v)
    attend = DenseAttend(head.spec)
    assert len(attend) == 0
    for t in range(NUM):
        attend(0, q[t : t + 1] * 2, k[t : t + 1] * 2, v[t : t + 1] * 2)
        attend.truncate(t)
        torch.testing.assert_close(attend(0, q[t : t + 1], k[t : t + 1], v[t : t + 1])[0], whole[t])
        first = max(0, t - 2)
        weights = (k[first : t + 1, 1] @ q[t, 3] / math.sqrt(6)).softmax(0)
        torch.testing.assert_close(whole[t, 3], weights @ v[first : t + 1, 1])
    assert len(attend) == NUM
    with pytest.raises(ValueError, match="length is 8; the cache holds 7 tokens"):
        attend.truncate(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; a head has at least one attention layer"),
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads = 4"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41; .* at most vocab_size = 40"),
        ({"head_dim": 4}, "rope turns 6 lanes; a head has head_dim = 4"),
    ],
)
def test_an_impossible_spec_is_refused(checkpoints: Any, fields: dict[str, Any], message: str) -> None:
    head, _ = checkpoints.load(*checkpoints.eagle3())
    values = {name: getattr(head.spec, name) for name in HeadSpec.__slots__}
    with pytest.raises(ValueError, match=message):
        HeadSpec(**{**values, **fields})


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("rows", [[3, 0], []])
def test_results_of_some_tokens_only(checkpoints: Any, kind: str, rows: list[int]) -> None:
    """They are those of a full pass, and keys and values of all tokens are stored."""
    lab = checkpoints
    head, _ = lab.load(*getattr(lab, kind)())
    hidden, ids, positions = lab.random(NUM, lab.H), torch.randint(0, lab.V, (NUM,)), torch.arange(NUM)
    attend, other = DenseAttend(head.spec), DenseAttend(head.spec)
    index = torch.tensor(rows, dtype=torch.int64)
    for full, some in zip(
        head.forward(ids, hidden, positions, attend), head.forward(ids, hidden, positions, other, index), strict=True
    ):
        close(some, full[index])
    assert len(other) == NUM
    more = ids[:1], hidden[:1], torch.tensor([NUM])
    close(head.forward(*more, other)[0], head.forward(*more, attend)[0])


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_table_of_positions_holds_the_same_angles(checkpoints: Any, kind: str) -> None:
    lab = checkpoints
    made = getattr(lab, kind)()
    (plain, _), (table, _) = lab.load(*made), lab.load(*made)
    table.reserve_positions(5000)
    hidden, ids = lab.random(3, lab.H), torch.tensor([1, 2, 0])
    positions = torch.tensor([4999, 0, 1234])
    outputs = [head.forward(ids, hidden, positions, DenseAttend(head.spec))[0] for head in (plain, table)]
    close(*outputs)
    with pytest.raises(IndexError):
        table.forward(ids, hidden, positions + 1, DenseAttend(table.spec))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_the_short_form_of_the_norm(scale: float) -> None:
    weight = torch.randn(48)
    norm = RMSNorm(Weights({"n.weight": weight}, dtype=torch.float32, device="cpu"), "n", 48, 1e-6)
    x = torch.randn(5, 48) * scale
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (48,), weight, 1e-6))
