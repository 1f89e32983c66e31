"""Why drafts are accepted as rarely as they are: the engine, the features, the norms, the vocabulary, or the head."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bateleur.runner.assets import shipped_draft, shipped_model
from bateleur.runner.checkpoint import load_tokenizer, open_checkpoint
from bateleur.runner.diagnose.draft_offline import (
    Convention,
    Recorded,
    Recorder,
    conventions,
    first_drafts,
    id_table,
    other_recycling,
    roll_out,
)
from bateleur.runner.diagnose.explanation import Explanation, Measured, Reading, conclude
from bateleur.runner.engine.input_processor import Prompt
from bateleur.runner.llm import LLM
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.spec_decode.draft_model import DraftModel

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

    Args:
        model: the target's folder; None is the shipped model.
        draft: folder of the head, or "auto" for the shipped one.
        prompts: texts or token ids; default: a dozen beginnings of Python code.
        num_speculative_tokens: K.
        max_tokens: of each answer.
        device: as for `LLM`.
        engine: further arguments of `LLM`, to explain what happens under just these.

    Raises:
        ValueError: an argument is out of range, a folder is not what it should be, or the answers are too short to say
            anything. A table d2t that holds ids is no error but an explanation.
    """
    if max_tokens < num_speculative_tokens + 2:
        raise ValueError(
            f"max_tokens is {max_tokens}; with num_speculative_tokens = {num_speculative_tokens} it must be at "
            f"least {num_speculative_tokens + 2}"
        )
    settings = {"num_speculative_tokens": num_speculative_tokens, "device": device, **engine}
    study = _Study(shipped_model() if model is None else Path(model), draft, settings)
    refused = study.refused()
    if refused is not None:
        return refused
    study.read(PROMPTS if prompts is None else prompts, max_tokens)
    return study.run()


class _Study:
    """What is known so far; engines come and go one after the other, for each may fill the device."""

    def __init__(self, model: Path, draft: str | Path, settings: dict[str, Any]) -> None:
        self.model = model
        self.draft = shipped_draft() if draft == "auto" else Path(draft)
        self.settings = settings
        self.k: int = settings["num_speculative_tokens"]
        self.checkpoint = open_checkpoint(model)
        self.table = id_table(self.draft, self.checkpoint.spec.vocab_size)
        self.prompts: list[list[int]] = []
        self.max_tokens = 0
        self.problems: list[str] = []

    def refused(self) -> Explanation | None:
        """The whole explanation where d2t can't be offsets, and could be ids."""
        if self.table is None or not self.table.refused:
            return None
        size = len(self.table.ids)
        text = (
            f"vocabulary: d2t holds target ids, up to {int(self.table.ids[-1])}; it must hold offsets, target id = "
            f"draft id + offset (subtract 0 .. {size - 1}). No loader takes it as it is"
        )
        return Explanation(
            draft=str(self.draft),
            num_speculative_tokens=self.k,
            draft_vocab_size=size,
            vocab_size=self.checkpoint.spec.vocab_size,
            causes=("vocabulary",),
            conclusions=(text,),
        )

    def read(self, prompts: Sequence[str | list[int]], max_tokens: int) -> None:
        """Tokenise the prompts, each once, and size the engines for them."""
        listed = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if len(listed) < len(prompts):
            tokenizer = load_tokenizer(self.checkpoint)
            listed = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
        self.prompts = [list(ids) for ids in dict.fromkeys(tuple(p) for p in listed)]
        if not self.prompts or not all(self.prompts):
            raise ValueError(
                f"prompts has {len(self.prompts)} entries; it must have one, and none that is empty"
            )
        self.max_tokens = max_tokens
        longest = max(map(len, self.prompts)) + max_tokens + self.k + 1
        sizes = {
            "max_model_len": min(longest, self.checkpoint.spec.max_position_embeddings),
            "max_num_seqs": min(len(self.prompts), 16),
            "skip_tokenizer_init": True,
        }
        self.settings = sizes | self.settings

    def run(self) -> Explanation:
        """Everything, and what follows from it."""
        measured, texts, graphs = self.measure()
        eager = self.measure(cudagraph_mode="NONE")[0] if graphs else ()
        facts = self.alone(texts)
        if graphs:
            self.know_all(texts)
        return conclude(dataclasses.replace(facts, measured=measured, measured_eager=eager), self.problems)

    # --- in the engine ------------------------------------------------------------------------------------

    def measure(self, **overrides: Any) -> tuple[tuple[Measured, ...], dict[float, list[list[int]]], bool]:
        """The head in the engine: what became of its drafts, the texts, and whether there were graphs."""
        llm = self.engine(draft=self.draft, **overrides)
        texts, runs = {}, []
        for temperature in TEMPERATURES:
            before = _Counts.of(llm)
            texts[temperature] = self.generate(llm, temperature)
            runs.append((_Counts.of(llm) - before).measured(temperature))
        return tuple(runs), texts, llm.engine.graphs.manager is not None

    def engine(self, **overrides: Any) -> LLM:
        """An engine of the target; the one before is gone."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return LLM(self.model, **(self.settings | overrides))

    def generate(
        self, llm: LLM, temperature: float, max_tokens: Sequence[int] | None = None, which: Sequence[int] = ()
    ) -> list[list[int]]:
        """Answers with their prompts; all have one seed, so what follows some tokens is the same for every prompt."""
        chosen = which or range(len(self.prompts))
        prompts: list[Prompt] = [{"prompt_token_ids": self.prompts[i]} for i in chosen]
        lengths = max_tokens or [self.max_tokens] * len(prompts)
        params = [SamplingParams(temperature=temperature, seed=0, max_tokens=n) for n in lengths]
        outputs = llm.generate(prompts, params)
        return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]

    def recorder(self) -> Recorder:
        """A drafter that sees every boundary."""
        spec = self.checkpoint.spec
        return Recorder(self.k, spec.num_layers, spec.vocab_size)

    def know_all(self, texts: dict[float, list[list[int]]]) -> None:
        """Check the bookkeeping of steps that run on graphs."""
        recorder = self.recorder()
        llm = self.engine(drafter=recorder, draft_policy="fixed")
        for temperature in TEMPERATURES:
            self.check(llm, recorder, temperature, texts[temperature], "on graphs, ")

    def check(
        self, llm: LLM, recorder: Recorder, temperature: float, texts: list[list[int]], where: str = ""
    ) -> float:
        """Tokens per step of a drafter that knows the texts; what is wrong with it goes to `problems`.

        Answers are cut where a whole number of steps ends.
        """
        steps = [
            (len(text) - len(p) - 1) // (self.k + 1) for p, text in zip(self.prompts, texts, strict=True)
        ]
        which = [i for i, count in enumerate(steps) if count > 0]
        if not which:
            return math.nan
        recorder.script = texts
        before = _Counts.of(llm)
        try:
            said = self.generate(llm, temperature, [1 + steps[i] * (self.k + 1) for i in which], which)
        except RuntimeError as error:
            self.problems.append(
                f"{where}at temperature {temperature:g} the drafter was told nonsense: {error}"
            )
            return math.nan
        finally:
            recorder.script = []
        tokens = (_Counts.of(llm) - before).tokens_per_step
        other = sum(text != texts[i][: len(text)] for i, text in zip(which, said, strict=True))
        exact = llm.dtype == torch.float32
        if other and (exact or 2 * other > len(which)):
            self.problems.append(
                f"{where}at temperature {temperature:g} {other} of {len(which)} texts are not those of plain decoding: "
                "accepted drafts leave something wrong behind"
            )
        elif tokens != self.k + 1 and not other:
            self.problems.append(
                f"{where}at temperature {temperature:g} a drafter that is always right gives {tokens:.2f} tokens per "
                f"step in place of {self.k + 1}: right drafts are lost, and no head can do better"
            )
        return tokens

    # --- outside of it ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def alone(self, told: dict[float, list[list[int]]]) -> Explanation:
        """All that is not measured with the head in the engine. `told`: the texts that it gave there."""
        recorder = self.recorder()
        no_prefixes = {"enable_prefix_caching": False, "mamba_cache_mode": None, "mamba_retention": None}
        llm = self.engine(drafter=recorder, draft_policy="fixed", cudagraph_mode="NONE", **no_prefixes)
        head = DraftModel.open(self.draft, llm.engine.model).head
        layers = self.checkpoint.spec.num_layers
        tried = conventions(head, layers, llm.device, None if self.table is None else self.table.ids)
        recorder.keep = frozenset(boundary for meant in tried for boundary in meant.boundaries)
        texts = {TEMPERATURES[0]: self.generate(llm, TEMPERATURES[0])}
        recorder.keep = frozenset()
        texts |= {t: self.generate(llm, t) for t in TEMPERATURES[1:]}
        recorded = [
            recorder.recorded(prompt, text)
            for prompt, text in zip(self.prompts, texts[0.0], strict=True)
            if len(text) > len(prompt) + 1
        ]
        if not recorded:
            raise ValueError("prompts: every answer ends with its first token; there is nothing to draft")
        self._compare_texts(llm, texts, told)
        recycling = other_recycling(head)
        other = None if recycling is None else dataclasses.replace(tried[0], head=recycling)
        readings, shuffled = _read_all(tried, recorded)
        said = [
            text[len(p) + 1 :] for each in texts.values() for p, text in zip(self.prompts, each, strict=True)
        ]
        return Explanation(
            draft=str(self.draft),
            num_speculative_tokens=self.k,
            kind=head.spec.kind,
            num_texts=len(recorded),
            alone=self._chains(tried[0], recorded),
            alone_recycled=None if other is None else self._chains(other, recorded),
            oracle_tokens_per_step=tuple((t, self.check(llm, recorder, t, texts[t])) for t in TEMPERATURES),
            readings=readings,
            shuffled_accuracy=shuffled,
            draft_vocab_size=head.spec.draft_vocab_size,
            vocab_size=self.checkpoint.spec.vocab_size,
            vocabulary_share=_share(said, head.target_ids),
        )

    def _compare_texts(
        self, llm: LLM, texts: dict[float, list[list[int]]], told: dict[float, list[list[int]]]
    ) -> None:
        for temperature in TEMPERATURES if llm.dtype == torch.float32 else ():
            pairs = zip(texts[temperature], told[temperature], strict=True)
            if other := sum(text != its for text, its in pairs):
                self.problems.append(
                    f"at temperature {temperature:g} {other} of {len(self.prompts)} texts with the head are not those "
                    "of plain decoding"
                )

    def _chains(self, meant: Convention, texts: Sequence[Recorded]) -> Measured:
        tried, kept = np.sum([roll_out(meant, text, self.k) for text in texts], axis=0)
        run = Measured(0.0, math.nan, tuple(tried.tolist()), tuple(kept.tolist()))
        return dataclasses.replace(run, tokens_per_step=run.expected)


class _Counts(NamedTuple):
    """What an engine counted so far."""

    num_rows: int
    num_tokens: int
    reached: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @classmethod
    def of(cls, llm: LLM) -> _Counts:
        stats = llm.get_metrics()
        counted = stats.acceptance
        assert counted is not None  # every engine here has a drafter
        return cls(
            stats.num_verify_rows, stats.num_verified_tokens, counted.tried.copy(), counted.kept.copy()
        )

    def __sub__(self, before: _Counts) -> _Counts:
        return _Counts(
            self.num_rows - before.num_rows,
            self.num_tokens - before.num_tokens,
            self.reached - before.reached,
            self.accepted - before.accepted,
        )

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_rows if self.num_rows else math.nan

    def measured(self, temperature: float) -> Measured:
        reached, accepted = tuple(self.reached.tolist()), tuple(self.accepted.tolist())
        return Measured(temperature, self.tokens_per_step, reached, accepted)


def _read_all(tried: Sequence[Convention], texts: Sequence[Recorded]) -> tuple[tuple[Reading, ...], float]:
    """Every reading, and the accuracy of the declared one on features in random order."""
    readings: list[Reading] = []
    declared, alone = torch.zeros(0), math.nan
    for meant in tried:
        right = torch.cat([first_drafts(meant, text) for text in texts])
        shuffled = torch.cat([first_drafts(meant, text, shuffle=i) for i, text in enumerate(texts)])
        if not readings:
            declared, alone = right, float(shuffled.double().mean())
        gain, use = _sigmas(right, declared), _sigmas(right, shuffled)
        readings.append(Reading(meant.name, meant.cause, int(right.sum()), len(right), gain, use))
    return tuple(readings), alone


def _sigmas(right: torch.Tensor, other: torch.Tensor) -> float:
    """Standard errors by which one is more often true, place by place (McNemar)."""
    mine, theirs = int((right & ~other).sum()), int((other & ~right).sum())
    return (mine - theirs) / math.sqrt(max(mine + theirs, 1))


def _share(texts: Iterable[Sequence[int]], target_ids: torch.Tensor | None) -> float:
    """Share of the tokens that a draft vocabulary has."""
    said = torch.tensor([token for text in texts for token in text])
    return 1.0 if target_ids is None else float(torch.isin(said, target_ids.cpu()).double().mean())
