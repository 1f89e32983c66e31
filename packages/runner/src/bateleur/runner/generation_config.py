"""Default sampling parameters of a checkpoint (`generation_config.json`), read as in vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.utils.arguments import refuse
from bateleur.runner.utils.json_file import read_json

_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Fields of the file and the sampling parameters that they set."""
_NOT_SAMPLING = ("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")


def recommended_sampling(
    folder: Path, generation_config: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the sampling parameters that a checkpoint folder recommends, by name.
    generation_config: "auto" reads the file of the folder if there is one, "vllm" reads none, else another folder.
    overrides: fields of the file or sampling parameters that replace those of the file. Raises ValueError, naming the
    file, for an invalid value.
    """
    source = folder if generation_config == "auto" else Path(generation_config)
    file = source / "generation_config.json"
    if generation_config not in ("auto", "vllm") and not file.is_file():
        refuse("generation_config", generation_config, f"auto, vllm, or a folder with {file.name}")
    stored = read_json(file) if generation_config != "vllm" and file.is_file() else {}
    params = {ours: stored[theirs] for theirs, ours in _NAMES.items() if stored.get(theirs) is not None}
    given = {_NAMES.get(name, name): value for name, value in (overrides or {}).items()}
    params_and_given = params | {name: value for name, value in given.items() if name not in _NOT_SAMPLING}
    for origin, values in ((str(file), params), ("override_generation_config", params_and_given)):
        try:
            SamplingParams.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from error
    return params_and_given
