"""The example on the front page runs, and what it prints could be something else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

EQUAL = "[0, 18, 7, 15] True\n"


def example() -> str:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (found,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    return found


def test_example_runs(capsys):
    names: dict[str, Any] = {}
    exec(example(), names)
    assert capsys.readouterr().out == EQUAL
    # The hit is one page in two rows, and holds the state after 8 tokens still: that of either run.
    run, plain = names["run"], names["plain"]
    assert run.table[3, 0] == run.table[1, 0] == 1
    pages = [cache.pages.layer(0) for cache in (run.cache, plain.cache)]
    for conv_or_ssm, of_plain in zip(*pages, strict=True):
        torch.testing.assert_close(conv_or_ssm[1], of_plain[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("run.table[3, 0] = run.table[1, 0]", "run.table[3, 0] = run.table[1, 1]"),  # another page
        ("step.commit(kept)", "step.commit(lens)"),  # what was rejected is kept
    ],
)
def test_the_example_can_fail(capsys, right, wrong):
    assert right in example()
    exec(example().replace(right, wrong), {})
    assert capsys.readouterr().out.endswith("False\n")


def test_a_hit_that_was_not_admitted_is_refused():
    unsaid = example().replace("run.cache.admit([3], [8])", "run.cache.admit([3])")
    with pytest.raises(ValueError, match="computed is 8 in prompt row 0; of its request 0 tokens"):
        exec(unsaid, {})
