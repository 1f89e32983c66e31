"""Requests with LoRA adapters: each gets the tokens of the checkpoint that its adapter is merged into."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantize
import tiny as tiny_models
from lora_files import merge, modules_of, write_adapter
from tiny import EVEN

from bateleur.runner import LLM, LoRARequest, RequestOutput, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.cli import generate, main
from bateleur.runner.cli.options import build_parser
from bateleur.runner.diagnose.checkpoint_facts import checkpoint_table, describe_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "block_size": 4,
}
CHUNKED = {"max_num_batched_tokens": 24}
CACHED = {**CHUNKED, "enable_prefix_caching": True, "mamba_block_size": 8}
DRAFTED = {"draft": "ngram", "num_speculative_tokens": 2}
RECORDED = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_backend": "recorded"}


def prompts() -> list[dict[str, Any]]:
    ids = np.random.default_rng(1).integers(3, 80, 30).tolist()
    return [{"prompt_token_ids": ids}, {"prompt_token_ids": [*ids[:19], 5, 7]}]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


class Adapted:
    """A checkpoint, two adapters, and what the checkpoint and each merged one answer to `prompts`."""

    def __init__(self, checkpoint: Path, place: Path) -> None:
        modules = modules_of(checkpoint)
        self.checkpoint = checkpoint
        self.adapters: list[LoRARequest | None] = [None]
        wanted = [self.plain(checkpoint)]
        for seed, (name, some) in enumerate((("all", modules), ("some", modules[1::2]))):
            folder = write_adapter(place / name, checkpoint, some, rank=3 + seed, seed=seed)
            self.adapters.append(LoRARequest(name, seed + 1, str(folder)))
            wanted.append(self.plain(merge(place / f"merged-{name}", checkpoint, folder)))
        self.wanted = wanted
        assert len({repr(each) for each in wanted}) == 3, "adapters change tokens"

    def plain(self, checkpoint: Path) -> list[list[int]]:
        with LLM(checkpoint, **SIZES) as llm:
            return tokens(llm.generate(prompts(), GREEDY))

    def open(self, **options: Any) -> LLM:
        return LLM(self.checkpoint, **SIZES | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4} | options)

    def check(self, llm: LLM) -> list[RequestOutput]:
        """Every prompt under the base model and both adapters, in one batch."""
        cases = [(prompt, adapter) for adapter in self.adapters for prompt in prompts()]
        outputs = llm.generate([prompt for prompt, _ in cases], GREEDY, lora_request=[a for _, a in cases])
        assert tokens(outputs) == [each for answers in self.wanted for each in answers]
        return outputs


@pytest.fixture(scope="module", params=["llama", "nemotron_h", "qwen3_5_text"])
def adapted(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    checkpoint = tiny(request.param, **EVEN[request.param])
    return Adapted(checkpoint, tmp_path_factory.mktemp(request.param))


def test_info_counts_adapters(llama: Adapted) -> None:
    for options in ({}, {"max_loras": 3, "max_lora_rank": 8}):
        with llama.open(**options) as llm:
            adapters = llm.engine.setup.adapters
            assert adapters is not None
            given = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "dtype": "float32"} | options
            facts = describe_checkpoint(llama.checkpoint, device="cpu", **given)
            assert facts["adapter_bytes"] == adapters.pool.num_bytes > 0
            assert f"{facts['adapter_bytes']:,} bytes" in checkpoint_table(facts)
    assert describe_checkpoint(llama.checkpoint, device="cpu")["adapter_bytes"] == 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        *(
            pytest.param(options, id=name, marks=pytest.mark.slow)
            for name, options in (("chunked", CHUNKED), ("drafted", DRAFTED), ("recorded", RECORDED))
        ),
        pytest.param(CACHED | DRAFTED | RECORDED | {"async_scheduling": True}, id="all at once"),
    ],
)
def test_a_batch_mixes_the_base_model_and_adapters(adapted: Adapted, options: dict[str, Any]) -> None:
    with adapted.open(**options) as llm:
        adapted.check(llm)
        llm.engine.runner.producer.poison()
        adapted.check(llm)


def test_adapters_share_no_prefixes(adapted: Adapted) -> None:
    """Each finds what it computed itself, in any order, and a second engine finds it on disk."""
    with adapted.open(**CACHED) as llm:
        assert all(not each.num_cached_tokens for each in adapted.check(llm)[::2])
        again = adapted.check(llm)
        assert all(each.num_cached_tokens for each in again)


def test_files_of_prefixes_are_of_one_adapter(adapted: Adapted, tmp_path: Path) -> None:
    options = {**CACHED, "kv_offload_bytes": 1 << 22, "kv_offload_path": tmp_path}
    first = LoRARequest("renamed", 1, adapted.adapters[1].lora_path)  # type: ignore[union-attr]
    prompt = prompts()[0]
    with adapted.open(**options) as llm:
        llm.generate(prompt, GREEDY, lora_request=adapted.adapters[1])
    with adapted.open(**options) as llm:
        for adapter, answers, found in (
            (None, adapted.wanted[0], False),
            (adapted.adapters[2], adapted.wanted[2], False),
            (first, adapted.wanted[1], True),
        ):
            (output,) = llm.generate(prompt, GREEDY, lora_request=adapter)
            assert list(output.outputs[0].token_ids) == answers[0]
            assert bool(output.num_cached_tokens) is found


def test_replays_of_graphs_are_verified_with_adapters(adapted: Adapted) -> None:
    with adapted.open(**RECORDED, cudagraph_capture_sizes=[2, 8], cudagraph_checks="PARANOID") as llm:
        for adapter in adapted.adapters[1:]:
            llm.add_lora(adapter)  # type: ignore[arg-type]
        report = llm.engine.verify_graphs(fuzz=2)
        assert report.ok, report.table()


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_say_what_one_says(adapted: Adapted, tmp_path: Path) -> None:
    """Adapters wait for one slot. A folder that is no adapter is refused on both, and changes nothing."""
    with adapted.open(tensor_parallel_size=2, rank_timeout=30, max_loras=1, **CACHED, **DRAFTED) as llm:
        adapted.check(llm)
        with pytest.raises(ValueError, match=r"must hold adapter_config\.json"):
            llm.generate(prompts(), GREEDY, lora_request=LoRARequest("none", 3, str(tmp_path)))
        llm.remove_lora("some")
        with pytest.raises(ValueError, match="'some': is not loaded; loaded are none"):
            llm.remove_lora("some")
        adapted.check(llm)


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tiny("llama", **EVEN["llama"]), tmp_path_factory.mktemp("llama"))


def test_preempted_requests_keep_their_adapters(llama: Adapted, sized: Callable[..., LLM]) -> None:
    with sized(llama.open, 26) as llm:
        assert sum(each.num_preemptions for each in llama.check(llm))


def test_mtp_heads_draft_without_adapters(tmp_path: Path) -> None:
    more = EVEN["qwen3_5_text"]
    checkpoint = tiny_models.save(tiny_models.make_model("qwen3_5_text", **more), tmp_path / "model")
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tiny_models.add_mtp(checkpoint, "qwen3_5_text", tmp_path / "body", **more | layers)
    tiny_models.edit_config(checkpoint, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    adapted = Adapted(checkpoint, tmp_path)
    drafts = {"draft": "mtp", "num_speculative_tokens": 2}
    with adapted.open(**CACHED, **RECORDED, **drafts) as llm:
        adapted.check(llm)
        assert llm.get_metrics().num_draft_tokens


def test_heads_draft_without_adapters(tmp_path: Path) -> None:
    """Drafts of the shipped head for the base model change no token of an adapter."""
    folder = write_adapter(tmp_path / "a", shipped_model(), modules_of(shipped_model()))
    cases, found = [None, LoRARequest("a", 1, str(folder))], []
    for options in ({"draft": None}, {"draft": "auto", **RECORDED, **CACHED}):
        with LLM(None, **SIZES | {"max_num_seqs": 2}, enable_lora=True, **options) as llm:
            ids = prompts()[0]
            found.append(tokens(llm.generate([ids, ids], GREEDY, lora_request=cases)))
            assert options["draft"] is None or llm.get_metrics().num_draft_tokens
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_the_command_line_chooses_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of a single prompt, and by `model` in both formats of lines; another adapter's folder is another result."""
    modules = modules_of(shipped_model())
    folders = [write_adapter(tmp_path / name, shipped_model(), modules, seed=seed) for seed, name in enumerate("ab")]
    given = ["--enable-lora", "--max-loras", "1", "--lora-modules"]
    limits = ["--max-tokens", "6", "--temperature", "0", "--draft", "none", "--generation-config", "vllm"]
    with LLM(None, device="cpu", enable_lora=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        lora = [None, *(LoRARequest(folder.name, lora_path=str(folder)) for folder in folders)]
        base, a, b = (each.outputs[0].text for each in llm.generate(["def f("] * 3, params, lora_request=lora))
    assert len({base, a, b}) == 3
    assert main(["generate", "def f(", *limits, *given, f"b={folders[1]}"]) == 0
    assert capsys.readouterr().out == f"def f({b}\n"

    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [None, "one", "two", "three"]
    bodies: list[dict[str, Any]] = [{"prompt": "def f(", "model": name} for name in names]
    calls = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b} for i, b in enumerate(bodies)]
    for requests in (bodies, calls):
        lines.write_text("\n".join(map(json.dumps, requests)))
        for pair, wanted in ((folders, [base, a, b]), (folders[::-1], [base, b, a])):
            command = ["batch", str(lines), str(out), *limits, *given, f"one={pair[0]}", f"two={pair[1]}"]
            assert main([*command, "--overwrite"]) == 1, "one model is unknown"
            *served, unknown = [json.loads(line) for line in out.read_text().splitlines()]
            assert "model is 'three'; it must be absent or one of" in json.dumps(unknown)
            if requests is calls:
                served = [each["response"]["body"] for each in served]
                assert [each["model"] for each in served] == ["bateleur", "one", "two"]
                served = [each["choices"][0] for each in served]
            assert [each["text"] for each in served] == wanted
        assert main([*command[:-2], f"one={folders[0]}", f"two={folders[1]}"]) == 2, "results of other adapters"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lora-modules a=b", "lora_modules is .*; it must be left out without enable_lora"),
        ("--enable-lora --lora-modules a=b c=d", "it must be one adapter for a single prompt"),
        ("--enable-lora --lora-modules a=b a=d", "a name for each adapter that no other model has; 'a' is taken"),
        ("--enable-lora --lora-modules bateleur=b", "'bateleur' is taken"),
    ],
)
def test_adapters_of_the_command_line_are_checked(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate.run(build_parser().parse_args(["generate", "x", *flags.split()]))


def test_slots_follow_requests(llama: Adapted) -> None:
    """A slot is free when its requests have ended, whether they finished, were aborted, or were left."""
    _, one, other = llama.adapters
    ids = prompts()[0]
    with llama.open(max_loras=1) as llm:
        assert tokens(llm.generate(ids, GREEDY, lora_request=one)) == llama.wanted[1][:1]
        name = llm.add_request(ids, GREEDY, lora_request=one)
        llm.step()
        for again in range(2):
            with pytest.raises(ValueError, match="max_loras=1: unfinished requests use all slots"):
                llm.add_lora(other)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="'all': 1 unfinished requests use it; abort them first"):
                llm.remove_lora("all")
            if not again:
                llm.abort(name)
                stream = llm.stream(ids, GREEDY, lora_request=one)
                next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert tokens(llm.generate(ids, GREEDY, lora_request=other)) == llama.wanted[2][:1]
        assert set(llm.list_loras()) == {"some"}
        llm.remove_lora("some")
        assert not llm.list_loras()


def test_requests_wait_for_a_slot(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """First come, first served, with the tokens of their adapters; others run meanwhile, and no request is lost."""
    base, one, other = llama.adapters
    ids = prompts()[0]
    order = [one, one, other, one, base, other, base]
    twice = SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True, n=2)
    with llama.open(max_loras=1, **CACHED, async_scheduling=True) as llm:
        names = [llm.add_request(ids, GREEDY, lora_request=adapter) for adapter in order]
        assert llm.get_metrics().num_waiting == len(order)
        finished: list[RequestOutput] = []
        assert len(llm.engine.scheduler.waiting_for_slot) == 3
        late = llm.add_request(ids, twice, lora_request=one)
        llm.abort(names[5])
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "give_slot", interrupt)
            with suppress(KeyboardInterrupt):
                while llm.has_unfinished_requests:
                    finished += llm.step()
            assert llm.engine.scheduler.waiting_for_slot, "it was interrupted"
        while llm.has_unfinished_requests:
            finished += llm.step()
        assert not llm.engine.scheduler.waiting_for_slot
        alone = llm.generate(ids, twice, lora_request=one)[0].outputs
    by_name = {output.request_id: [list(each.token_ids) for each in output.outputs] for output in finished}
    for name, adapter in zip(names, order, strict=True):
        if name != names[5]:
            assert by_name.pop(name) == llama.wanted[llama.adapters.index(adapter)][:1]
    assert by_name == {late: [list(each.token_ids) for each in alone]}
    came = [output.request_id for output in finished]
    assert came.index(names[1]) < came.index(names[2]) < came.index(names[3]), "one made room for the other"
    assert came.index(names[2]) < came.index(late)
    assert came.index(names[6]) < came.index(names[2]), "the base model does not wait"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interruption_keeps_adapters(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are computed again with theirs, and give their slots back, as one that was not queued."""
    with llama.open() as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "add", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.add_request(prompts()[0], GREEDY, lora_request=llama.adapters[1])
        for adapter in llama.adapters:
            llm.add_request(prompts()[0], GREEDY, lora_request=adapter)
        llm.step()
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "execute_model", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        outputs = []
        while llm.has_unfinished_requests:
            outputs += llm.step()
        outputs.sort(key=lambda output: int(output.request_id.rpartition("-")[2]))
        assert tokens(outputs) == [answers[0] for answers in llama.wanted]
        for name in list(llm.list_loras()):
            llm.remove_lora(name)


def test_requests_without_slots_are_refused_by_name(llama: Adapted) -> None:
    with llama.open(enable_lora=False) as llm:
        with pytest.raises(ValueError, match=r"lora_request is LoRARequest.* without enable_lora=True"):
            llm.generate(prompts(), GREEDY, lora_request=llama.adapters[1])
        with pytest.raises(ValueError, match="enable_lora is False"):
            llm.add_lora(llama.adapters[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable_lora is True; it must be false with data_parallel_size = 2"):
        llama.open(data_parallel_size=2)
    with llama.open() as llm:
        with pytest.raises(ValueError, match=r"lora_request\[1\] is 'all'; it must be a LoRARequest"):
            llm.generate(prompts(), GREEDY, lora_request=[None, "all"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="lora_request has 1 entries for 2 prompts"):
            llm.generate(prompts(), GREEDY, lora_request=[None])


def test_adapters_are_added_to_quantised_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the tokens of the dequantised checkpoints that they are merged into."""
    quantised, plain = quantize.Checkpoints(tmp_path_factory)("qwen", "fp8 blocks")
    adapted = Adapted(plain, tmp_path_factory.mktemp("adapters"))
    adapted.checkpoint = quantised
    with adapted.open(**CACHED, **DRAFTED, **RECORDED) as llm:
        adapted.check(llm)
