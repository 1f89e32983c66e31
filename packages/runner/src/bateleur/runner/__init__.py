"""The composition: scheduler, caches, models, sampling, `LLM` and the command line.

from bateleur.runner import LLM, SamplingParams

llm = LLM()  # the model that ships with the package
for output in llm.generate(["def f(x):"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

from bateleur.runner.llm import LLM
from bateleur.runner.outputs import CompletionOutput, Logprob, RequestOutput
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]
