"""Benchmarks that take the engine apart still find the parts where they look for them."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.llm import shipped_model

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> Any:
    spec = spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("idle", [False, True])
def test_host_cost_has_every_part(idle: bool) -> None:
    throughput = load("throughput")
    cost = throughput.host_cost(shipped_model(), 2, 3, idle)
    assert set(cost) == {*throughput.HOST_PARTS, "total"}
    assert all(value > 0 for value in cost.values())


def test_speculation_is_compared_row_by_row() -> None:
    speculative = load("speculative")
    llm = speculative.LLM(device="cpu", max_num_seqs=1, max_model_len=128)
    draft = speculative.LLM(device="cpu", max_num_seqs=1, max_model_len=128, draft="auto")
    row = speculative.compare({"plain": llm, "fixed": draft, "auto": draft}, 1, 0.0, 12, 1)
    assert row["equal_requests"] == [1, 1]
    assert row["tokens_per_step"] > 1.2
    assert row["ratio"] > 0
