"""Sampling parameters that a checkpoint recommends, and where they apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner import LLM, SamplingParams
from bateleur.runner.assets import shipped_model
from bateleur.runner.cli import generate, main
from bateleur.runner.sampling_params import recommended_sampling


def test_it_is_read_as_vllm_reads_it(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}
    said = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 9, "top_p": None, "do_sample": False, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert recommended_sampling(tmp_path) == {"temperature": 0.5, "top_k": 7, "max_tokens": 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": -1}', "temperature is -1; it must be a finite number"),
        ('{"top_p": "most"}', "top_p is 'most'; it must be a finite number"),
        ("[]", "holds list; it must hold a JSON object"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_file(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json: ") as refused:
        recommended_sampling(tmp_path)
    assert str(refused.value).startswith(f"{file}: ")
    assert message in str(refused.value)
    assert main(["generate", "x", "--model", str(tmp_path)]) == 2
    assert str(file) in capsys.readouterr().err


def test_the_command_takes_it_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(generate, "_stream", lambda args, params, adapters: taken.append(params) or 0)
    main(["generate", "x"])
    shipped = recommended_sampling(shipped_model())
    assert shipped
    assert {name: getattr(taken[-1], name) for name in shipped} == shipped
    main(["generate", "x", "--temperature", "0.1"])
    assert taken[-1].temperature == 0.1
    assert taken[-1].repetition_penalty == shipped["repetition_penalty"]
    main(["generate", "x", "--model", str(tmp_path)])
    assert (taken[-1].temperature, taken[-1].top_p, taken[-1].repetition_penalty) == (0.8, 0.95, 1.0)


def test_llm_takes_it_for_requests_without_parameters() -> None:
    llm = LLM(device="cpu", max_model_len=64, max_num_seqs=2)
    default = llm.get_default_sampling_params()
    assert default == SamplingParams(**recommended_sampling(shipped_model()))
    assert default != SamplingParams()
    (group,) = llm._input_processor.requests("x", None, taken=())
    assert group.members[0].params is default
    name = llm.add_request("x")
    assert llm.engine.registry.requests[name].members[0].params is default
