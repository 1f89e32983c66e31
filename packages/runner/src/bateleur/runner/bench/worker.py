"""One engine in a process of its own: it loads once, and generates for each line that comes in.

This file is run as a script, by a Python that may lack this package, so it imports nothing of it before `bateleur` is
asked for: `python worker.py NAME SETTINGS`. A line in is {"prompts": [[ids], ...], "tokens": [n, ...]}; a line out
begins with "done " and is {"seconds": ..., "cpu_seconds": ..., "ids": [[...], ...]}. Before the first comes "ready ",
and an object of what is worth knowing. Everything is greedy, and nothing ends before its number of tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Ids = list[list[int]]
Generate = Callable[[Ids, list[int]], Ids]


def bateleur(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """This house's `LLM`, with all options that were given."""
    import torch

    from bateleur.runner import LLM, SamplingParams

    if settings.get("num_threads"):
        torch.set_num_threads(settings["num_threads"])
    llm = LLM(settings["model"], **settings["options"])

    def generate(prompts: Ids, tokens: list[int]) -> Ids:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate, {"version": f"torch {torch.__version__}", "dtype": str(llm.dtype).removeprefix("torch.")}


def transformers(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """`generate` on one static batch, padded on the left, which runs to its longest request."""
    import torch
    import transformers as library

    if settings.get("num_threads"):
        torch.set_num_threads(settings["num_threads"])
    library.logging.set_verbosity_error()
    dtype = getattr(torch, settings["dtype"])
    load = library.AutoModelForCausalLM.from_pretrained
    model = load(settings["model"], dtype=dtype).to(settings["device"]).eval()

    def generate(prompts: Ids, tokens: list[int]) -> Ids:
        width, longest = max(map(len, prompts)), max(tokens)
        ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        with torch.no_grad():
            out = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                repetition_penalty=1.0,
                pad_token_id=0,
            )
        return [row[width : width + count].tolist() for row, count in zip(out, tokens, strict=True)]

    return generate, {"version": f"transformers {library.__version__}"}


def vllm(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """vLLM's `LLM`; eager on a CPU, where it would compile for minutes."""
    import vllm as library

    llm = library.LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enforce_eager=settings["device"] == "cpu",
        enable_prefix_caching=False,
    )

    def generate(prompts: Ids, tokens: list[int]) -> Ids:
        params = [
            library.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens
        ]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    return generate, {"version": f"vllm {library.__version__}"}


def llama_cpp(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """llama.cpp on a GGUF file of the same weights, one request after the other."""
    import llama_cpp as library

    threads = settings.get("num_threads") or os.cpu_count()
    model = library.Llama(settings["gguf"], n_ctx=settings["max_model_len"], n_threads=threads, verbose=False)

    def generate(prompts: Ids, tokens: list[int]) -> Ids:
        found = []
        for prompt, count in zip(prompts, tokens, strict=True):
            model.reset()
            model.eval(prompt)
            drawn = [int(model.sample(temp=0.0))]
            while len(drawn) < count:
                model.eval(drawn[-1:])
                drawn.append(int(model.sample(temp=0.0)))
            found.append(drawn)
        return found

    return generate, {"version": f"llama-cpp-python {library.__version__}"}


def read(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """No engine: it reads memory from one end to the other, `passes` times, and says how many bytes that were."""
    import torch

    if settings.get("num_threads"):
        torch.set_num_threads(settings["num_threads"])
    device = torch.device(settings["device"])
    memory = torch.ones(settings["read_bytes"] // 4, device=device)

    def generate(prompts: Ids, tokens: list[int]) -> Ids:
        for _ in range(tokens[0]):
            memory.sum()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return [[memory.nbytes * tokens[0]]]

    return generate, {}


ENGINES: dict[str, Callable[[dict[str, Any]], tuple[Generate, dict[str, Any]]]] = {
    "bateleur": bateleur,
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "read": read,
}


def main() -> None:
    """Load, say so, and answer line by line until there are no more."""
    generate, facts = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    print("ready " + json.dumps(facts), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        ids = generate(asked["prompts"], asked["tokens"])
        spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print("done " + json.dumps(spent | {"ids": ids}), flush=True)


if __name__ == "__main__":
    main()
