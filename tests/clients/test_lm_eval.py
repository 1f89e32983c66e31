"""lm-eval's `local-completions`, which asks for log probabilities of prompts and for greedy text."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from bateleur.runner import LLM, SamplingParams

CHOICES = [
    ("def area(self):\n    return", [" self.width", " import os"], 0),
    ("import numpy as", [" np", " self"], 0),
    ("for i in range(", ["class", "len(", "10)"], 1),
    ("if __name__ ==", [' "__main__"', " self"], 0),
    ("class Shape:\n    def __init__(", ["self", "x, y", "return"], 0),
]
TEXTS = ["def parse(text):\n", "import os\n", "class Node:\n"]
CHOICE_TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXT_TASK = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path, targets: list[str]) -> None:
    rows = {
        "choices": [{"context": c, "choices": choices, "label": label} for c, choices, label in CHOICES],
        "texts": [{"context": c, "target": target} for c, target in zip(TEXTS, targets, strict=True)],
    }
    for name, task in (("choices", CHOICE_TASK), ("texts", TEXT_TASK)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(task.format(data=data))


def likelihood(llm: LLM, context: str, choice: str) -> float:
    """Log probability of a choice behind its context, token by token, without a server."""
    whole = llm.tokenizer.encode(context + choice, add_special_tokens=False)
    begins = len(llm.tokenizer.encode(context, add_special_tokens=False))
    (output,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    told = zip(whole[begins:], output.prompt_logprobs[begins:], strict=True)
    return sum(each[token].logprob for token, each in told if each is not None)


def test_its_scores_are_those_of_the_model(server: str, clients: Path, tmp_path: Path) -> None:
    llm = LLM(device="cpu", dtype="float32", max_model_len=512)
    greedy = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=24, stop=["\n\n"])
    prompts = [llm.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    targets = [output.outputs[0].text for output in llm.generate(prompts, greedy)]
    targets[-1] += " and more"  # one of three is to fail
    write_tasks(tmp_path, targets)
    arguments = f"model=shipped,base_url={server}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
    command = [
        str(clients / "lm_eval"),
        *("--model", "local-completions", "--model_args", arguments, "--batch_size", "2"),
        *("--include_path", str(tmp_path), "--tasks", "choices,texts", "--output_path", str(tmp_path / "out")),
    ]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    best = [
        max(range(len(choices)), key=lambda i: likelihood(llm, context, choices[i])) for context, choices, _ in CHOICES
    ]
    right = [found == label for found, (_, _, label) in zip(best, CHOICES, strict=True)]
    assert results["choices"]["acc,none"] == sum(right) / len(right)
    assert results["texts"]["exact_match,none"] == 2 / 3
