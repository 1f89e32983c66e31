"""What a checkpoint says of sampling: `generation_config.json`, read as vLLM reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bateleur.runner.json_file import read_json
from bateleur.runner.sampling_params import SamplingParams

_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Names of the file, and ours."""


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """Sampling parameters that a checkpoint folder recommends, by name; none where it says nothing.

    Raises ValueError, naming the file, for a value that can't be one.
    """
    file = folder / "generation_config.json"
    said = read_json(file) if file.is_file() else {}
    chosen = {ours: said[theirs] for theirs, ours in _NAMES.items() if said.get(theirs) is not None}
    try:
        SamplingParams.from_dict(chosen)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return chosen
