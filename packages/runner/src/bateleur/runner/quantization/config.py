"""Finds the configuration of a quantised checkpoint, and the reader for its method."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bateleur.runner.quantization.compressed_tensors import CompressedTensorsReader
from bateleur.runner.quantization.floats import Fp8Reader, ModeloptReader, Mxfp4Reader
from bateleur.runner.quantization.gptq import AutoRoundReader, AwqReader, GptqReader
from bateleur.runner.quantization.matching import objects
from bateleur.runner.quantization.module import QuantizedReader
from bateleur.runner.utils.json_file import errors_in, read_json

READERS: dict[str, Callable[[Mapping[str, Any]], QuantizedReader]] = {
    "fp8": Fp8Reader,
    "compressed-tensors": CompressedTensorsReader,
    "modelopt": ModeloptReader,
    "gptq": GptqReader,
    "awq": AwqReader,
    "auto-round": AutoRoundReader,
    "mxfp4": Mxfp4Reader,
}
"""Readers by `quant_method`."""
_SAME = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}
"""Other names of methods, from files and from the options of vLLM."""
_REASONS = {
    "bitsandbytes": "it has no published layout of its own; use an FP8 or W4A16 checkpoint of the model",
    "mxfp8": "MXFP8 is not read yet",
    "quark": "quark is not read yet",
}
"""Why some methods are refused."""
_FALLBACKS = (("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
"""Files that replace `quantization_config` of config.json, and their methods."""
CONFIGURATIONS = ("config.json", *(name for name, _ in _FALLBACKS))
"""Files of a checkpoint folder that say how its tensors are read."""


def quantization_fields(path: Path, config: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]]:
    """Return the file that describes the quantisation of the checkpoint folder `path`, and the fields in it.

    config: fields of config.json. Returns config.json and {} if the checkpoint is not quantised.
    """
    file = path / "config.json"
    with errors_in(file):
        fields = _fields(config)
    for name, method in _FALLBACKS:
        if not fields and (path / name).is_file():
            file = path / name
            found = read_json(file)
            with errors_in(file):
                inner = objects(found, "quantization") if "quantization" in found else found
            fields = {"quant_method": method, **inner}
    return file, fields


def read_quantization(path: Path, config: Mapping[str, Any]) -> QuantizedReader | None:
    """Return the reader for the checkpoint folder `path`; None if it is not quantised. config: fields of config.json.

    Raises ValueError, naming the file, for an unsupported method or option.
    """
    file, fields = quantization_fields(path, config)
    with errors_in(file):
        return reader_of(fields) if fields else None


def reader_of(fields: Mapping[str, Any]) -> QuantizedReader:
    """Return the reader for a `quantization_config`. Raises ValueError for an unsupported method or option."""
    method = _method(fields)
    packing = str(fields.get("packing_format"))
    if method == "auto-round" and "awq" in packing:
        method = "awq"
    elif method == "auto-round" and "llm_compressor" in packing:
        method = "compressed-tensors"
    if method not in READERS:
        why = next((reason for name, reason in _REASONS.items() if name in method), "nothing here reads it")
        said, supported = fields.get("quant_method"), ", ".join(READERS)
        raise ValueError(f"quantization_config: quant_method is {said!r}; {why}. Supported are {supported}")
    return READERS[method](fields)


def check_method(quantization: str, reader: QuantizedReader | None) -> None:
    """Raise ValueError if the option `quantization` names another method than the checkpoint has."""
    found = "none" if reader is None else _method(reader.fields)
    if found != _SAME.get(quantization, quantization):
        raise ValueError(
            f"quantization is {quantization!r}; the method of the checkpoint is {found}: leave the option out"
        )


def _method(fields: Mapping[str, Any]) -> str:
    """Return the usual name of `quant_method`, such as gptq for gptq_marlin. `READERS` has the supported ones."""
    said = str(fields.get("quant_method")).lower()
    return _SAME.get(said, said.replace("_", "-"))


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `quantization_config` of the whole model, or else of its text model; empty if neither has one."""
    inner = config.get("text_config")
    for where in (config, inner if isinstance(inner, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            found = where.get(name)
            if found is None or found == {}:
                continue
            if not isinstance(found, dict):
                raise ValueError(f"{name} is {found!r}; it must be an object")
            return found
    return {}
