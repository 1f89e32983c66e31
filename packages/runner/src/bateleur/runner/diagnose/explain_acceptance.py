"""Why drafts are accepted as rarely as they are: the engine, the features, the norms, the vocabulary, or the head."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
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
from bateleur.runner.diagnose.conventions import Convention, conventions
from bateleur.runner.diagnose.draft_offline import Chains, Recorded, Recorder, chains
from bateleur.runner.diagnose.explanation import (
    ALONE,
    EAGER,
    ENGINE,
    ORACLE,
    Explanation,
    Reading,
    Run,
    conclude,
)
from bateleur.runner.engine.input_processor import Prompt
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
    """Find out what keeps the acceptance of a draft head low.

    The head runs in the engine; alone, behind features that were recorded along the target's own texts, as its
    checkpoint declares it and as it could have been meant; and the engine runs with a drafter that knows what the
    target will say.

    model: the target's folder; None is the shipped model.
    draft: folder of the head, "mtp" for the one in the target's own files, or "auto" for the shipped one.
    prompts: texts or token ids; default: a dozen beginnings of Python code.
    max_tokens: of each answer.
    engine: further arguments of `LLM`, to explain what happens under just these.

    Raises ValueError if an argument is out of range, a folder is not what it should be, or the answers are too short to
    say anything.
    """
    k = num_speculative_tokens
    if draft == NGRAM:
        refuse("draft", draft, "the folder of a head: prompt lookup has no head that could be misread")
    if max_tokens < k + 2:
        raise ValueError(
            f"max_tokens is {max_tokens}; with num_speculative_tokens = {k} it must be at least {k + 2}"
        )
    checkpoint = open_checkpoint(shipped_model() if model is None else model)
    ids = _tokenised(PROMPTS if prompts is None else prompts, checkpoint)
    longest = max(map(len, ids)) + max_tokens + k + 1
    settings = {
        "max_model_len": min(longest, checkpoint.spec.max_position_embeddings),
        "max_num_seqs": min(len(ids), 16),
        "skip_tokenizer_init": True,
        "num_speculative_tokens": k,
        "device": device,
    }
    folder = shipped_draft() if draft == "auto" else draft
    study = _Study(checkpoint, folder, settings | engine, ids, max_tokens)
    llm = study.engine(draft=folder)
    for temperature in TEMPERATURES:
        study.generate(llm, temperature, ENGINE)
    if llm.engine.graphs.manager is not None:
        llm = study.engine(draft=folder, cudagraph_mode="NONE")
        for temperature in TEMPERATURES:
            study.generate(llm, temperature, EAGER)
    del llm  # each engine may fill the device
    facts = study.alone()
    study.know_all()
    return conclude(replace(facts, runs=tuple(study.runs)), study.problems)


def _tokenised(prompts: Sequence[str | list[int]], checkpoint: Checkpoint) -> list[list[int]]:
    """Each prompt once."""
    texts = any(isinstance(prompt, str) for prompt in prompts)
    tokenizer: Tokenizer = load_tokenizer(checkpoint) if texts else NoTokenizer()
    listed = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    different = [list(ids) for ids in dict.fromkeys(map(tuple, listed))]
    if not different or not all(different):
        raise ValueError(f"prompts has {len(different)} entries; it must have one, and none that is empty")
    return different


@dataclass
class _Study:
    """What is known so far; engines come and go one after the other."""

    checkpoint: Checkpoint
    draft: str | Path
    settings: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int
    runs: list[Run] = field(default_factory=list)
    texts: dict[float, list[list[int]]] = field(default_factory=dict)
    """Of plain decoding, by temperature: prompt and answer for every prompt."""
    problems: list[str] = field(default_factory=list)

    @property
    def k(self) -> int:
        """Drafts of a step."""
        return int(self.settings["num_speculative_tokens"])

    # --- in the engine ------------------------------------------------------------------------------------

    def engine(self, **overrides: Any) -> LLM:
        """An engine of the target; the one before is gone."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return LLM(self.checkpoint.path, **(self.settings | overrides))

    def generate(self, llm: LLM, temperature: float, name: str = "") -> list[list[int]]:
        """Answers with their prompts. All have one seed, so what follows some tokens is the same for every prompt.

        name: of the run that this is; "" is none.
        """
        counts = llm.get_metrics().acceptance
        assert counts is not None  # every engine here has a drafter
        tried, kept = counts.tried.copy(), counts.kept.copy()
        prompts: list[Prompt] = [{"prompt_token_ids": ids} for ids in self.prompts]
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=self.max_tokens)
        outputs = llm.generate(prompts, params)
        if name:
            reached, accepted = (counts.tried - tried).tolist(), (counts.kept - kept).tolist()
            self.runs.append(Run(name, temperature, tuple(reached), tuple(accepted)))
        return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]

    def know_all(self) -> None:
        """Check the bookkeeping with a drafter that knows the texts."""
        recorder = Recorder(self.k, self.checkpoint.spec.num_layers)
        llm = self.engine(drafter=recorder, draft_policy="fixed")
        for temperature, whole in self.texts.items():
            recorder.script, when = whole, f"at temperature {temperature:g}"
            try:
                said = self.generate(llm, temperature, ORACLE)
            except RuntimeError as error:
                self.problems.append(f"{when} the drafter was told nonsense: {error}")
                continue
            other, run = sum(text != right for text, right in zip(said, whole, strict=True)), self.runs[-1]
            if other and (llm.dtype == torch.float32 or 2 * other > len(whole)):
                self.problems.append(
                    f"{when} {other} of {len(whole)} texts are not those of plain decoding: accepted drafts leave "
                    "something wrong behind"
                )
            elif not other and run.accepted != run.reached:
                self.problems.append(
                    f"{when} a drafter that is always right gives {run.tokens_per_step:.2f} tokens per step in place "
                    f"of {self.k + 1}: right drafts are lost, and no head can do better"
                )

    # --- outside of it ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def alone(self) -> Explanation:
        """What the head does behind recorded features of plain decoding."""
        spec = self.checkpoint.spec
        recorder = Recorder(self.k, spec.num_layers)
        plain = {"enable_prefix_caching": False, "mamba_cache_mode": None, "mamba_retention": None}
        llm = self.engine(drafter=recorder, draft_policy="fixed", cudagraph_mode="NONE", **plain)
        head = DraftHead.open(self.draft, llm.engine.model, checkpoint=self.checkpoint).head
        head.reserve_positions(llm.limits.max_model_len)
        tried = conventions(head, spec.num_layers)
        recorder.keep = frozenset({spec.num_layers + 1}.union(*(meant.boundaries for meant in tried)))
        texts: dict[float, list[Recorded]] = {}
        for t in TEMPERATURES:
            self.texts[t] = self.generate(llm, t)
            told = [recorder.recorded(*pair) for pair in zip(self.prompts, self.texts[t], strict=True)]
            texts[t] = [text for text in told if len(text.tokens) > text.prompt_len + self.k + 1]
        if not all(texts.values()):
            raise ValueError(
                f"prompts: no answer is longer than {self.k + 1} tokens; there is nothing to draft"
            )
        greedy, drawn = TEMPERATURES
        draft = partial(chains, num_drafts=self.k, target_logits=llm.engine.model.logits, temperature=drawn)
        steps = [draft(tried[0], text).steps() for text in texts[greedy]]
        reached, kept = (tuple(sum(counts).tolist()) for counts in zip(*steps, strict=True))
        self.runs.append(Run(ALONE, greedy, reached, kept))
        every = [*texts[greedy], *texts[drawn]]
        share, ids = 1.0, head.target_ids
        if ids is not None:
            said = torch.tensor([token for text in every for token in text.tokens[text.prompt_len + 1 :]])
            share = float(torch.isin(said, ids.cpu()).double().mean())
        return Explanation(
            draft=str(self.draft),
            kind=head.spec.kind,
            num_speculative_tokens=self.k,
            runs=(),
            readings=_readings(draft, tried, every),
            draft_vocab_size=head.spec.draft_vocab_size,
            vocab_size=spec.vocab_size,
            vocabulary_share=share,
        )


def _readings(
    draft: Callable[..., Chains], tried: Sequence[Convention], texts: Sequence[Recorded]
) -> tuple[Reading, ...]:
    def accepted(meant: Convention, *, shuffle: bool = False) -> Tensor:
        return torch.cat([draft(meant, text, shuffle=shuffle).accepted for text in texts])

    declared = accepted(tried[0])
    return tuple(
        Reading.of(meant.name, meant.cause, accepted(meant), declared, accepted(meant, shuffle=True))
        for meant in tried
    )
