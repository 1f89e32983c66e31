"""The example on the front page runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def test_example_runs(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    names: dict[str, torch.Tensor] = {}
    exec(example, names)
    assert capsys.readouterr().out == "torch.Size([7, 4, 16])\n"
    whole = names["ssd_scan_varlen"](
        *(names[k] for k in ("x", "dt", "A", "B", "C", "D", "dt_bias", "ssm")),
        *(torch.tensor(v, dtype=torch.int32) for v in ([0, 7], [0, 7], [0], [0, 1])),
        *(1, 7, names["null"], torch.tensor([2]), 0.0, float("inf")),
    )
    torch.testing.assert_close(whole, torch.cat([names["y"], names["last"]]), rtol=1e-4, atol=1e-4)
