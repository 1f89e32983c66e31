"""Benchmarks that access internals of the engine still work."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from bateleur.runner.assets import shipped_model

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # benchmarks import each other
    spec = spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look up their annotations there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("idle", [False, True])
def test_host_cost_has_every_part(idle: bool) -> None:
    throughput = load("throughput")
    cost = throughput.host_cost(shipped_model(), 2, 3, idle)
    assert set(cost) == {*throughput.HOST_PARTS, "total"}
    assert all(value > 0 for value in cost.values())


@pytest.mark.parametrize("drafts", [0, 4])
def test_parts_of_a_step_are_measured_by_requests(drafts: int) -> None:
    host_step = load("host_step")
    found = host_step.steps(1, drafts, (1, 2))
    assert [row["batch"] for row in found["steps"]] == [1, 2]
    for row in found["steps"]:
        assert all(0 < row[part] < row["total"] for part in host_step.PARTS)
        assert row["total"] < 60e6, "all parts are measured by one clock"
    assert {*host_step.prefixes(2, 600)} == {"hash_us", "lookup_us"}


@pytest.mark.slow
def test_speculation_is_compared_with_requests_in_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "speculative.json"
    short = ["--batches", "1", "--queue", "2", "--tokens", "12", "--rounds", "1", "--sets", "2"]
    short += ["--least", "100"]
    monkeypatch.setattr("sys.argv", ["speculative.py", *short, "--output", str(result)])
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    load("speculative").main()
    rows = json.loads(result.read_text())["results"]
    assert [(row["batch"], row["requests"], row["temperature"]) for row in rows] == [(1, 8, 0.0), (1, 8, 0.8)]
    for row in rows:
        assert row["rounds"] == 2, "96 tokens are fewer than 100"
        assert row["equal_requests"] == [row["rounds"] * row["requests"]] * 2
        assert min(row["ratio"], row["control"]) > 0
        assert 0 < row["bound"] < row["tokens_per_step"]
        assert row["cost"] > 1
        assert 0 <= row["drafted"] <= 1
    assert rows[0]["tokens_per_step"] > 1.2


def test_claims_are_judged_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = load("claims")
    rows = [{"batch": batch, "ratio": ratio} for batch, ratio in ((1, 1.3), (8, 1.25), (32, 1.2))]
    (tmp_path / "rival-cpu.json").write_text(json.dumps({"results": rows}))
    (tmp_path / "host-cpu.json").write_text(
        json.dumps(
            {
                "engine": {
                    f"{drafts} drafts": {"steps": [{"batch": 256, "per_request": 0.7}], "us_per_request": 3.1}
                    for drafts in (0, 4)
                },
                "prefixes": {"lookup_us": 100.0, "hash_us": 601.0},
            }
        )
    )
    monkeypatch.setattr("sys.argv", ["claims.py", str(tmp_path), "--judge"])
    with pytest.raises(SystemExit) as ended:
        claims.main()
    judged = json.loads((tmp_path / "claims-cpu.json").read_text())["claims"]
    assert [row["off"] for row in judged if row["off"]] == [["batch 32"], ["each further request"], ["8,000 tokens"]]
    missing = sum(not row["measured"] for row in judged)
    assert missing == len(claims.CLAIMS) - 6
    assert ended.value.code == 3 + missing
    assert "batch 8 1.25, batch 32 1.20 (!)" in capsys.readouterr().out


def test_every_claim_has_a_part_that_is_measured(tmp_path: Path) -> None:
    claims = load("claims")
    assert {claim.part for claim in claims.CLAIMS} == set(claims.commands(tmp_path, "python", "python"))
    assert "rival-cpu" not in claims.commands(tmp_path, None, None)


def by_hand(kind: str, sizes: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Counts for one layer: state entries, convolution channels, other numbers per token, and bytes per ring entry."""
    if kind == "Mamba2":
        heads, head_dim, state, groups = sizes
        inner, group = heads * head_dim, groups * state
        return inner * state, inner + 2 * group, inner + heads, 2 * inner + 2 * group + 4 * heads
    heads, key_dim, value_dim = sizes[-3:]
    keys, values = sizes[0] * key_dim, heads * value_dim
    decay = heads if kind == "GatedDelta" else heads * key_dim
    return values * key_dim, 2 * keys + values, values + decay + heads, 2 * keys + 4 * values + 4 * decay


@pytest.mark.parametrize("drafts", [0, 3, 5, 7])
def test_states_are_counted_by_hand(drafts: int) -> None:
    """Bytes of one layer of each model, computed by hand: bfloat16 activations, float32 states, windows of 3 tokens,
    rings of 16.
    """
    mamba, tokens = load("mamba"), 1 + drafts
    assert {model.kind.__name__ for model in mamba.MODELS.values()} == {"Mamba2", "GatedDelta", "KimiDelta"}
    assert (mamba.DRAFTS, min(mamba.BATCHES), max(mamba.BATCHES)) == ((0, 3, 5, 7), 1, 256)
    for model in mamba.MODELS.values():
        entries, channels, beside, entry = by_hand(model.kind.__name__, model.sizes)
        counts, state = mamba.counted(model, drafts), 4 * entries
        # The state once and after each token; channels, gates and y of every token.
        moved = (1 + tokens) * state + tokens * 2 * (channels + beside)
        assert counts["state_update_MB"] == pytest.approx(moved / 1e6)
        slots = tokens * (state + 2 * channels * (3 + drafts))
        fold = state + 2 * channels * (3 + 3 + drafts) + 16 * entry
        assert counts["request"]["slots_none_MiB"] == pytest.approx(model.layers * slots / 2**20)
        assert counts["request"]["fold_none_MiB"] == pytest.approx(model.layers * fold / 2**20)
        if drafts == 5:
            assert counts["ratio"] >= 3
            assert (5 if model.kind.__name__ == "Mamba2" else 4.5) * fold <= slots


@pytest.mark.slow
def test_mamba_benchmark_runs_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "mamba.json"
    monkeypatch.setattr("sys.argv", ["mamba.py", "--quick", "--device", "cpu", "--output", str(result)])
    load("mamba").main()
    out = capsys.readouterr().out
    assert "MB per row and layer" in out
    assert "us per layer (of bound)" in out
    assert "us on the CPU" in out
    written = json.loads(result.read_text())
    assert [row["drafts"] for row in written["counted"]] == [0, 3, 5, 7] * 3
    assert all(row["bound_us"]["fold"] > 0 for row in written["measured"])
    assert [sorted(row["us"]) for row in written["beside_transformers"]] == [
        ["replay", "transformers", "update"],
        ["replay", "transformers", "update"],
        ["scan", "transformers"],
    ] * 3


def test_growth_is_measured_with_everything_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "growth.json"
    monkeypatch.setattr("sys.argv", ["growth.py", "--quick", "--rounds", "2", "--output", str(result)])
    load("growth").main()
    written = json.loads(result.read_text())
    assert [row["cached_blocks"] for row in written["cached"]] == [1_000, 2_000]
    assert all(row["lookup_us"] > row["evict_us"] > 0 for row in written["cached"])
    assert [row["waiting"] for row in written["waiting"]] == [0, 10]


@pytest.mark.slow
def test_what_a_step_launches_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    kernels, result = load("kernels"), tmp_path / "kernels.json"
    monkeypatch.setattr("sys.argv", ["kernels.py", "--quick", "--json", str(result)])
    kernels.main()
    ((model, steps),) = json.loads(result.read_text())["models"].items()
    assert model == "Llama-3.1-8B"
    greedy, drawn = (steps[f"decode of 64 rows, {name}"] for name in ("greedy", "top_k 20, top_p 0.95"))
    assert "draw_kernel" in {row["kernel"] for row in drawn} - {row["kernel"] for row in greedy}
    for row in (*steps["prompt"], *greedy, *drawn):
        assert row["programs"] >= row["launches"] > 0
        assert sum(row["loops"][:1]) < row["instructions"]
    (norms,) = (row for row in greedy if row["kernel"] == "norm_kernel" and row["options"]["TERMS"] == 1)
    assert (norms["launches"], norms["programs"]) == (
        2,
        128,
    )  # before the MLP and before the logits, one program per row
