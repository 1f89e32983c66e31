"""MTP heads in the files of their target: their formula, their behaviour in an engine, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bateleur.cudagraph import DispatchReason
from bateleur.eagle.heads import DenseAttend
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.checkpoint.open import load_model, open_checkpoint
from bateleur.runner.cli import main
from bateleur.runner.diagnose.checkpoint_facts import describe_checkpoint
from bateleur.runner.diagnose.explain_acceptance import explain
from bateleur.runner.diagnose.explanation import ALONE, ENGINE, ORACLE
from bateleur.runner.models import HybridDecoder
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.spec_decode.mtp_head import MtpHead

NUM = 7
NEMOTRON = {"num_nextn_predict_layers": 1}
QWEN: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention, mlp": ("nemotron_h", {"layers_block_type": ["full_attention", "mlp"]}, {}),
    "attention, experts": ("nemotron_h-experts", {"layers_block_type": ["full_attention", "moe"]}, {}),
    "experts, attention": ("nemotron_h-experts", {"layers_block_type": ["moe", "full_attention"]}, {}),
    "latent experts": (
        "nemotron_h-experts",
        {"layers_block_type": ["full_attention", "moe"]},
        {"moe_latent_size": 20, "mlp_bias": True},
    ),
    "twice": ("nemotron_h", {"layers_block_type": ["mlp", "full_attention"] * 2}, {}),
    "qwen3_5": ("qwen3_5_text", QWEN, {}),
    "qwen3_5 with experts": ("qwen3_5_moe_text", QWEN, {}),
    "qwen3_next": ("qwen3_next", QWEN | {"decoder_sparse_step": 1}, {}),
    "qwen3_5 with biases": ("qwen3_5_text", QWEN, {"attention_bias": True, "num_key_value_heads": 3}),
}
"""Family, the layers of the head, and what differs from the family's tiny configuration in head and target."""
Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def made(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """`made(name)`: a folder with that head, and transformers' model of its layers; not to be edited."""
    found: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in found:
            family, layers, more = HEADS[name]
            folder = tiny.save(tiny.make_model(family, **more), tmp_path_factory.mktemp("target"))
            body = tiny.add_mtp(folder, family, tmp_path_factory.mktemp("mtp") / "body", **layers, **more)
            if family.startswith("nemotron_h"):
                kinds = layers["layers_block_type"]
                tiny.edit_config(folder, mtp_layers_block_type=kinds, **NEMOTRON)
            elif name != "qwen3_next":  # whose files do not say
                tiny.edit_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
            found[name] = folder, body
        return found[name]

    return get


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[MtpHead, HybridDecoder]:
    checkpoint = open_checkpoint(folder)
    target = load_model(checkpoint, dtype, "cpu")
    head = DraftHead.open("mtp", target, checkpoint=checkpoint).head
    assert isinstance(head, MtpHead)
    head.reserve_positions(64)
    return head, target


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


class Facts:
    """The head by its formula: h = fc(cat(norm(embedding of the next token), norm(hidden state))), then layers."""

    def __init__(self, folder: Path, body: Any) -> None:
        tensors = load_file(folder / "model.safetensors")
        nemotron = "mtp.layers.0.eh_proj.weight" in tensors
        names = ["layers.0.eh_proj", "layers.0.enorm", "layers.0.hnorm"]
        names = names if nemotron else ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
        self.fc, *norms = (tensors[f"mtp.{name}.weight"] for name in names)
        self.norms = norms if nemotron else [1 + norm for norm in norms]
        self.eps = 1e-5 if nemotron else 1e-6
        (self.embedding,) = (
            t for name, t in tensors.items() if name.endswith(("embeddings.weight", "embed_tokens.weight"))
        )
        self.lm_head = tensors["lm_head.weight"]
        self.body = body

    def read(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """(T, M) input of the layers."""
        pair = self.embedding[ids], hidden
        normed = [
            x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight
            for x, weight in zip(pair, self.norms, strict=True)
        ]
        return torch.cat(normed, -1) @ self.fc.T

    def run(self, h: Tensor, first: int) -> Tensor:
        """(T, M) after the final norm, for positions from `first`."""
        positions = torch.arange(first, first + len(h))[None]
        with torch.no_grad():
            out = self.body.model(inputs_embeds=h[None], position_ids=positions, use_cache=False)
        return out.last_hidden_state[0]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_its_formula(made: Callable[[str], Made], name: str) -> None:
    """The first pass, and those of a chain, whose input is the output of the final norm."""
    folder, body = made(name)
    head, target = opened(folder)
    facts = Facts(folder, body)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM, target.spec.hidden_size, generator=generator)
    ids = torch.randint(0, target.spec.vocab_size, (NUM + 2,), generator=generator)
    attend, first = DenseAttend(head.spec), 5
    h = facts.read(ids[:NUM], hidden)
    out, fed = head.forward(ids[:NUM], head.fuse([hidden]), torch.arange(NUM) + first, attend)
    for i in range(2):
        wanted = facts.run(h, first)[-len(out) :]
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        assert fed is out
        logits = wanted @ facts.lm_head.T
        torch.testing.assert_close(head.logits(out), logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
        last, position = ids[NUM + i : NUM + i + 1], torch.tensor([first + NUM + i])
        h = torch.cat((h, facts.read(last, wanted[-1:])))
        out, fed = head.forward(last, fed[-1:], position, attend)


@pytest.mark.parametrize("name", ["experts, attention", "qwen3_5"])
def test_a_pass_has_no_memory_and_reads_nothing_back(made: Callable[[str], Made], name: str) -> None:
    """Later rows do not change a row; some rows equal those of all; tensors without contents suffice."""
    head, target = opened(made(name)[0])
    size = target.spec.hidden_size
    ids, hidden, positions = torch.arange(NUM) + 3, torch.randn(NUM, size), torch.arange(NUM)
    out, _ = head.forward(ids, hidden, positions, attend := DenseAttend(head.spec))
    other = hidden.clone()
    other[4:] = 1e4
    again, _ = head.forward(ids.where(positions < 4, 0), other, positions, DenseAttend(head.spec))
    torch.testing.assert_close(again[:4], out[:4])
    for rows in ([3, 0], []):
        index = torch.tensor(rows, dtype=torch.int64)
        some, fed = head.forward(ids, hidden, positions, stored := DenseAttend(head.spec), index)
        torch.testing.assert_close(some, out[index])
        assert len(fed) == len(rows)
        for layer, pair in attend.kv.items():
            torch.testing.assert_close(stored.kv[layer], pair)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = (torch.zeros(NUM, dtype=torch.int32), torch.empty(NUM, size), torch.zeros(NUM, dtype=torch.int64))
        out, _ = head.forward(*fake, lambda _, q, k, v: q)
        assert head.logits(out[:2]).shape == (2, target.spec.vocab_size)
        with pytest.raises(DataDependentOutputException):
            int(out[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_other_dtypes(made: Callable[[str], Made], dtype: torch.dtype) -> None:
    found = []
    for each in (torch.float32, dtype):
        head, target = opened(made("qwen3_5")[0], each)
        torch.manual_seed(0)
        hidden = torch.randn(NUM, target.spec.hidden_size).to(each)
        out, _ = head.forward(torch.arange(NUM), hidden, torch.arange(NUM), DenseAttend(head.spec))
        assert out.dtype == each
        found.append(out.float())
    assert (found[1] - found[0]).abs().max() < 0.1 * found[0].abs().max()


# --- in an engine -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(made: Callable[[str], Made], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`good(name)`: a target that roughly determines each next token, and a head that depends mostly on the token, so
    that many drafts are right and many are not.
    """
    found: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name in found:
            return found[name]
        folder = tmp_path_factory.mktemp("good")
        for file in made(name)[0].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        (embedding,) = (each for each in tensors if each.endswith(("embeddings.weight", "embed_tokens.weight")))
        for key, tensor in tensors.items():
            if re.search(r"(o_proj|out_proj|down_proj|fc2_latent_proj)\.weight$", key):
                tensor.mul_(0.15)
            elif key in ("mtp.fc.weight", "mtp.layers.0.eh_proj.weight"):
                size = len(tensor)
                tensor.mul_(0.1)[:, :size] += torch.eye(size)
        tensors["lm_head.weight"] = tensors[embedding].roll(1, 0) * 3
        tensors[embedding].mul_(6)
        save_file(tensors, folder / "model.safetensors")
        found[name] = folder
        return folder

    return get


PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i + 5 * j) % 90 for j in range(length)]} for i, length in enumerate((1, 9, 22, 14))
]
PARAMS = [
    SamplingParams(temperature=t, seed=i, max_tokens=16 + 3 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.7, 0.0, 1.0))
]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "block_size": 4,
}
DRAFTS: dict[str, Any] = {"draft": "mtp", "num_speculative_tokens": 3}
GRAPHS: dict[str, Any] = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_backend": "recorded",
    "cudagraph_capture_sizes": [4, 8, 12],
    "cudagraph_checks": "PARANOID",
    "max_num_batched_tokens": 17,
}


def said(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def plain(good: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    found: dict[str, list[list[int]]] = {}

    def get(name: str) -> list[list[int]]:
        if name not in found:
            settings = SETTINGS | {"max_num_seqs": 1, "mamba_state_policy": "slots"}
            found[name] = said(LLM(good(name), **settings))
        return found[name]

    return get


@pytest.mark.parametrize("name", ["attention, experts", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize(("policy", "mode"), [*product(("slots", "fold"), ("none", "align", "all"))])
def test_the_tokens_are_those_of_plain_decoding(
    good: Callable[[str], Path], plain: Callable[[str], list[list[int]]], name: str, policy: str, mode: str
) -> None:
    """In every cache mode, prompts in chunks; the second time with a prefix hit."""
    shared = {"enable_prefix_caching": True, "mamba_cache_mode": mode, "mamba_block_size": 8}
    options = SETTINGS | DRAFTS | {"mamba_state_policy": policy, "max_num_batched_tokens": 13}
    llm = LLM(good(name), **options | (shared if mode != "none" else {}))
    for _ in range(2):
        assert said(llm) == plain(name)
    stats = llm.get_metrics()
    assert (stats.num_cached_tokens > 0) == (mode != "none")
    tried, kept = stats.acceptance.tried, stats.acceptance.kept

    assert tried[0] > kept[0] > 0.2 * tried[0]
    assert kept[-1] > 0


@pytest.mark.parametrize("name", ["attention, experts", "qwen3_5"])
def test_on_graphs(good: Callable[[str], Path], plain: Callable[[str], list[list[int]]], name: str) -> None:
    llm = LLM(good(name), **SETTINGS | DRAFTS | GRAPHS)
    assert said(llm) == plain(name)
    assert llm.get_metrics().acceptance.kept[-1] > 0
    assert llm.engine.runner.graphs.decisions.by_reason[DispatchReason.DECODE] > 5
    assert llm.engine.verify_graphs(fuzz=1).ok


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_through_preemption(good: Callable[[str], Path], rule: str) -> None:
    """The head's keys are lost with its blocks, and recomputed with the target's."""
    options = SETTINGS | DRAFTS | {"enable_prefix_caching": True, "mamba_block_size": 8, "speculative_rule": rule}
    wanted = said(LLM(good("qwen3_5"), **options))
    llm = LLM(good("qwen3_5"), **options)
    names = [llm.add_request(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    texts, scheduler = dict[str, list[int]](), llm.engine.scheduler
    for step in range(100):
        texts |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
        if step % 4 == 3 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
    assert [texts[name] for name in names] == wanted
    assert llm.get_metrics().acceptance.kept[-1] > 0


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_under_other_rules_a_seed_decides(good: Callable[[str], Path], rule: str) -> None:
    options = SETTINGS | DRAFTS | {"speculative_rule": rule}
    together = said(LLM(good("qwen3_5"), **options))
    assert together == said(LLM(good("qwen3_5"), **options | {"max_num_seqs": 1, "max_num_batched_tokens": 9}))


def test_explained(good: Callable[[str], Path]) -> None:
    """The head drafts in the engine what it drafts alone, and other readings of its files are no better."""
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    options = {name: SETTINGS[name] for name in ("dtype", "block_size")}
    found = explain(good("qwen3_5"), "mtp", prompts=prompts, max_tokens=20, device="cpu", **options)
    assert found.kind == "mtp"
    alone, engine = found.run(ALONE), found.run(ENGINE)
    assert alone is not None
    assert engine is not None
    assert (alone.reached, alone.accepted) == (engine.reached, engine.accepted)
    assert sum(alone.accepted) > 10
    assert found.run(ORACLE) is not None
    assert [reading.name for reading in found.conventions] == [
        "as declared",
        "input: hidden state before the final norm",
        "next pass gets the hidden state before the final norm",
        "hidden state before embedding in the input",
    ]
    assert found.conventions[3].tokens_per_step < found.conventions[0].tokens_per_step
    assert "bookkeeping" not in found.causes


def test_from_the_shell(good: Callable[[str], Path], plain: Callable[[str], list[list[int]]], tmp_path: Path) -> None:
    lines = [
        {**prompt, **{name: getattr(params, name) for name in ("temperature", "seed", "max_tokens", "ignore_eos")}}
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--draft", "mtp", "--skip-tokenizer-init", "--device", "cpu", "--max-model-len", "64"]
    flags += ["--prompt-file", str(asked), "--output", str(answers), "--top-p", "1"]
    assert main(["generate", "--model", str(good("qwen3_5")), *flags]) == 0
    found = [json.loads(line)["token_ids"] for line in answers.read_text().splitlines()]
    assert found == plain("qwen3_5")


def test_what_it_costs(made: Callable[[str], Made]) -> None:
    folder, _ = made("qwen3_5")
    without, facts = describe_checkpoint(folder), describe_checkpoint(folder, draft="mtp")
    head, target = opened(folder)
    part = facts["parts"]["draft head"]
    assert part["parameters"] == sum(weight.numel() for weight in head.weights().values())
    assert part["layers"] == 1
    assert without["unused_tensors"] == sum(
        1 for name in load_file(folder / "model.safetensors") if name.startswith("mtp.")
    )
    assert facts["unused_tensors"] == 0
    assert facts["kv_bytes_per_token"] == without["kv_bytes_per_token"] * 3 // 2, "the target has two such layers"
    assert target.spec.attention[0].gated
    routed = describe_checkpoint(made("qwen3_5 with experts")[0], draft="mtp")["parts"]["draft head"]
    spared = 4 * 3 * 24 * 40 * 4  # matrices of the four experts, of seven, that a token does not take
    assert routed["active_bytes"] == routed["weight_bytes"] - spared


def test_inside_a_larger_model(
    good: Callable[[str], Path], plain: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    """The text model has its own prefix in such files, and the head has none."""
    text = json.loads((good("qwen3_5") / "config.json").read_text())
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(good("qwen3_5") / "model.safetensors")
    moved = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    save_file(moved | {"model.visual.patch_embed.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    llm = LLM(tmp_path, **SETTINGS | DRAFTS)
    assert said(llm) == plain("qwen3_5")
    assert llm.get_metrics().acceptance.kept[0] > 0


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.fixture
def broken(made: Callable[[str], Made], tmp_path: Path, tiny: ModuleType) -> Callable[..., Path]:
    """`broken(name, change, **fields)`: a copy with changed tensors and configuration fields."""

    def get(name: str, change: Callable[[dict[str, Tensor]], object] = lambda _: None, **fields: Any) -> Path:
        for file in made(name)[0].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        tiny.edit_config(tmp_path, **fields)
        return tmp_path

    return get


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(folder))) as refused:
        LLM(folder, **SETTINGS | DRAFTS)
    assert message in str(refused.value)
    LLM(folder, **SETTINGS)  # which has no use for the head


def test_weights_that_do_not_fit_are_listed(broken: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["mtp.fc.weight"], tensors["mtp.norm.weight"]
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.zeros(72, 40)
        tensors["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)

    folder = broken("qwen3_5", change)
    with pytest.raises(ValueError, match="4 weights do not fit an MTP head of this target") as refused:
        LLM(folder, **SETTINGS | DRAFTS)
    for line in (
        "missing   mtp.fc.weight (40, 80)",
        "missing   mtp.norm.weight (40,)",
        "misshapen mtp.layers.0.self_attn.q_proj.weight (72, 40), expected (144, 40)",
        "surplus   mtp.layers.1.mlp.up_proj.weight (2, 2)",
    ):
        assert line in str(refused.value)


def test_an_absent_head(broken: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    refuses(broken("qwen3_5", change), "has no tensors with the prefix 'mtp.'")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; it must be 1"),
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0; it must be 1"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True; it must be false"),
        ("attention, mlp", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; it must be 1"),
        ("attention, mlp", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0; it must be 1"),
        (
            "attention, mlp",
            {"mtp_layers_block_type": ["full_attention", "linear_attention"]},
            "the layers of the MTP head are AttentionLayer, MambaLayer; supported are heads with attention and "
            "without recurrent states",
        ),
        (
            "attention, mlp",
            {"mtp_layers_block_type": ["mlp"]},
            "the layers of the MTP head are MlpLayer; supported are",
        ),
    ],
)
def test_a_head_of_another_kind(broken: Callable[..., Path], name: str, fields: dict[str, Any], message: str) -> None:
    refuses(broken(name, **fields), message)


def test_a_family_without_heads(tiny_checkpoint: Any) -> None:
    folder, _ = tiny_checkpoint("llama")
    refuses(folder, "config.json: model_type is 'llama'; draft 'mtp' needs an MTP head")
