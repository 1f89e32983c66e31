"""The shipped draft head: its training network, its loss, its files, and its acceptance rate."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, Role, gumbel
from bateleur.runner import LLM

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "packages/runner/src/bateleur/runner/assets/draft"
PROMPTS = ("import os\n", "def main():\n", "class Stack:\n", "def test_", "if __name__ ==", "import sys\n\n\ndef ")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def small(tools: None) -> Any:
    from shipped_draft.network import Head, HeadShape

    shape = HeadShape(
        draft_vocab_size=40,
        intermediate_size=24,
        vocab_size=64,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    head = Head(shape)
    head.begin_from(torch.randn(40, 16), torch.rand(16) + 0.5, seed=0)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.3 * torch.randn(p.shape) if p.ndim == 1 else 0)
    return head


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rope(x: Tensor, position: int) -> Tensor:
    """Llama's rotary embedding of one (heads, P) row, pair by pair."""
    out, half = x.clone(), x.shape[-1] // 2
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        c, s = np.cos(angle), np.sin(angle)
        out[:, i], out[:, half + i] = x[:, i] * c - x[:, half + i] * s, x[:, half + i] * c + x[:, i] * s
    return out


def one_row(w: dict[str, Tensor], head_dim: int, embedded: Tensor, hidden: Tensor, cache: list[Any]) -> Tensor:
    """The head's forward pass for one token with a KV cache, computed from the tensors of a checkpoint."""
    x = torch.cat(
        [norm(embedded, w["midlayer.input_layernorm.weight"]), norm(hidden, w["midlayer.hidden_norm.weight"])]
    )
    q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ x).view(-1, head_dim) for n in "qkv")
    position = len(cache)
    cache.append((rope(k, position), v))
    q = rope(q, position)
    heads = []
    for h in range(len(q)):
        of = h * len(k) // len(q)
        weight = torch.stack([q[h] @ key[of] for key, _ in cache]).div(head_dim**0.5).softmax(0)
        heads.append(sum(a * value[of] for a, (_, value) in zip(weight, cache, strict=True)))
    h = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
    y = norm(h, w["midlayer.post_attention_layernorm.weight"])
    gate, up, down = (w[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return h + down @ (F.silu(gate @ y) * (up @ y))


def chain(w: dict[str, Tensor], head_dim: int, embedded: Tensor, taps: Tensor, tokens: list[Tensor]) -> list[Tensor]:
    """States of the draft chain after rows 0 .. n-2 of a text of n tokens. `tokens` are the input embeddings."""
    cache: list[Any] = []
    for i in range(len(embedded) - 1):
        hidden = one_row(w, head_dim, embedded[i + 1], w["fc.weight"] @ taps[i].flatten(), cache)
    states = [hidden]
    for token in tokens:
        states.append(one_row(w, head_dim, token, states[-1], cache))
    return states


def test_unrolled_chains_are_decoding_row_by_row(small: Any) -> None:
    torch.manual_seed(1)
    embedded, taps = torch.randn(2, 10, 16), torch.randn(2, 10, 3, 16)
    begin = torch.tensor([3, 1])
    states = small.unroll(embedded, taps, begin, chains=3, steps=4)
    for b in range(2):
        for m in range(3):
            end = int(begin[b]) + m + 2
            fed = [embedded[b, end + j] for j in range(3)]
            want = chain(dict(small.state_dict()), 8, embedded[b, :end], taps[b, :end], fed)
            for j in range(4):
                torch.testing.assert_close(states[j][b, m], want[j], rtol=1e-4, atol=1e-4)
    want_logits = norm(states[2], small.norm.weight) @ small.lm_head.weight.T
    torch.testing.assert_close(small.logits(states[2]), want_logits, rtol=1e-4, atol=1e-4)


def test_the_loss_and_its_gradient_are_those_of_the_plain_formula(tools: None) -> None:
    from shipped_draft.loss import acceptance_loss, feature_loss, logit_metric

    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    law = torch.randn(2, 9, 50).softmax(-1)[..., :40]
    log_q = (hidden @ weight.T / 0.8).log_softmax(-1)
    accepted = torch.minimum(law, log_q.exp()).sum(-1).mean()
    share = torch.exp(-3 * accepted.detach())
    want = share * -(law * log_q).sum(-1).mean() + (1 - share) * (1 - accepted)
    loss, acceptance = acceptance_loss(hidden, weight, law, 0.8)
    torch.testing.assert_close(loss, want, rtol=0.02, atol=0.0)
    torch.testing.assert_close(acceptance, accepted, rtol=0.02, atol=0.0)
    for got, expected in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.03 * expected.abs().max().item())
    count, matrix, a, b = torch.rand(50), torch.randn(50, 16), torch.randn(3, 16), torch.randn(3, 16)
    logits = (a - b) @ matrix.T
    mean = (logits * count).sum(-1, keepdim=True) / count.sum()
    variance = ((logits - mean).square() * count).sum(-1) / count.sum()
    torch.testing.assert_close(feature_loss(a, b, logit_metric(matrix, count)), variance.mean())


@pytest.fixture
def lesson(small: Any) -> Any:
    """A target with a few thousand weights, and random text instead of its own."""
    from train_draft import Lesson

    from shipped_draft.data import Text
    from shipped_draft.loss import logit_metric
    from shipped_draft.target import Target
    from shipped_model.network import Network, Shape

    shape = Shape(
        vocab_size=64,
        hidden_size=16,
        pattern="M*-",
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        mamba_num_heads=2,
        mamba_head_dim=8,
        ssm_state_size=8,
    )
    net = Network(shape, 0)
    net.model.embeddings.weight.data *= 20
    target = Target(net, (1, 2, 3))
    rng = np.random.default_rng(0)
    start = np.concatenate([[0], np.cumsum(rng.integers(30, 60, 12))])
    ids = rng.integers(0, 64, start[-1]).astype(np.uint16)
    text = Text(ids, start, np.full(12, 5), np.zeros(12, np.float32), np.arange(12))
    taps = np.concatenate([_taps(target, text.sequence(i)) for i in range(12)])
    return Lesson(target, text, taps, torch.arange(40), logit_metric(target.embedding, torch.ones(64)))


def _taps(target: Any, ids: np.ndarray) -> np.ndarray:
    from shipped_draft.data import pad

    taps: np.ndarray = target.taps_of(pad([ids], multiple=64))[0, : len(ids)].numpy()
    return taps


def test_training_lowers_the_loss_and_a_resumed_run_ends_like_an_unbroken_one(
    small: Any, lesson: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import train_draft
    from train_model import learning_rate

    from shipped_draft.network import Head

    losses: list[tuple[bool, float]] = []
    plain = train_draft.loss_of

    def loss_of(*args: Any, warm: bool) -> Any:
        loss, shown = plain(*args, warm=warm)
        losses.append((warm, loss.item()))
        return loss, shown

    monkeypatch.setattr(train_draft, "loss_of", loss_of)
    settings = {"warm_steps": 12, "batch": 4, "chains": 8, "unroll": 3, "lr": 0.05, "seed": 0, "save_every": 6}

    def run(head: Any, folder: str, steps: int) -> dict[str, Tensor]:
        (tmp_path / folder).mkdir(exist_ok=True)
        train_draft.train(head, lesson, argparse.Namespace(**settings, steps=steps, work=tmp_path / folder))
        return {name: p.clone() for name, p in head.state_dict().items()}

    first = {name: p.clone() for name, p in small.state_dict().items()}
    whole = run(small, "whole", 24)
    for warm in (True, False):
        values = [loss for was_warm, loss in losses if was_warm == warm]
        assert np.mean(values[-4:]) < np.mean(values[:4]), warm

    broken = Head(small.s)
    broken.load_state_dict(first)
    monkeypatch.setattr(train_draft, "learning_rate", lambda step, _, peak: learning_rate(step, 24, peak))
    run(broken, "broken", 18)
    resumed = run(Head(small.s), "broken", 24)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_text_and_state_of_another_run_are_refused(tools: None, tmp_path: Path) -> None:
    """A finished training state of another seed was once taken for this run's, so that nothing was trained."""
    from train_draft import require_own

    def run(**arguments: Any) -> argparse.Namespace:
        known = {"seed": 3, "begin": None, "threads": 2, "work": tmp_path / "new", "out": tmp_path}
        return argparse.Namespace(**(known | arguments))

    require_own(tmp_path / "new", run())
    require_own(tmp_path / "new", run(threads=1))
    for other in ({"seed": 4}, {"begin": tmp_path}):
        with pytest.raises(ValueError, match="must be new or of this run, and is of one with"):
            require_own(tmp_path / "new", run(**other))
    (tmp_path / "old").mkdir()
    (tmp_path / "old/state.pt").touch()
    with pytest.raises(ValueError, match="--work"):
        require_own(tmp_path / "old", run())


def test_a_head_is_trained_on_from_one_that_is_there(tools: None, small: Any, tmp_path: Path) -> None:
    from train_draft import first_head

    from shipped_draft.checkpoint import round_weights, save_head, write_card

    ids = torch.arange(40) + 20
    round_weights(small)
    save_head(small, ids, (1, 2, 3), tmp_path)
    record = json.loads((SHIPPED / "training.json").read_text())
    record |= {"begun_from": None, "steps": 1000, "seconds": 600}
    (tmp_path / "training.json").write_text(json.dumps(record))
    head, target_ids, before = first_head(Any, torch.ones(64), argparse.Namespace(begin=tmp_path))
    assert torch.equal(target_ids, ids)
    assert before == record
    for name, tensor in small.state_dict().items():
        assert torch.equal(tensor, head.state_dict()[name]), name
    write_card(tmp_path, record)
    assert "begun from" not in (tmp_path / "README.md").read_text()
    write_card(tmp_path, {**record, "begun_from": {**record, "begun_from": record}})
    assert "learnt for 2,000 steps and 20 minutes, in 2 run(s)" in (tmp_path / "README.md").read_text()


def test_the_shipped_files_have_the_layout() -> None:
    tensors = load_file(SHIPPED / "model.safetensors")
    config = json.loads((SHIPPED / "config.json").read_text())
    target = json.loads((SHIPPED.parent / "model/config.json").read_text())
    assert (SHIPPED / "model.safetensors").stat().st_size <= 8_000_000
    assert (SHIPPED / "README.md").read_text().startswith("---\nlicense: psf-2.0\n")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["vocab_size"] == target["vocab_size"]
    assert config["hidden_size"] == config["target_hidden_size"] == target["hidden_size"]
    boundaries = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert len(boundaries) == 3
    assert max(boundaries) <= len(target["layers_block_type"])
    d, m, v = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (d,),
        "hidden_norm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (q, 2 * d),
        "self_attn.k_proj": (kv, 2 * d),
        "self_attn.v_proj": (kv, 2 * d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (m, d),
        "mlp.up_proj": (m, d),
        "mlp.down_proj": (d, m),
    }
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (d, 3 * d), "norm.weight": (d,), "lm_head.weight": (v, d)}
    assert {name: tuple(t.shape) for name, t in tensors.items() if name not in ("d2t", "t2d")} == shapes
    assert all(tensors[name].dtype == torch.bfloat16 for name in shapes)
    ids = tensors["d2t"] + torch.arange(v)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    record = json.loads((SHIPPED / "training.json").read_text())
    assert record["held_out"]["0"]["tokens_per_step"] >= 2.5
    assert record["held_out"]["0.8"]["tokens_per_step"] >= 2.0


@pytest.fixture
def opened(llm: LLM, tools: None) -> Any:
    """(head, target, text of the target, target ids) of the shipped models."""
    from bateleur.runner.assets import shipped_model
    from shipped_draft.checkpoint import open_head
    from shipped_draft.data import write
    from shipped_draft.target import load_target

    head, target_ids = open_head(SHIPPED)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(2)]
    return head, load_target(shipped_model()), write(llm, prompts, first_seed=5, new_tokens=48), target_ids


def test_the_shipped_head_is_worth_it(opened: Any) -> None:
    from shipped_draft.measure import measure

    head, target, text, target_ids = opened
    measured = measure(head, target, text, target_ids, k=4)
    assert measured["0"].tokens_per_step >= 2.0
    assert measured["0.8"].tokens_per_step >= 1.6


def test_measured_acceptance_is_that_of_chains_fed_with_their_own_drafts(opened: Any) -> None:
    from shipped_draft.measure import accepted_drafts

    head, target, text, target_ids = opened
    w = {name: p.detach() for name, p in head.state_dict().items()}
    for index in (0, 1):
        ids, prompt_len, heat = (text.sequence(index), int(text.prompt_len[index]), float(text.temperature[index]))
        vocab, seed = HashedVocab.of(target_ids, torch.device("cpu")), int(text.seed[index])
        got = accepted_drafts(head, target, ids, prompt_len, 4, heat, seed, vocab, target_ids)
        taps = torch.from_numpy(_taps(target, ids)).float()
        for place in range(0, 12, 3):
            end = prompt_len + place + 1
            drafts = [int(i) for i in ids[:end]]
            for step in range(4):
                fed = [target.embedding[i] for i in drafts[end:]]
                state = chain(w, head.s.head_dim, target.embedding[drafts[:end]], taps[:end], fed)[-1]
                logits = norm(state, w["norm.weight"]) @ w["lm_head.weight"].T
                if heat:
                    keys = Keys(torch.tensor([seed]), torch.tensor([end + step]))
                    logits = logits / heat + gumbel(keys, Role.TARGET, vocab)[0]
                drafts.append(int(target_ids[logits.argmax()]))
            equal = np.array(drafts[end:]) == ids[end : end + 4]
            assert got[place] == np.cumprod(equal).sum(), (index, place)
