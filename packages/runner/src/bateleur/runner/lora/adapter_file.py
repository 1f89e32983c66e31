"""Reads a LoRA adapter: a folder that PEFT wrote, with `adapter_config.json` and `adapter_model.safetensors`."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bateleur.runner.checkpoint.names import Names, WeightPart
from bateleur.runner.models.lora import is_adaptable
from bateleur.runner.utils.arguments import Number, refuse, shown
from bateleur.runner.utils.json_file import errors_in, read_json
from bateleur.runner.utils.tensor_files import DTYPES, renamed

_WEIGHT = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
_REFUSED = (
    *("use_dora", "use_qalora", "alora_invocation_tokens", "lora_bias"),
    *("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"),
)
"""Fields of `adapter_config.json` that ask for more than two matrices for each projection, or for other layers."""
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What `init_lora_weights` begins with if PEFT changes the base weights, too."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter."""
_LISTED = 20
"""Tensors that an error names."""
Prefixes = Sequence[tuple[str, str]]
LowRank = tuple[Tensor, Tensor]
"""A (rank, columns) and B (rows, rank) float32: `B A` is added to a projection's weight in the whole model."""


def read_adapter(
    folder: Path, names: Names, shapes: Mapping[str, tuple[int, ...]], prefixes: Prefixes, max_rank: int
) -> dict[str, LowRank]:
    """Return the matrices A (rank, columns) and B (rows, rank), float32, of each projection that the adapter changes.

    They are keyed by the name of the projection's weight, such as `layers.0.qkv_proj`. B is already multiplied by the
    module's scale, such as `lora_alpha / r`. If a projection joins several modules (q, k and v), each module has its
    own rows of A and columns of B, so `rank` is the sum of their ranks.

    names: `Checkpoint.names`, which maps tensor names of the checkpoint to the model's weights, or to rows of them.
    shapes: shape of every weight of the whole model, by name. prefixes: `Checkpoint.other_prefixes`, pairs (prefix of
    tensor names in some files, prefix in `names`). max_rank: largest rank of one module.
    Raises ValueError if the folder is no adapter that fits the model (all problems are listed).
    """
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    if not (config_file.is_file() and weights_file.is_file()):
        raise ValueError(f"lora_path={folder}: must hold {CONFIG} and {WEIGHTS}")
    config = read_json(config_file)
    with errors_in(config_file):
        _check_config(config)
    modules, stored, problems = _read_modules(weights_file, prefixes)
    parts: dict[str, list[tuple[WeightPart, Tensor, Tensor]]] = {}
    for module, pair in modules.items():
        part = names.get(f"{module}.weight")
        problem = _problem(part, pair, shapes, max_rank)
        if problem:
            problems.append(f"{module}: {problem}")
        elif part is not None:
            scale = _scale(config, stored[module], len(pair["A"]))
            low, high = pair["A"].float(), pair["B"].float() * scale
            if not (low.isfinite().all() and high.isfinite().all()):
                problems.append(f"{module}: holds NaN or infinity (lora_B is multiplied with {scale:g})")
            parts.setdefault(part.target, []).append((part, low, high))
    if problems:
        listed = "\n  ".join(problems[:_LISTED])
        raise ValueError(f"{weights_file}: {len(problems)} tensors do not fit the model:\n  {listed}")
    if not parts:
        raise ValueError(f"{weights_file}: holds no tensors; the adapter is empty")
    return {target: _joined(found, shapes[target][0]) for target, found in parts.items()}


def _read_modules(file: Path, prefixes: Prefixes) -> tuple[dict[str, dict[str, Tensor]], dict[str, str], list[str]]:
    """Return, by module: its matrices under "A" and "B", and its name in the file. Also return errors, as sentences.

    prefixes: see `read_adapter`.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    stored: dict[str, str] = {}
    problems: list[str] = []
    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  safetensors has no iterator
                match = _WEIGHT.fullmatch(name)
                if match is None:
                    problems.append(f"{name}: is neither lora_A nor lora_B of a linear layer")
                    continue
                module = renamed(match["module"], prefixes)
                stored.setdefault(module, match["module"])
                pair = modules.setdefault(module, {})
                if match["matrix"] in pair:
                    problems.append(f"{name}: the module has two of them, under other names")
                pair[match["matrix"]] = tensors.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file}: {error}") from error
    return modules, stored, problems


def _joined(found: Sequence[tuple[WeightPart, Tensor, Tensor]], rows: int) -> LowRank:
    """Join A and B of all modules of one projection. The rows of B are ordered as the rows of the projection's weight.

    found: (rows of the weight, A, B) for each module. rows: number of rows of the weight.
    """
    a = torch.cat([each for _, each, _ in found])
    b, lane = torch.zeros(rows, len(a)), 0
    for part, low, high in found:
        b[part.start : part.start + len(high), lane : lane + len(low)] = part.read(high)
        lane += len(low)
    return a, b


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        refuse("peft_type", config.get("peft_type"), "'LORA'")
    for name in _REFUSED:
        if config.get(name):
            raise ValueError(f"{name} is {shown(config[name])}; adapters with it are not supported")
    if config.get("bias", "none") != "none":
        refuse("bias", config["bias"], "'none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGE_WEIGHTS):
        raise ValueError(f"init_lora_weights is {start!r}, which changes the base weights; convert the adapter")
    if not isinstance(patterns := config.get("alpha_pattern") or {}, dict):
        refuse("alpha_pattern", patterns, "an object")
    Number()("lora_alpha", config.get("lora_alpha", 8))
    for pattern, alpha in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"alpha_pattern has {shown(error.pattern)}: {error}") from error
        Number()(f"alpha_pattern[{pattern!r}]", alpha)


def _problem(
    part: WeightPart | None, pair: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], max_rank: int
) -> str | None:
    if part is None:
        return "the model has no such module"
    if part.expert is not None or len(shapes[part.target]) != 2 or not is_adaptable(part.target):
        return "adapters of embeddings, lm_head, routers and experts are not supported"
    if len(pair) < 2:
        return "lora_A and lora_B come in pairs"
    for side, matrix in pair.items():
        if matrix.ndim != 2 or matrix.dtype not in DTYPES.values():
            dtypes = ", ".join(DTYPES)
            return f"lora_{side} is {matrix.dtype} {tuple(matrix.shape)}; it must be a matrix in {dtypes}"
    (rank, columns), (rows, b_rank) = pair["A"].shape, pair["B"].shape
    all_rows, all_columns = shapes[part.target]
    wanted = all_rows if part.rows is None else part.rows
    if not rank or rank != b_rank or columns != all_columns or rows != wanted:
        found = f"lora_A is ({rank}, {columns}) and lora_B ({rows}, {b_rank})"
        return f"{found}; they must be (r, {all_columns}) and ({wanted}, r)"
    if rank > max_rank:
        return f"rank {rank} is above max_lora_rank={max_rank}; raise max_lora_rank"
    return None


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return a module's scale: `lora_alpha / r`, or with `use_rslora` `lora_alpha / sqrt(r)` (Kalajdzievski 2023)."""
    patterns = config.get("alpha_pattern") or {}
    own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = next(own, config.get("lora_alpha", 8))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
