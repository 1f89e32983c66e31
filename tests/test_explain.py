"""Why acceptance is low: each cause is planted into a head that is good by design, and found."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bateleur.eagle import Verdict
from bateleur.eagle.geometry import stage_first
from bateleur.eagle.heads import DenseAttend
from bateleur.eagle.verify import verify
from bateleur.metadata.backends.base import PagedAttentionBuilder
from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_draft
from bateleur.runner.cli import explain as command
from bateleur.runner.diagnose.draft_offline import Recorded, Recorder, conventions, roll_out
from bateleur.runner.diagnose.explain_acceptance import explain
from bateleur.runner.diagnose.explanation import Explanation, Measured, Reading, conclude
from bateleur.runner.spec_decode.draft_model import DraftModel

SIZE, VOCAB, TAP, LAST = 256, 4096, 5, 10
PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef walk(path):\n"]
SHORT = {"prompts": PROMPTS, "max_tokens": 21, "device": "cpu", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def texts(make_llm: Callable[..., LLM]) -> tuple[list[Recorded], Any]:
    """The target's greedy answers with its states, and the target."""
    recorder = Recorder(1, 10, VOCAB)
    recorder.keep = frozenset(range(12))
    llm = make_llm(max_model_len=96, num_speculative_tokens=1, drafter=recorder)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=SHORT["max_tokens"]))
    found = [
        recorder.recorded(o.prompt_token_ids, [*o.prompt_token_ids, *o.outputs[0].token_ids]) for o in outputs
    ]
    return found, llm.engine.model


def good_head(texts: tuple[list[Recorded], Any], tap: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
    value = torch.linalg.lstsq(
        torch.cat(inputs).double(), torch.cat(wanted).double(), driver="gelsd"
    ).solution
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
        "norm.weight": model.final_norm,
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
def write(texts: tuple[list[Recorded], Any], tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """A checkpoint of the good head, changed."""

    def build(
        change: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda config, tensors: None,
        tap: int = LAST,
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


def said(texts: tuple[list[Recorded], Any]) -> Tensor:
    """The different tokens of the recorded answers, ascending."""
    return torch.tensor(sorted({token for text in texts[0] for token in text.tokens}))


def rates(found: Explanation) -> dict[str, float]:
    return {reading.name: reading.accuracy for reading in found.readings}


def test_a_good_head_is_found_to_be_right(write: Writer) -> None:
    """It knows the greedy answers, so nothing but the sampled ones could be better, on graphs or without."""
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_backend": "recorded"}
    found = explain(None, write(), **SHORT, **graphs, cudagraph_capture_sizes=[4, 8])
    greedy, sampled = found.measured
    assert found.causes == ()
    assert found.conclusions[0].startswith("nothing wrong found: the head is just not better than that, 100%")
    assert greedy.acceptance == (1, 1, 1)
    assert greedy.tokens_per_step == found.alone.expected == 4
    assert 1 <= sampled.tokens_per_step < 3
    assert found.measured == found.measured_eager
    assert found.oracle_tokens_per_step == ((0.0, 4.0), (0.8, 4.0))
    assert rates(found)["as declared"] == 1
    assert found.shuffled_accuracy < 0.5
    assert found.vocabulary_share == 1


@pytest.mark.parametrize(
    ("tap", "declared", "remedy"),
    [(LAST, LAST - 1, "taps + 1"), (TAP, TAP + 1, "taps - 1")],
)
def test_d1_taps_that_are_off_by_one(write: Writer, tap: int, declared: int, remedy: str) -> None:
    found = explain(None, write(set_taps(declared), tap), **SHORT)
    assert found.causes[0] == "features"
    assert found.conclusions[0].startswith("features: 100% of first drafts are right if")
    assert remedy in found.conclusions[0]
    assert found.measured[0].acceptance[0] < 0.9


def test_d2_the_wrong_side_of_the_last_norm_is_recycled(write: Writer) -> None:
    found = explain(None, write(lambda config, _: config["eagle_config"].update(norm_output=True)), **SHORT)
    assert found.causes == ("norm",)
    assert "norm_output is wrong" in found.conclusions[0]
    assert found.measured[0].acceptance[0] == 1


def test_the_first_residual_starts_from_the_wrong_state(write: Writer) -> None:
    found = explain(
        None, write(lambda config, _: config["eagle_config"].update(norm_before_residual=True)), **SHORT
    )
    assert found.causes[0] == "norm"
    assert "first residual from the plain hidden state" in found.conclusions[0]


def test_a_head_that_was_not_unrolled_collapses(write: Writer) -> None:
    """What it gives on is not the state that it was made for."""
    found = explain(None, write(tap=TAP), **SHORT)
    assert found.causes == ("rollout",)
    assert "draft 2 is right" in found.conclusions[0]


def test_a_reduced_vocabulary_is_the_upper_bound(write: Writer, texts: tuple[list[Recorded], Any]) -> None:
    ids = said(texts)[::2]
    found = explain(None, write(reduce_to(ids, offsets=True)), **SHORT)
    assert found.causes[0] == "vocabulary"
    assert found.draft_vocab_size == len(ids)
    assert 0.2 < found.vocabulary_share < 0.8
    assert f"no acceptance is above {found.vocabulary_share:.0%}" in found.conclusions[0]
    assert rates(found)["as declared"] <= 0.8


@pytest.mark.parametrize("proof", ["too large", "t2d", "none"])
def test_d4_a_table_of_ids_in_place_of_offsets(
    write: Writer, texts: tuple[list[Recorded], Any], proof: str
) -> None:
    """Whether or not its entries would pass as offsets."""
    ids = said(texts)
    ids = ids[ids < VOCAB - len(ids)]
    if proof == "too large":
        ids = torch.cat((ids, torch.tensor([VOCAB - 1])))

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        reduce_to(ids, offsets=False)(config, tensors)
        if proof == "t2d":
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)

    found = explain(None, write(change), **SHORT)
    assert found.causes[0] == "vocabulary"
    assert "d2t holds" in found.conclusions[0]
    if proof != "none":
        assert "subtract 0" in found.table()
    json.dumps(found.as_dict(), allow_nan=False)


def test_an_accepted_draft_that_is_dropped_is_bookkeeping(
    write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Verdict:
        made = verify(*args, **kwargs)
        kept = torch.where(made.num_emitted > 2, made.num_emitted - 1, made.num_emitted)
        spots = torch.arange(made.tokens.shape[1])
        return made._replace(tokens=made.tokens.where(spots < kept[:, None], -1), num_emitted=kept)

    monkeypatch.setattr("bateleur.runner.sampling.rejection_sampler.verify", broken)
    found = explain(None, write(), **SHORT)
    assert found.causes[0] == "bookkeeping"
    assert re.search(r"always right gives 2\.\d\d tokens per step in place of 4", found.conclusions[0])


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
    assert "falls behind at draft 3: the chain reads metadata" in found.conclusions[0]


def test_b3_a_wrong_token_in_the_first_pass_is_bookkeeping(
    write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(
        buffers: Any, batch: Any, group: int, next_token: Tensor, num_valid: Tensor, **how: Any
    ) -> None:
        stage_first(buffers, batch, group, next_token * 0, num_valid, **how)

    monkeypatch.setattr("bateleur.eagle.speculator.stage_first", wrong)
    found = explain(None, write(), **SHORT)
    assert found.causes == ("bookkeeping",)
    assert "falls behind at draft 1: the first pass reads" in found.conclusions[0]


def test_random_weights_are_just_not_better(write: Writer) -> None:
    def scramble(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5

    found = explain(None, write(scramble), **SHORT)
    assert found.causes == ()
    assert found.measured[0].tokens_per_step < 1.1
    assert found.conclusions[0].startswith("nothing wrong found")
    assert "features make no difference" in found.conclusions[0]


@pytest.mark.skipif(not shipped_draft().is_dir(), reason="there is no shipped head")
def test_nothing_is_wrong_with_the_shipped_head() -> None:
    found = explain(None, "auto", **SHORT)
    assert found.causes == ()
    assert found.alone.expected == pytest.approx(found.measured[0].expected, rel=0.1)
    assert found.oracle_tokens_per_step == ((0.0, 4.0), (0.8, 4.0))


class Watched:
    """A head that keeps what it gave for the last row of each pass."""

    def __init__(self, head: Any) -> None:
        self.head, self.seen = head, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        made = self.head.forward(*args)
        self.seen.append(made[0][-1])
        return made


@pytest.mark.skipif(not shipped_draft().is_dir(), reason="there is no shipped head")
def test_chains_outside_the_engine_start_from_true_features(texts: tuple[list[Recorded], Any]) -> None:
    """As if each step began with an empty cache."""
    recorded, model = texts
    head = DraftModel.open(shipped_draft(), model).head
    meant = replace(conventions(head, 10, torch.device("cpu"))[0], head=Watched(head))
    for text in recorded:
        tokens, rows, now = torch.tensor(text.tokens), text.num_rows, text.prompt_len
        features = head.fuse([text.features[boundary][:rows] for boundary in meant.boundaries])
        tried, kept, seen = [0] * 3, [0] * 3, []
        while now <= rows:
            attend, ids, hidden, first = DenseAttend(head.spec), tokens[1 : now + 1], features[:now], 0
            for i in range(min(3, rows + 1 - now)):
                out, state = head.forward(ids, hidden, torch.arange(first, now + i), attend)
                seen.append(out[-1])
                ids, hidden, first = head.target_ids[head.logits(out[-1:]).argmax(-1)], state[-1:], now + i
                tried[i] += 1
                if int(ids) != text.tokens[now + 1 + i]:
                    break
                kept[i] += 1
            now = first + 1 + (int(ids) == text.tokens[first + 1])
        meant.head.seen.clear()
        assert [counts.tolist() for counts in roll_out(meant, text, 3)] == [tried, kept]
        torch.testing.assert_close(torch.stack(meant.head.seen), torch.stack(seen), rtol=1e-3, atol=1e-3)


def test_conclusions_from_graphs_and_their_order() -> None:
    def run(*rates: float) -> Measured:
        return Measured(0.0, 1.0, (100, 100), tuple(int(100 * rate) for rate in rates))

    declared, meant = Reading("as declared", "", 20, 100, 0.0, 4.0), Reading("x", "norm", 60, 100, 6.0, 5.0)
    facts = Explanation(
        draft="d",
        num_speculative_tokens=2,
        measured=(run(0.2, 0.1),),
        measured_eager=(run(0.6, 0.6),),
        alone=run(0.6, 0.3),
        readings=(declared, meant),
        vocabulary_share=0.9,
    )
    found = conclude(facts, ["planted"])
    assert found.causes == ("bookkeeping", "norm", "vocabulary", "rollout")
    assert found.conclusions[0] == "bookkeeping: planted"
    assert "a graph replays what is no longer true" in found.conclusions[1]
    assert conclude(found, ["planted"]) == found


def test_a_constant_guess_is_no_better_reading() -> None:
    declared = Reading("as declared", "", 0, 500, 0.0, 0.0)
    assert not Reading("taps + 1", "features", 30, 500, 5.5, 0.0).beats(declared)
    assert Reading("taps + 1", "features", 30, 500, 5.5, 5.0).beats(declared)


def test_the_command_prints_a_table_and_json(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(
        model=None,
        draft=write(),
        json=False,
        prompt=PROMPTS[:1],
        num_speculative_tokens=2,
        max_tokens=9,
        device="cpu",
        dtype="float32",
    )
    assert command.run(args) == 0
    table = capsys.readouterr().out
    assert "engine, temperature 0.8" in table
    assert "first drafts that are right" in table
    assert "nothing wrong found" in table
    assert max(map(len, table.splitlines()[1:-1])) <= 100
    args.json = True
    assert command.run(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["causes"] == []
    assert found["measured"][0]["acceptance"] == [1, 1]
    assert found["readings"][0]["accuracy"] == 1


def test_what_cannot_be_explained_is_refused(write: Writer) -> None:
    with pytest.raises(
        ValueError, match="max_tokens is 5; with num_speculative_tokens = 4 it must be at least 6"
    ):
        explain(None, write(), max_tokens=5)
    with pytest.raises(ValueError, match="prompts has 0 entries"):
        explain(None, write(), prompts=[])
    with pytest.raises(ValueError, match="nowhere"):
        explain(None, "nowhere")
