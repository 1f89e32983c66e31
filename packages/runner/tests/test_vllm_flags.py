"""Every flag of `vllm serve` is an option, changes nothing, or is refused with a reason."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.checkpoint.open import open_checkpoint
from bateleur.runner.cli import serve
from bateleur.runner.cli.options import ENGINE_OPTIONS as OPTIONS
from bateleur.runner.cli.options import build_parser, given_options
from bateleur.runner.cli.vllm_flags import SERVER, check_vllm_flags
from bateleur.runner.sampling_params import recommended_sampling
from bateleur.runner.utils.vllm_names import ENGINE

FLAGS = (Path(__file__).parent / "vllm_flags.txt").read_text().split()
"""Flags of `vllm serve` 0.33."""


def parsed(*arguments: str) -> argparse.Namespace:
    args = build_parser().parse_args(["serve", *arguments])
    check_vllm_flags(args)
    return args


def test_every_flag_of_vllm_is_known() -> None:
    subparsers = build_parser()._subparsers
    assert subparsers is not None
    command = subparsers._group_actions[0].choices["serve"]  # type: ignore[index, call-overload]
    unknown = [flag for flag in FLAGS if flag not in command._option_string_actions]
    assert unknown == []


@pytest.mark.parametrize(
    "line",
    [
        "--trust-remote-code",
        "--calculate-kv-scales",
        "--max-cpu-loras 4",
        "--pipeline-parallel-size 2",
        "--no-enable-chunked-prefill",
        '--compilation-config {"mode":3}',
        "--tool-parser-plugin x.py",
        "--api-server-count 4",
        "--trust-request-chat-template",
    ],
)
def test_what_is_not_done_is_refused_by_name(line: str) -> None:
    flag = line.partition(" ")[0].replace("--no-", "--")
    with pytest.raises(ValueError, match=rf"^{flag} is .*; it must be .*: \w+"):
        parsed(*line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--no-trust-remote-code --pipeline-parallel-size 1 --enable-chunked-prefill",
        "--language-model-only --mm-processor-cache-gb 0 --limit-mm-per-prompt {} --disable-log-stats",
        "--enable-prompt-tokens-details --max-log-len 100 --load-format safetensors --runner generate",
        "--no-enable-log-requests --moe-backend auto --swap-space 0 --cpu-offload-gb 0 --allowed-methods *",
    ],
)
def test_what_asks_for_what_happens_is_accepted(line: str) -> None:
    args = parsed("/models/m", *line.split())
    assert args.model == Path("/models/m")
    assert not given_options(args, OPTIONS), "no option of the engine is set"


def test_names_of_parallel_sizes_and_of_the_model() -> None:
    args = parsed("--model", "/models/m", "-tp", "2", "--enforce-eager")
    assert (args.named_model, args.tensor_parallel_size, args.enforce_eager) == (Path("/models/m"), 2, True)
    with pytest.raises(ValueError, match="--model /b: must be left out if MODEL"):
        serve.run(build_parser().parse_args(["serve", "/a", "--model", "/b"]))


def test_json_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    args = parsed("--speculative-config", json.dumps(config), "--hf-overrides", '{"a": 1}')
    assert (args.speculative_config, args.hf_overrides) == (config, {"a": 1})
    assert parsed("--default-chat-template-kwargs", "{}").default_chat_template_kwargs == {}
    with pytest.raises(SystemExit):
        parsed("--override-generation-config", "[1]")
    assert "invalid JSON object value: '[1]'" in capsys.readouterr().err


def test_no_name_is_explained_twice() -> None:
    assert not ENGINE.keys() & SERVER.keys()
    assert not {*ENGINE, *SERVER} & set(OPTIONS)
    for name, (values, why) in {**ENGINE, **SERVER}.items():
        assert why or ... in values or (True in values and False in values), f"{name} has no reason"


def test_sampling_defaults_come_from_a_folder_or_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    assert recommended_sampling(tmp_path) == {"temperature": 0.5, "top_k": 7}
    assert recommended_sampling(tmp_path, "vllm") == {}
    assert recommended_sampling(shipped_model(), str(tmp_path))["top_k"] == 7
    over: dict[str, Any] = {"temperature": 0.25, "max_new_tokens": 5, "do_sample": True}
    assert recommended_sampling(tmp_path, overrides=over) == {"temperature": 0.25, "top_k": 7, "max_tokens": 5}
    with pytest.raises(ValueError, match="override_generation_config: temperature is 'hot'"):
        recommended_sampling(tmp_path, overrides={"temperature": "hot"})
    with pytest.raises(ValueError, match="generation_config is '/nowhere'; it must be auto, vllm, or a folder with"):
        recommended_sampling(tmp_path, "/nowhere")


def test_an_engine_takes_sampling_defaults() -> None:
    llm = LLM(
        device="cpu",
        max_num_seqs=1,
        max_model_len=64,
        override_generation_config={"max_new_tokens": 3, "temperature": 0},
    )
    (output,) = llm.generate("def f(")
    assert len(output.outputs[0].token_ids) == 3
    assert llm.get_default_sampling_params().greedy


def test_fields_of_the_configuration_are_overridden(tmp_path: Path) -> None:
    folder = tiny.save(tiny.make_model("llama"), tmp_path / "model")
    plain = open_checkpoint(folder)
    overrides = {"rope_parameters": {"rope_theta": 5e5}, "max_position_embeddings": 32}
    changed = open_checkpoint(folder, overrides)
    assert (changed.spec.max_position_embeddings, changed.overrides) == (32, overrides)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    said = json.loads((folder / "config.json").read_text())
    said["max_position_embeddings"] = 32
    said["rope_parameters"]["rope_theta"] = 5e5
    (other / "config.json").write_text(json.dumps(said))
    assert changed.spec == open_checkpoint(other).spec != plain.spec
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*range(1, 20)]}]
    texts = [
        LLM(where, device="cpu", skip_tokenizer_init=True, **more).generate(prompts, params)[0].outputs[0].token_ids
        for where, more in ((folder, {"hf_overrides": overrides}), (other, {}))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match=r"config\.json with hf_overrides: hidden_size is 'x'"):
        open_checkpoint(folder, {"hidden_size": "x"})
