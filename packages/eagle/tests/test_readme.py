"""The example of the README runs, and what it prints could be something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def example() -> str:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (found,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return str(found)


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[float, str]]:
    """Tokens per step, and whether the text is the same, by rule."""
    pattern = r"(\w+) +([\d.]+) tokens per step, the same text: (\w+)\n"
    return {rule: (float(rate), same) for rule, rate, same in re.findall(pattern, capsys.readouterr().out)}


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example(), "README.md", "exec"), {})
    found = lines(capsys)
    assert list(found) == ["coupled", "ratio", "block"]
    assert all(rate > 2 for rate, _ in found.values())
    assert [same for _, same in found.values()] == ["True", "False", "False"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("plain = sample(target, request)", "plain = sample(target, Request([1], 100, seed=8, temperature=0.8))"),
        ("plain = sample(target, request)", "plain = sample(lambda i: (1.1 * table[i], ()), request)"),
        ("drafter, request, 4", "drafter, Request([1], 200, seed=7, temperature=0.9), 4"),
    ],
)
def test_the_texts_could_differ(capsys: pytest.CaptureFixture[str], right: str, wrong: str) -> None:
    assert right in example()
    exec(compile(example().replace(right, wrong), "README.md", "exec"), {})
    assert lines(capsys)["coupled"][1] == "False"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("Keys(seeds[owner], position)", "Keys(seeds[owner], position + 1)"), ("*drawn[:2], 0, 0", "*drawn[:1], 0, 0, 0")],
)
def test_the_step_could_differ(capsys: pytest.CaptureFixture[str], right: str, wrong: str) -> None:
    assert right in example()
    with pytest.raises(AssertionError):
        exec(compile(example().replace(right, wrong), "README.md", "exec"), {})
