"""How often a steady decode step passes from one file of the runner to another, and through how many files.

A pass is a call from a function of one file into a function of another. Not counted are layers (`models/`) with what
they call, and what other packages call. Run this file with `-s` to see the path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import bateleur.runner
from bateleur.runner import LLM, SamplingParams

ROOT = Path(bateleur.runner.__file__).parent
MOST_PASSES, MOST_FILES = 12, 9


def file_of(frame: FrameType | None) -> str:
    """The file of a frame within the runner; "" for any other file."""
    name = "" if frame is None else frame.f_code.co_filename
    return name.removeprefix(f"{ROOT}/") if name.startswith(f"{ROOT}/") else ""


def path_of_step(llm: LLM) -> list[tuple[str, str, str]]:
    """The passes of one step: file of the caller, file of the function, and its name."""
    passes: list[tuple[str, str, str]] = []
    layers: list[FrameType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        here, caller = file_of(frame), file_of(frame.f_back)
        if event == "return" and layers and layers[-1] is frame:
            layers.pop()
        elif event == "call" and here.startswith("models/"):
            layers.append(frame)
        elif event == "call" and not layers and here and caller not in ("", here):
            passes.append((caller, here, frame.f_code.co_qualname))

    step = llm.engine.step
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return passes


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_a_steady_step_passes_through_few_files(mode: str) -> None:
    llm = LLM(device="cpu", max_num_seqs=4, max_model_len=96, cudagraph_mode=mode, cudagraph_backend="recorded")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for i in range(4):
        llm.add_request([7 * i + 1] * 9, params)
    for _ in range(12):
        llm.step()
    batch = llm.engine.scheduler.batch
    passes = path_of_step(llm)
    files = {file for caller, here, _ in passes for file in (caller, here)}
    print(f"{mode}: {len(passes)} passes through {len(files)} files")
    for caller, here, name in passes:
        print(f"{caller} -> {here}: {name}")
    assert batch is not None
    assert batch is llm.engine.scheduler.batch, "a steady step repeats its batch"
    assert passes[0][0] == "engine/engine.py"
    assert 5 < len(passes) <= MOST_PASSES
    assert len(files) <= MOST_FILES
