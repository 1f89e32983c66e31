"""What a checkpoint says of sampling: `generation_config.json`, read as vLLM reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.json_file import read_json

_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Names of the file, and ours."""
_NOT_SAMPLING = ("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
"""Fields of the file that say nothing about how tokens are drawn."""


def recommended_sampling(
    folder: Path, generation_config: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Sampling parameters that a checkpoint folder recommends, by name; none where it says nothing.

    generation_config: "auto", the file of the folder; "vllm", none; or another folder. overrides: fields in place of
    those of the file, or sampling parameters. Raises ValueError, naming the file, for a value that can't be one.
    """
    where = folder if generation_config == "auto" else Path(generation_config)
    file = where / "generation_config.json"
    if generation_config not in ("auto", "vllm") and not file.is_file():
        raise ValueError(
            f"generation_config={generation_config!r}: must be auto, vllm, or a folder with {file.name}"
        )
    said = read_json(file) if generation_config != "vllm" and file.is_file() else {}
    chosen = {ours: said[theirs] for theirs, ours in _NAMES.items() if said.get(theirs) is not None}
    try:
        SamplingParams.from_dict(chosen)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    given = {_NAMES.get(name, name): value for name, value in (overrides or {}).items()}
    given = {name: value for name, value in given.items() if name not in _NOT_SAMPLING}
    try:
        SamplingParams.from_dict(chosen | given)
    except ValueError as error:
        raise ValueError(f"override_generation_config: {error}") from error
    return chosen | given
