"""Why acceptance is low: each cause is planted into a head that is good by design, and found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bateleur.eagle import RejectionOutput
from bateleur.eagle.geometry import stage_first
from bateleur.eagle.heads import DenseAttend
from bateleur.eagle.rejection_sampler import verify
from bateleur.metadata.backends.base import PagedAttentionBuilder
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_draft
from bateleur.runner.cli import main
from bateleur.runner.diagnose.explain_acceptance import PROMPTS as EXPLAINED
from bateleur.runner.diagnose.explain_acceptance import TEMPERATURES, _AcceptanceStudy, explain
from bateleur.runner.diagnose.explanation import (
    ALONE,
    EAGER,
    ENGINE,
    ORACLE,
    ConventionResult,
    Explanation,
    Run,
    conclude,
)
from bateleur.runner.diagnose.head_alone import (
    DraftsByPosition,
    RecordedText,
    RecordingDrafter,
    conventions,
    draft_by_position,
)
from bateleur.runner.errors import ContradictoryTokens
from bateleur.runner.spec_decode.draft_head import DraftHead

SIZE, VOCAB, TAP, LAST = 256, 4096, 5, 10
PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef walk(path):\n"]
SHORT = {"prompts": PROMPTS, "max_tokens": 21, "device": "cpu", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> tuple[list[RecordedText], Any]:
    """The target's answers with its states, at the temperatures that `explain` uses, and the target."""
    recorder = RecordingDrafter(1, 10)
    recorder.keep = frozenset(range(12))
    llm = make_llm(max_model_len=96, num_speculative_tokens=1, drafter=recorder)
    found = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=SHORT["max_tokens"])
        for output in llm.generate(PROMPTS, params):
            prompt = output.prompt_token_ids
            found.append(recorder.recorded_text(prompt, [*prompt, *output.outputs[0].token_ids]))
    return found, llm.engine.model


def good_head(texts: tuple[list[RecordedText], Any], tap: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An EAGLE-3 head that knows the recorded texts, without training.

    Its attention sees one position, so it is linear in the normed token and the normed tap. From these the least
    squares take the target's last state one token later, which the target's own norm and `lm_head` turn into its token.
    """
    recorded, model = texts
    inputs, wanted = [], []
    for text in recorded:
        rows = len(text.tokens) - 2
        token = F.embedding(torch.tensor(text.tokens[1 : rows + 1]), model.embedding)
        feature = text.features[tap][:rows]
        inputs.append(torch.cat((F.rms_norm(token, (SIZE,)), F.rms_norm(feature, (SIZE,), eps=1e-5)), -1))
        wanted.append(text.features[10][1 : rows + 1] - feature)
    value = torch.linalg.lstsq(torch.cat(inputs).double(), torch.cat(wanted).double(), driver="gelsd").solution
    layer, ones = "midlayer.", torch.ones(SIZE)
    zero = torch.zeros(8, SIZE)
    tensors = {
        "fc.weight": torch.eye(SIZE),
        f"{layer}self_attn.q_proj.weight": torch.zeros(SIZE, 2 * SIZE),
        f"{layer}self_attn.k_proj.weight": torch.zeros(SIZE, 2 * SIZE),
        f"{layer}self_attn.v_proj.weight": value.t().float().contiguous(),
        f"{layer}self_attn.o_proj.weight": torch.eye(SIZE),
        f"{layer}mlp.gate_proj.weight": zero,
        f"{layer}mlp.up_proj.weight": zero.clone(),
        f"{layer}mlp.down_proj.weight": zero.t().contiguous(),
        "norm.weight": model.weights()["final_norm"],
        "lm_head.weight": model.lm_head.clone(),
        f"{layer}input_layernorm.weight": ones,
        f"{layer}hidden_norm.weight": ones.clone(),
        f"{layer}post_attention_layernorm.weight": ones.clone(),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": SIZE,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1,
        "use_sliding_window": True,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap]},
    }
    return config, tensors


Writer = Callable[..., Path]


@pytest.fixture(scope="module")
def write(texts: tuple[list[RecordedText], Any], tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """A checkpoint of the good head, changed."""

    def build(
        change: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda config, tensors: None, tap: int = LAST
    ) -> Path:
        config, tensors = good_head(texts, tap)
        change(config, tensors)
        folder = tmp_path_factory.mktemp("head")
        (folder / "config.json").write_text(json.dumps(config))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors")
        return folder

    return build


def set_taps(*taps: int) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(taps)

    return change


def reduce_to(ids: Tensor, *, offsets: bool) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["draft_vocab_size"] = len(ids)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
        tensors["d2t"] = ids - torch.arange(len(ids)) if offsets else ids

    return change


def said(texts: tuple[list[RecordedText], Any]) -> Tensor:
    """The different tokens of the recorded answers, ascending."""
    return torch.tensor(sorted({token for text in texts[0] for token in text.tokens}))


def tokens_per_step(found: Explanation) -> dict[str, float]:
    return {reading.name: reading.tokens_per_step for reading in found.conventions}


def run(found: Explanation, name: str, temperature: float = 0.0) -> Run:
    only = found.run(name, temperature)
    assert only is not None
    return only


@pytest.mark.slow
def test_a_good_head_is_found_to_be_right(write: Writer) -> None:
    """It knows all answers, on graphs or without."""
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"}
    found = explain(None, write(), **SHORT, **graphs, cudagraph_capture_sizes=[4, 8])
    assert found.causes == ()
    assert found.conclusions[0].startswith("nothing wrong found: the head itself gives 4.00")
    for name in (ENGINE, EAGER, ALONE, ORACLE):
        assert run(found, name).acceptance == (1, 1, 1), name
        assert run(found, name).tokens_per_step == 4
    assert run(found, ORACLE, 0.8).tokens_per_step == 4
    assert run(found, ENGINE, 0.8).acceptance == run(found, EAGER, 0.8).acceptance
    assert found.conventions[0].uses_features
    assert found.conventions[0].from_tokens_alone < 2.5
    assert found.vocabulary_share == 1


@pytest.mark.slow
@pytest.mark.parametrize(("tap", "declared", "remedy"), [(LAST, LAST - 1, "taps + 1"), (TAP, TAP + 1, "taps - 1")])
def test_d1_taps_that_are_off_by_one(write: Writer, tap: int, declared: int, remedy: str) -> None:
    found = explain(None, write(set_taps(declared), tap), **SHORT)
    assert found.causes[0] == "features"
    assert remedy in found.conclusions[0]
    assert run(found, ENGINE).acceptance[0] < 0.9


@pytest.mark.slow
@pytest.mark.skipif(not shipped_draft().is_dir(), reason="there is no shipped head")
def test_d1_taps_of_a_trained_head_that_costs_little_when_they_are_off_by_one(tmp_path: Path) -> None:
    """Neighbouring boundaries hold nearly the same: as many first drafts are right, only their laws tell."""
    config = json.loads((shipped_draft() / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 4, 9]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(shipped_draft() / "model.safetensors")
    found = explain(None, tmp_path, prompts=list(EXPLAINED[:8]), max_tokens=64, device="cpu")
    assert found.causes == ("features",)
    assert "taps + 1" in found.conclusions[0]


@pytest.mark.slow
def test_d2_the_wrong_side_of_the_last_norm_is_recycled(write: Writer) -> None:
    found = explain(None, write(lambda config, _: config["eagle_config"].update(norm_output=True)), **SHORT)
    assert found.causes == ("norm",)
    assert "norm_output inverted" in found.conclusions[0]
    assert run(found, ENGINE).acceptance[0] == 1


@pytest.mark.slow
def test_the_first_residual_starts_from_the_wrong_state(write: Writer) -> None:
    found = explain(None, write(lambda config, _: config["eagle_config"].update(norm_before_residual=True)), **SHORT)
    assert found.causes[0] == "norm"
    assert "first residual from the plain hidden state" in found.conclusions[0]


@pytest.mark.slow
def test_a_head_that_was_not_unrolled_collapses(write: Writer) -> None:
    """What it gives on is not the state that it was made for."""
    found = explain(None, write(tap=TAP), **SHORT)
    assert found.causes == ("rollout",)
    assert "the acceptance rate of draft 2 is" in found.conclusions[0]


@pytest.mark.slow
def test_a_reduced_vocabulary_is_the_upper_bound(write: Writer, texts: tuple[list[RecordedText], Any]) -> None:
    ids = said(texts)[::2]
    found = explain(None, write(reduce_to(ids, offsets=True)), **SHORT)
    assert found.causes[0] == "vocabulary"
    assert found.draft_vocab_size == len(ids)
    assert 0.2 < found.vocabulary_share < 0.8
    assert f"no acceptance rate can exceed {found.vocabulary_share:.0%}" in found.conclusions[0]
    assert tokens_per_step(found)["as declared"] <= 1 + 3 * 0.8


@pytest.mark.slow
@pytest.mark.parametrize("proof", ["too large", "t2d", "none"])
def test_d4_a_table_of_ids_in_place_of_offsets(
    write: Writer, texts: tuple[list[RecordedText], Any], proof: str
) -> None:
    """Where its entries can't be offsets no loader takes it, and says why; where they would pass, it is found."""
    ids = said(texts)
    ids = ids[ids < VOCAB - len(ids)]
    if proof == "too large":
        ids = torch.cat((ids, torch.tensor([VOCAB - 1])))

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        reduce_to(ids, offsets=False)(config, tensors)
        if proof == "t2d":
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)

    if proof != "none":
        with pytest.raises(ValueError, match=f"d2t seems to hold target ids.*subtract 0 .. {len(ids) - 1}$"):
            explain(None, write(change), **SHORT)
        return
    found = explain(None, write(change), **SHORT)
    assert found.causes[0] == "vocabulary"
    assert "d2t holds ids, not offsets" in found.conclusions[0]
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.slow
def test_an_accepted_draft_that_is_dropped_is_bookkeeping(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> RejectionOutput:
        made = verify(*args, **kwargs)
        kept = torch.where(made.num_emitted > 2, made.num_emitted - 1, made.num_emitted)
        spots = torch.arange(made.tokens.shape[1])
        return made._replace(tokens=made.tokens.where(spots < kept[:, None], -1), num_emitted=kept)

    sampler = "bateleur.runner.sampling.rejection_sampler"
    monkeypatch.setattr(f"{sampler}.verify", broken)
    found = explain(None, write(), **SHORT)
    assert found.causes[0] == "bookkeeping"
    assert re.search(r"always right gives \d\.\d\d tokens per step instead of 4", found.conclusions[0])


@pytest.mark.slow
def test_e1_a_chain_on_stale_metadata_is_bookkeeping(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone the head is as good as ever, and so is a drafter without a model: only both together tell."""
    build = PagedAttentionBuilder.build

    def frozen(builder: PagedAttentionBuilder, common: Any, group: int, phase: Any) -> Any:
        if common.max_query_len == 1:
            common = replace(common, seq_lens=common.seq_lens.clone())
        return build(builder, common, group, phase)

    monkeypatch.setattr(PagedAttentionBuilder, "build", frozen)
    found = explain(None, write(), **SHORT)
    assert found.causes == ("bookkeeping",)
    assert "draft 3 is the first with a lower rate: the engine's later draft pass" in found.conclusions[0]


@pytest.mark.slow
def test_b3_a_wrong_token_in_the_first_pass_is_bookkeeping(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(buffers: Any, batch: Any, group: int, next_token: Tensor, num_valid: Tensor, **how: Any) -> None:
        stage_first(buffers, batch, group, next_token * 0, num_valid, **how)

    monkeypatch.setattr("bateleur.eagle.speculator.stage_first", wrong)
    found = explain(None, write(), **SHORT)
    assert found.causes == ("bookkeeping",)
    assert "draft 1 is the first with a lower rate: the engine's first draft pass" in found.conclusions[0]


@pytest.mark.slow
def test_random_weights_are_just_not_better(write: Writer) -> None:
    def scramble(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5

    found = explain(None, write(scramble), **SHORT)
    assert found.causes == ()
    assert run(found, ENGINE).tokens_per_step < 1.1
    assert found.conclusions[0].startswith("nothing wrong found")
    assert "features make no difference" in found.conclusions[0]


@pytest.mark.skipif(not shipped_draft().is_dir(), reason="there is no shipped head")
def test_nothing_is_wrong_with_the_shipped_head() -> None:
    """In the engine it drafts what it drafts alone."""
    found = explain(None, "auto", **SHORT)
    assert found.causes == ()
    assert run(found, ALONE).reached == run(found, ENGINE).reached
    assert run(found, ALONE).accepted == run(found, ENGINE).accepted
    assert run(found, ORACLE).tokens_per_step == run(found, ORACLE, 0.8).tokens_per_step == 4


@pytest.mark.skipif(not shipped_draft().is_dir(), reason="there is no shipped head")
@pytest.mark.parametrize("window", [None, 6])
def test_a_chain_begins_at_every_place_with_true_features(
    texts: tuple[list[RecordedText], Any], window: int | None
) -> None:
    """All at once is as one after the other, each over a cache of its own."""
    recorded, model = texts
    head = DraftHead.open(shipped_draft(), model).head
    head.spec = replace(head.spec, sliding_window=window)
    (meant, *_), text = conventions(head, 10), recorded[-1]
    found = draft_by_position(meant, text, 3, model.logits, 0.8)
    tokens, rows = torch.tensor(text.tokens), len(text.tokens) - 2
    features = head.fuse([text.features[boundary][:rows] for boundary in meant.boundaries])
    for place in range(text.prompt_len - 1, rows):
        attend, ids, hidden, first = DenseAttend(head.spec), tokens[1 : place + 2], features[: place + 1], 0
        for i in range(3):
            at = place + 2 + i
            assert bool(found.known[place - text.prompt_len + 1, i]) == (at < len(tokens) - 1)
            if at == len(tokens):
                break
            out, state = head.forward(ids, hidden, torch.arange(first, first + len(ids)), attend)
            draft, law = (head.logits(out[-1:]), (model.logits(text.features[11][at - 1 : at]) / 0.8).softmax(-1))
            overlap = torch.minimum(law[:, head.target_ids], (draft / 0.8).softmax(-1)).sum()
            torch.testing.assert_close(found.overlap[place - text.prompt_len + 1, i], overlap, rtol=1e-3, atol=1e-4)
            right = head.target_ids[draft.argmax(-1)] == tokens[at]
            assert bool(found.right[place - text.prompt_len + 1, i]) == bool(right)
            ids, hidden, first = tokens[at : at + 1], state[-1:], place + 1 + i


def test_steps_are_those_of_an_engine() -> None:
    right = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]]).bool()
    known = torch.tensor([[1, 1, 1]] * 5 + [[1, 1, 0], [1, 0, 0]]).bool()
    reached, accepted = DraftsByPosition(right, right.float(), known).steps()  # at places 0, 3, and 5
    assert reached.tolist() == [3, 3, 1]
    assert accepted.tolist() == [3, 2, 0]
    assert DraftsByPosition(right, right.float(), known).accepted.tolist() == [2, 0, 3, 1, 0]


def test_conclusions_from_graphs_and_their_order() -> None:
    def made(name: str, *rates: float) -> Run:
        return Run(name, 0.0, (100, 100), tuple(int(100 * rate) for rate in rates))

    declared, meant = (
        ConventionResult("as declared", "", 1.3, 1.1, False, True),
        ConventionResult("x", "norm", 1.9, 1.1, True, True),
    )
    facts = Explanation(
        draft="d",
        kind="eagle3",
        num_speculative_tokens=2,
        runs=(made(ENGINE, 0.2, 0.1), made(EAGER, 0.6, 0.6), made(ALONE, 0.6, 0.3)),
        conventions=(declared, meant),
        draft_vocab_size=10,
        vocab_size=20,
        vocabulary_share=0.9,
    )
    found = conclude(facts, ["planted"])
    assert found.causes == ("bookkeeping", "norm", "vocabulary")
    assert found.conclusions[0] == "bookkeeping: planted"
    assert "a graph replays stale values" in found.conclusions[1]
    assert conclude(found, ["planted"]) == found
    found = conclude(replace(facts, conventions=(declared,)), [])
    assert found.causes == ("bookkeeping", "vocabulary", "rollout"), "a misread head says nothing of its training"


def test_a_difference_is_no_chance_and_worth_naming() -> None:
    base = torch.rand(500, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(500, generator=torch.Generator().manual_seed(1))

    def better(gain: float, spread: float) -> bool:
        return ConventionResult.of("x", "norm", base + gain + spread * noise, base, base).better

    assert better(0.05, 0.1)
    assert not better(0.05, 2.0), "by chance"
    assert not better(0.01, 0.0), "certain, and too little"


def test_the_command_prints_a_table_and_json(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", PROMPTS[0], "--num-speculative-tokens", "2", "--max-tokens", "9"]
    call = ["explain-acceptance", "auto", str(write()), *options, "--device", "cpu", "--dtype", "float32"]
    assert main(call) == 0
    table = capsys.readouterr().out
    assert "engine, temperature 0.8" in table
    assert "checkpoint, interpreted" in table
    assert "nothing wrong found" in table
    assert max(map(len, table.splitlines()[1:-1])) <= 100
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["causes"] == []
    assert found["runs"][0]["name"] == "engine"
    assert found["runs"][0]["acceptance"] == [1, 1]
    assert found["conventions"][0]["name"] == "as declared"


def test_what_cannot_be_explained_is_refused(write: Writer) -> None:
    with pytest.raises(ValueError, match="max_tokens is 5; with num_speculative_tokens = 4 it must be at least 6"):
        explain(None, write(), max_tokens=5)
    with pytest.raises(ValueError, match="prompts has 0 entries"):
        explain(None, write(), prompts=[])
    with pytest.raises(ValueError, match="nowhere"):
        explain(None, "nowhere")
    with pytest.raises(ValueError, match="draft is 'ngram'; it must be the folder of a head"):
        explain(None, "ngram")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: launch")])
def test_only_contradictory_tokens_are_reported_as_such(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors of the engine are not causes of a low acceptance rate."""
    known = ContradictoryTokens("row 1: next_token 5 does not follow; emitted were [4]")
    checkpoint = SimpleNamespace(spec=SimpleNamespace(num_layers=2))
    study = _AcceptanceStudy(checkpoint, "", {}, [[1]], 4, 3, texts={0.0: [[1]], 0.8: [[1]]})  # type: ignore[arg-type]
    monkeypatch.setattr(study, "load_engine", Mock())
    monkeypatch.setattr(study, "generate", Mock(side_effect=known))
    study.run_oracle()
    text = "the drafter gets contradictory tokens: row 1: next_token 5 does not follow; emitted were [4]"
    assert study.problems == [f"at temperature 0 {text}", f"at temperature 0.8 {text}"]
    monkeypatch.setattr(study, "generate", Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error)):
        study.run_oracle()


def test_the_recording_drafter_finds_contradictory_tokens() -> None:
    drafter = RecordingDrafter(2, 1)
    drafter.admit(1, [3])
    batch = SimpleNamespace(query_start_loc=torch.tensor([0, 1]))
    context: Any = SimpleNamespace(batch=batch, rows=torch.tensor([1]), num_valid=torch.tensor([1]), num_drafts=2)
    context.emitted, context.next_token = torch.tensor([[4, -1]]), torch.tensor([5])
    with pytest.raises(ContradictoryTokens, match=r"^row 1: next_token 5 does not follow; emitted were \[4\]$"):
        drafter.propose(context)
