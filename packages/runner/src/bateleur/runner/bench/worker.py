"""Worker process of a compared engine: loads it once, then generates greedily for each line of stdin.

    python worker.py NAME SETTINGS

The script runs in environments without this package, so only the engine `bateleur` imports it. Input lines are
{"prompts": [[ids], ...], "tokens": [n, ...]}. After loading, it prints "ready " and an object with the version; for
each input line it prints "done " and {"seconds": ..., "cpu_seconds": ..., "ids": [[...], ...]}. An
end-of-text token does not end a request.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

TokenIds = list[list[int]]
Generate = Callable[[TokenIds, list[int]], TokenIds]  # generates for prompts so many tokens each


def _torch(settings: dict[str, Any]) -> Any:
    import torch

    if settings.get("num_threads"):
        torch.set_num_threads(settings["num_threads"])
    return torch


def bateleur(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load bateleur's `LLM`. Returns the function that generates, and a dict with torch's version and the dtype.

    settings: `model`, `options` of `LLM`, `dtype`, `device`, `num_threads`, `max_model_len`, `max_num_seqs`.
    """
    from bateleur.runner import LLM, SamplingParams

    torch = _torch(settings)
    llm = LLM(settings["model"], **settings["options"])

    def generate(prompts: TokenIds, tokens: list[int]) -> TokenIds:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate, {"version": f"torch {torch.__version__}", "dtype": str(llm.dtype).removeprefix("torch.")}


def transformers(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load a transformers model; settings and result as for `bateleur`.

    It runs one static batch, padded on the left, until the longest request ends.
    """
    import transformers as library

    torch = _torch(settings)
    library.logging.set_verbosity_error()
    load = library.AutoModelForCausalLM.from_pretrained
    model = load(settings["model"], dtype=getattr(torch, settings["dtype"])).to(settings["device"]).eval()
    # `min_new_tokens` would mask end-of-text tokens. The other engines may emit them, and continue.
    model.generation_config.eos_token_id = None

    def generate(prompts: TokenIds, tokens: list[int]) -> TokenIds:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        with torch.no_grad():
            greedy = {"max_new_tokens": max(tokens), "do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0}
            out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **greedy)
        return [row[width : width + count].tolist() for row, count in zip(out, tokens, strict=True)]

    return generate, {"version": f"transformers {library.__version__}"}


def vllm(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load vLLM's `LLM`; settings and result as for `bateleur`. It runs eagerly on a CPU, because compilation takes
    minutes there.
    """
    import vllm as library

    llm = library.LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enforce_eager=settings["device"] == "cpu",
        enable_prefix_caching=False,
    )

    def generate(prompts: TokenIds, tokens: list[int]) -> TokenIds:
        params = [library.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    return generate, {"version": f"vllm {library.__version__}"}


def llama_cpp(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load the file `settings["gguf"]` of the same weights in llama.cpp; settings and result as for `bateleur`.

    Requests run one after the other.
    """
    import llama_cpp as library

    threads = settings.get("num_threads") or os.cpu_count()
    model = library.Llama(settings["gguf"], n_ctx=settings["max_model_len"], n_threads=threads, verbose=False)

    def generate(prompts: TokenIds, tokens: list[int]) -> TokenIds:
        outputs = []
        for prompt, count in zip(prompts, tokens, strict=True):
            model.reset()
            model.eval(prompt)
            ids = [int(model.sample(temp=0.0))]
            while len(ids) < count:
                model.eval(ids[-1:])
                ids.append(int(model.sample(temp=0.0)))
            outputs.append(ids)
        return outputs

    return generate, {"version": f"llama-cpp-python {library.__version__}"}


def read(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Return a function (prompts, tokens) that measures memory bandwidth instead of generating, and an empty dict.

    It sums a buffer of `settings["read_bytes"]` bytes `tokens[0]` times and ignores the prompts. In place of token ids
    it returns [[number of bytes read]].
    """
    torch = _torch(settings)
    device = torch.device(settings["device"])
    memory = torch.ones(settings["read_bytes"] // 4, device=device)

    def generate(prompts: TokenIds, tokens: list[int]) -> TokenIds:
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
    """Load the engine and answer lines of stdin until it is closed."""
    generate, facts = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    print("ready " + json.dumps(facts), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        ids = generate(task["prompts"], task["tokens"])
        times = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print("done " + json.dumps(times | {"ids": ids}), flush=True)


if __name__ == "__main__":
    main()
