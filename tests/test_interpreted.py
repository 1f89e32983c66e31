"""The engine on Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path


def test_the_engine_on_interpreted_kernels(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(str(Path(__file__).parent / "interpreted_engine.py")) == 10
