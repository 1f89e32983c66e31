"""What a rank finds in its part, in Triton: what the torch forms find.

Triton decides whether to interpret when a kernel is defined, so the CPU tests of this file run in a process of
their own, which the last test starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, native
from bateleur.eagle.noise import Role, names
from bateleur.eagle.sample import PERTURBED_MAX
from bateleur.eagle.shard_truncation import HISTOGRAM, LAST_TIE
from bateleur.eagle.vocab_shard import order_of
from bateleur.metadata.dispatch import load

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.eagle.kernels import vocab_shard as kernels  # noqa: E402
from eagle_doubles.laws import HOSTILE, INF, NAN, keys_of, metadata_of, normal  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
SIZES = (1, 45, 200)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and shares of a row; and no kernels in C to compare with."""
    monkeypatch.setattr(kernels, "_BLOCK", 32)
    monkeypatch.setattr(native, "takes", lambda _: False)


def logits_of(kind: str, size: int) -> Tensor:
    logits = HOSTILE[kind](normal(5, size + 6, 3.0, size))[:, :size]  # rows lie apart
    if size > 9:
        logits[1, 7], logits[2, 3], logits[3] = NAN, INF, -INF
    return logits


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("kind", ["as they are", "ties", "all equal", "huge", "both zeros"])
@pytest.mark.parametrize("size", SIZES)
def test_a_digit_is_tallied_as_in_torch(kind: str, size: int) -> None:
    logits = logits_of(kind, size)
    finite = logits.nan_to_num(0.0, 0.0, -1e30)
    mass = (finite - finite.amax(1, keepdim=True)).exp_()
    tally = load(HISTOGRAM.triton or "")
    for shift in (24, 16, 0):
        for start in (torch.full((5,), -(2**31)), order_of(logits[:, size // 2]), order_of(finite.amax(1))):
            for weights in (None, mass):
                args = logits, weights, start, shift
                assert torch.equal(tally(*args), HISTOGRAM.torch(*args))


@interpreted
@pytest.mark.parametrize("size", SIZES)
def test_the_last_tie_that_stays_is_that_of_torch(size: int) -> None:
    logits = logits_of("ties", size)
    least = logits[:, 0].contiguous()
    own = (logits == least.unsqueeze(1)).sum(1)
    last_tie_rows = load(LAST_TIE.triton or "")
    for kept in (own, own - 1, own // 2, own.clamp(max=1), torch.zeros_like(own)):
        assert torch.equal(last_tie_rows(logits, least, kept, own), LAST_TIE.torch(logits, least, kept, own))


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("kind", ["as they are", "ties", "all equal", "huge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_best_of_a_part_is_that_of_torch(kind: str, dtype: torch.dtype) -> None:
    """Greedily and drawn, of all of it and of what a law leaves, in any role."""
    metadata, keys = (metadata_of((0, 0, 0, 1), *[(0.8, 0, 0, 1)] * 2, (0, 0, 0, 1), (1.3, 0, 0, 1)), keys_of(5, 3))
    lead = load(PERTURBED_MAX.triton or "")
    for size in SIZES:
        logits = logits_of(kind, size).to(dtype)
        words = HashedVocab.of(torch.arange(40, 40 + size), logits.device).hashes
        least, last = torch.tensor([-INF, -1.0, 0.0, -INF, 0.5]), torch.tensor([size, 20, 0, -1, 3]).int()
        for role in (Role.TARGET, Role.DRAFT):
            name = names(Keys(keys.seed, keys.position, 2), role)
            for kept in ((None, None), (least, last)):
                args = logits, metadata.values, words, keys.seed, name, *kept
                (value, lane), (wanted, first) = lead(*args), PERTURBED_MAX.torch(*args)
                # Logarithms of numpy and torch may differ in the last place.
                torch.testing.assert_close(value, wanted, rtol=3e-7, atol=3e-7, equal_nan=True)
                assert (value.dtype, lane.dtype) == (wanted.dtype, first.dtype)
                assert torch.equal(lane[wanted > -INF], first[wanted > -INF])


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == 5 * len(SIZES) + len(SIZES) + 8
