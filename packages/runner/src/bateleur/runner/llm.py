"""`LLM`: the whole engine behind the names that vLLM's users type."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bateleur.runner.config.engine_config import EngineConfig, all_options
from bateleur.runner.engine.engine import Engine
from bateleur.runner.engine.input_processor import InputProcessor, Prompt, as_prompts
from bateleur.runner.engine.setup import EngineSetup
from bateleur.runner.outputs import RequestOutput
from bateleur.runner.requests.request import Request
from bateleur.runner.sampling_params import SamplingParams
from bateleur.runner.stats import EngineStats


class LLM:
    """A model ready to generate.

    Args:
        model: Hugging Face checkpoint folder; None is the model that ships with the package.
        options: by name, the fields of the configurations in `bateleur.runner.config.engine_config`, where each is
            described; `bateleur generate --help` lists them as well.

    Raises:
        ValueError: an option is unknown or out of range, or the folder is no supported checkpoint.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.config = EngineConfig.of(model=model, **options)
        setup = EngineSetup.of(self.config)
        self.spec, self.dtype, self.device = setup.model.spec, setup.model.dtype, setup.model.device
        self.limits, self.cache_plan, self.tokenizer = setup.limits, setup.cache_plan, setup.tokenizer
        self.engine = Engine(setup)
        self._admission = InputProcessor(
            self.tokenizer, self.spec, self.engine.scheduler, self.limits, seed=self.config.model.seed
        )
        self._unclaimed: list[RequestOutput] = []

    # --- whole batches ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run all prompts to their end; results in the order of the prompts.

        All prompts are validated before the first is queued: a ValueError means that nothing was started. Requests
        queued by `add_request` run along; what they report meanwhile is kept for the next `step`.
        """
        requests = self._requests(prompts, sampling_params, stream=False)
        results: dict[str, RequestOutput] = {}
        with _progress(len(requests), use_tqdm) as bar:
            for output in self._run(requests):
                results[output.request_id] = output
                bar.update(1)
        return [results[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request after each of its tokens, with all of its text so far.

        Text that could still change (half a character, the start of a stop string) is held back. Closing the
        iterator aborts what has not finished.
        """
        return self._run(self._requests(prompts, sampling_params, stream=True))

    def _run(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Run these requests to their end; whatever stops the caller early aborts the rest of them."""
        pending = {request.request_id for request in requests}
        for request in requests:
            self.engine.add(request)
        try:
            while pending:
                for output in self.engine.step():
                    if output.request_id not in pending:
                        self._unclaimed.append(output)
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            for request_id in pending & self.engine.requests.keys():
                self.engine.abort(request_id)

    # --- one request at a time ----------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request beside those that run; returns its id. `step` reports it."""
        request = self._admission.request(
            prompt,
            sampling_params or SamplingParams(),
            request_id=request_id,
            stream=stream,
            taken=self.engine.requests,
        )
        self.engine.add(request)
        return request.request_id

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now and return what it has. Raises ValueError for an unknown id."""
        return self.engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One engine step; the requests that finished in it, and those added with `stream`."""
        kept, self._unclaimed = self._unclaimed, []
        return kept + self.engine.step()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.engine.has_unfinished or bool(self._unclaimed)

    def get_metrics(self) -> EngineStats:
        """Counters since the start."""
        return self.engine.stats

    # --- admission ----------------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        stream: bool,
    ) -> list[Request]:
        listed = as_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(listed)
        else:
            params = list(sampling_params)
        if len(params) != len(listed):
            raise ValueError(f"sampling_params has {len(params)} entries for {len(listed)} prompts")
        requests = []
        for index, (prompt, p) in enumerate(zip(listed, params, strict=True)):
            try:
                requests.append(self._admission.request(prompt, p, stream=stream, taken=self.engine.requests))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        return requests


def _progress(total: int, enabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=not enabled)


def _signature() -> inspect.Signature:
    """What `help(LLM)` shows: every option, with its default."""
    named, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                named if each.name == "model" else only,
                default=each.default,
                annotation=each.type,
            )
            for each in all_options()
        ]
    )


LLM.__signature__ = _signature()  # type: ignore[attr-defined]
