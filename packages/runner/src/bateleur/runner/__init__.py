"""The inference engine: scheduler, caches, models, sampling, `LLM` and the command line.

from bateleur.runner import LLM, SamplingParams

llm = LLM()  # the model that is shipped with the package
for output in llm.generate(["def f(x):"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)

Names are imported on first use, so that `bateleur --help` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bateleur.runner.async_llm import AsyncLLM
    from bateleur.runner.llm import LLM
    from bateleur.runner.lora.adapter_manager import LoRARequest
    from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
    from bateleur.runner.sampling_params import SamplingParams
    from bateleur.runner.stats import EngineStats
    from bateleur.runner.structured_outputs import StructuredOutputsParams
else:
    _MODULES = {
        "LLM": "llm",
        "AsyncLLM": "async_llm",
        "CompletionOutput": "outputs",
        "EngineStats": "stats",
        "LoRARequest": "lora.adapter_manager",
        "Logprob": "outputs",
        "RequestOutput": "outputs",
        "RequestOutputKind": "outputs",
        "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "structured_outputs",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineStats",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
