"""Finds the cause of a low draft acceptance rate: engine, features, norms, vocabulary, or the head's training."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bateleur.runner.assets import shipped_draft, shipped_model
from bateleur.runner.checkpoint.open import Checkpoint, open_checkpoint
from bateleur.runner.checkpoint.tokenizer import load_tokenizer
from bateleur.runner.config.engine_config import NGRAM
from bateleur.runner.diagnose import explanation as kinds
from bateleur.runner.diagnose import head_alone
from bateleur.runner.diagnose.explanation import ConventionResult, Explanation, Run, conclude
from bateleur.runner.diagnose.head_alone import Convention, RecordedText, RecordingDrafter
from bateleur.runner.engine.input_processor import Prompt
from bateleur.runner.errors import ContradictoryTokens
from bateleur.runner.llm import LLM
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.spec_decode.draft_head import DraftHead
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer
from bateleur.runner.utils.arguments import refuse

TEMPERATURES = (0.0, 0.8)

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\n\ndef walk(path):\n",
    "class Stack:\n    def __init__(self",
    'def main():\n    """Parse the command line and',
    "for line in open(filename):\n    ",
    "    def test_empty(self):\n        self.assert",
    "try:\n    import json\nexcept ImportError:\n",
    "# Return the smallest item of the list, or None if",
    "    if not isinstance(value, str):\n        raise",
    "class Node(object):\n    def insert(self, key, value):\n",
    "    while True:\n        data = self.read(",
    "The following functions are available:\n\n",
)


def explain(
    model: str | Path | None,
    draft: str | Path,
    *,
    prompts: Sequence[str | list[int]] | None = None,
    num_speculative_tokens: int = 4,
    max_tokens: int = 64,
    device: str | torch.device = "auto",
    **engine: Any,
) -> Explanation:
    """Find what limits the acceptance rate of a draft head.

    It compares three runs: the head in the engine; the head alone on features recorded from the target's texts, under
    every `Convention` (interpretation of its checkpoint); and the engine with a drafter that knows the target's texts.

    model: folder of the target; None is the shipped model. draft: folder of the head, "mtp" for the head in the
    target's files, or "auto" for the shipped head. prompts: texts or token ids; by default twelve beginnings of Python
    code. engine: further options of `LLM` for all engines.

    Raises ValueError if an argument is out of range, a folder is invalid, or the outputs are too short.
    """
    k = num_speculative_tokens
    if draft == NGRAM:
        refuse("draft", draft, "the folder of a head: prompt lookup has no head to diagnose")
    if max_tokens < k + 2:
        raise ValueError(f"max_tokens is {max_tokens}; with num_speculative_tokens = {k} it must be at least {k + 2}")
    checkpoint = open_checkpoint(shipped_model() if model is None else model)
    ids = _tokenised(PROMPTS if prompts is None else prompts, checkpoint)
    longest = min(max(map(len, ids)) + max_tokens + k + 1, checkpoint.spec.max_position_embeddings)
    settings: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": min(len(ids), 16), "device": device}
    settings |= {"skip_tokenizer_init": True, "num_speculative_tokens": k}
    folder = shipped_draft() if draft == "auto" else draft
    study = _AcceptanceStudy(checkpoint, folder, settings | engine, ids, max_tokens, k)
    if study.run_engine(kinds.ENGINE):
        study.run_engine(kinds.EAGER, cudagraph_mode="NONE")
    facts = study.run_head_alone()
    study.run_oracle()
    return conclude(replace(facts, runs=tuple(study.runs)), study.problems)


def _tokenised(prompts: Sequence[str | list[int]], checkpoint: Checkpoint) -> list[list[int]]:
    """Return the token ids of the prompts, without duplicates."""
    texts = any(isinstance(prompt, str) for prompt in prompts)
    tokenizer: Tokenizer = load_tokenizer(checkpoint) if texts else NoTokenizer()
    encoded = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    unique = [list(ids) for ids in dict.fromkeys(map(tuple, encoded))]
    if not unique or not all(unique):
        raise ValueError(f"prompts has {len(unique)} entries; it must have at least one, and none may be empty")
    return unique


@dataclass
class _AcceptanceStudy:
    """Runs the measurements of `explain` and collects them. Only one engine exists at a time.

    settings: options of `LLM`. k: number of drafts per step. runs: counts of the runs so far. texts: prompt and output
    tokens of every prompt by temperature, from decoding without drafts. problems: errors of the engine, as sentences
    for `Explanation.conclusions`.
    """

    checkpoint: Checkpoint
    draft: str | Path
    settings: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int
    k: int
    runs: list[Run] = field(default_factory=list)
    texts: dict[float, list[list[int]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def load_engine(self, **overrides: Any) -> LLM:
        gc.collect()  # frees the memory of the previous engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return LLM(self.checkpoint.path, **(self.settings | overrides))

    def run_engine(self, name: str, **overrides: Any) -> bool:
        """Run the engine with the head, and return whether it has CUDA graphs.

        name: name of the `Run` to append to `runs`. overrides: options of `LLM` that replace those of `settings`.
        """
        llm = self.load_engine(draft=self.draft, **overrides)
        for temperature in TEMPERATURES:
            self.generate(llm, temperature, name)
        return llm.engine.runner.graphs.manager is not None

    def generate(self, llm: LLM, temperature: float, name: str = "") -> list[list[int]]:
        """Generate with seed 0, and return prompt and output tokens of every prompt.

        name: name of the `Run` to append to `runs`; "" appends none.
        """
        counts = llm.get_metrics().acceptance
        assert counts is not None  # every engine here has a drafter
        tried, kept = counts.tried.copy(), counts.kept.copy()
        prompts: list[Prompt] = [{"prompt_token_ids": ids} for ids in self.prompts]
        outputs = llm.generate(prompts, SamplingParams(temperature=temperature, seed=0, max_tokens=self.max_tokens))
        if name:
            reached, accepted = (counts.tried - tried).tolist(), (counts.kept - kept).tolist()
            self.runs.append(Run(name, temperature, tuple(reached), tuple(accepted)))
        return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]

    def run_oracle(self) -> None:
        """Run the engine with a drafter that knows the texts, and append the counts to `runs`.

        A correct engine accepts every draft, and produces the same texts. If it does not, append a sentence to
        `problems`. Up to half of the texts may differ because of rounding, except in float32.
        """
        recorder = RecordingDrafter(self.k, self.checkpoint.spec.num_layers)
        llm = self.load_engine(drafter=recorder, draft_policy="fixed")
        for temperature, texts in self.texts.items():
            recorder.script, when = texts, f"at temperature {temperature:g}"
            try:
                outputs = self.generate(llm, temperature, kinds.ORACLE)
            except ContradictoryTokens as error:
                self.problems.append(f"{when} the drafter gets contradictory tokens: {error}")
                continue
            run = self.runs[-1]
            num_other = sum(text != right for text, right in zip(outputs, texts, strict=True))
            if num_other and (llm.dtype == torch.float32 or 2 * num_other > len(texts)):
                differ = f"{num_other} of {len(texts)} texts differ from plain decoding"
                self.problems.append(f"{when} {differ}: accepted drafts leave wrong states")
            elif not num_other and run.accepted != run.reached:
                rate = f"{run.tokens_per_step:.2f} tokens per step instead of {self.k + 1}"
                reason = "the engine rejects right drafts, so no head can do better"
                self.problems.append(f"{when} a drafter that is always right gives {rate}: {reason}")

    @torch.inference_mode()
    def run_head_alone(self) -> Explanation:
        """Run the head without an engine, on hidden states recorded while the target decodes without drafts.

        Returns the measurements of the head. `runs`, `causes` and `conclusions` are empty; `explain` fills them.
        Sets `texts`, and appends one `Run` to `self.runs`. Raises ValueError if the outputs are too short for drafts.
        """
        spec = self.checkpoint.spec
        recorder = RecordingDrafter(self.k, spec.num_layers)
        plain = {"enable_prefix_caching": False, "mamba_cache_mode": None, "mamba_retention": None}
        llm = self.load_engine(drafter=recorder, draft_policy="fixed", cudagraph_mode="NONE", **plain)
        head = DraftHead.open(self.draft, llm.engine.model, checkpoint=self.checkpoint).head
        head.reserve_positions(llm.limits.max_model_len)
        tried = head_alone.conventions(head, spec.num_layers)
        recorder.keep = frozenset({spec.num_layers + 1}.union(*(each.boundaries for each in tried)))
        texts: dict[float, list[RecordedText]] = {}
        for t in TEMPERATURES:
            self.texts[t] = self.generate(llm, t)
            recorded = [recorder.recorded_text(*pair) for pair in zip(self.prompts, self.texts[t], strict=True)]
            texts[t] = [text for text in recorded if len(text.tokens) > text.prompt_len + self.k + 1]
        if not all(texts.values()):
            short = f"no output has more than {self.k + 1} tokens"
            raise ValueError(f"prompts: {short}, so nothing can be drafted; give other prompts")
        greedy, sampled = TEMPERATURES
        logits = llm.engine.model.logits
        draft = partial(head_alone.draft_by_position, num_drafts=self.k, target_logits=logits, temperature=sampled)
        steps = [draft(tried[0], text).steps() for text in texts[greedy]]
        reached, accepted = (tuple(sum(counts).tolist()) for counts in zip(*steps, strict=True))
        self.runs.append(Run(kinds.ALONE, greedy, reached, accepted))
        every = [*texts[greedy], *texts[sampled]]
        share, ids = 1.0, head.target_ids
        if ids is not None:
            output = torch.tensor([token for text in every for token in text.tokens[text.prompt_len + 1 :]])
            share = float(torch.isin(output, ids.cpu()).double().mean())

        def accepted_of(convention: Convention, *, shuffle: bool = False) -> Tensor:
            return torch.cat([draft(convention, text, shuffle=shuffle).accepted for text in every])

        declared = accepted_of(tried[0])
        results = tuple(
            ConventionResult.of(each.name, each.cause, accepted_of(each), declared, accepted_of(each, shuffle=True))
            for each in tried
        )
        facts: dict[str, Any] = {"draft": str(self.draft), "kind": head.spec.kind, "num_speculative_tokens": self.k}
        facts |= {"draft_vocab_size": head.spec.draft_vocab_size, "vocab_size": spec.vocab_size}
        return Explanation(**facts, runs=(), conventions=results, vocabulary_share=share)
