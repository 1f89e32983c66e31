"""Norms fused with sums: Triton compared with torch, and compiled for sm_90."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bateleur.metadata.dispatch import load
from bateleur.runner.models.norm import RMSNorm
from bateleur.runner.models.operators import FORMS
from bateleur.runner.models.residual import ResidualStream

triton = pytest.importorskip("triton", reason="triton is not installed")

from bateleur.runner.models.kernels import norm as kernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the last test starts the process that this is for")
SIZES = [(1, 40), (5, 64), (33, 100)]
DTYPES = [  # of the stream, of the layers, of the weight
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
]


def inputs(size: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Stream, terms and weight; rows of the first two are parts of wider ones."""
    generator = torch.Generator().manual_seed(0)
    stream, layer, weight = dtypes
    (num_tokens, width), made = size, []
    for more, dtype in ((3, stream), (8, layer)):
        made.append(torch.randn(num_tokens, width + more, generator=generator).to(dtype)[:, :width])
    return made[0], made[1], (1 + 0.3 * torch.randn(width, generator=generator)).to(weight)


def close(found: Tensor, wanted: Tensor, layers: torch.dtype | None = None) -> None:
    """Equal up to one place of the dtype, of a term and of the sum: torch rounds `factor * y` to bfloat16 on a CPU."""
    assert found.dtype == wanted.dtype
    places = 2**-7 if torch.bfloat16 in (found.dtype, layers) else 2e-6
    torch.testing.assert_close(found, wanted, rtol=2 * places, atol=places)


@interpreted
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernels_say_what_the_torch_forms_say(size: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> None:
    h, y, weight = inputs(size, dtypes)
    y[1:2] = h[1:2] = 0  # a padded token

    def both(name: str, *args: Any) -> tuple[Any, Any]:
        return load(FORMS[name].triton or "")(*args), FORMS[name].torch(*args)

    close(*both("rms_norm", y, weight, 1e-5))
    sums = h.clone(), h.clone()
    args = weight, 1e-5, dtypes[1]
    names = load(FORMS["add_rms_norm"].triton or ""), FORMS["add_rms_norm"].torch
    normed = [form(each, [y], [0.7], *args) for form, each in zip(names, sums, strict=True)]
    close(*normed)
    close(*sums)
    assert not torch.equal(sums[0][0], h[0])
    at_once, one_by_one, z = h.clone(), h.clone(), y.flip(0)
    normed_at_once = names[0](at_once, [y, z], [0.7, -2.0], *args)
    names[0](one_by_one, [y], [0.7], *args)
    assert torch.equal(normed_at_once, names[0](one_by_one, [z], [-2.0], *args))
    assert torch.equal(at_once, one_by_one), "two terms are the same one by one, bit for bit"
    sums = h.clone(), h.clone()
    names = load(FORMS["add_normed"].triton or ""), FORMS["add_normed"].torch
    for form, each in zip(names, sums, strict=True):
        form(each, y, -0.5, weight, 1e-5)
    close(*sums, dtypes[1])
    assert not normed[0][1:2].any(), "a token of zeros stays one"


@interpreted
def test_a_token_knows_nothing_of_the_others() -> None:
    h, y, weight = inputs((5, 40), DTYPES[0])
    clean = kernels.add_rms_norm(h.clone(), [y], [1.0], weight, 1e-5, h.dtype)
    h[2] = torch.nan
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(kernels.add_rms_norm(h, [y], [1.0], weight, 1e-5, h.dtype)[others], clean[others])


@interpreted
def test_no_tokens_and_lanes_that_are_apart() -> None:
    h, y, weight = inputs((0, 40), DTYPES[0])
    assert kernels.add_rms_norm(h, [y], [1.0], weight, 1e-5, torch.bfloat16).shape == (0, 40)
    kernels.add_normed(h, y, 1.0, weight, 1e-5)
    with pytest.raises(ValueError, match=r"^x: strides \(1, 4\) must end in 1$"):
        kernels.rms_norm(torch.zeros(40, 4).t(), weight, 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="torch forms only")
@pytest.mark.parametrize("narrow", [False, True])
def test_a_stream_adds_when_somebody_reads(narrow: bool) -> None:
    """By any kind of read, in the stream's own dtype; sums equal those computed at once."""
    like = torch.empty(0, 24, dtype=torch.bfloat16 if narrow else torch.float32)
    norm = RMSNorm(24, 1e-5, like)
    norm.weight.uniform_(0.5, 1.5)
    start, *terms = torch.randn(4, 3, 24).unbind()
    terms = [term.to(like.dtype) for term in terms]
    stream, wanted = ResidualStream(start.clone(), like.dtype), start.clone()
    stream.add(terms[0], 0.5)
    wanted.add_(terms[0], alpha=0.5)
    assert torch.equal(stream.normed(norm), norm(wanted.to(like.dtype)))
    for term, factor in zip(terms, (0.3, -1.0, 2.0), strict=True):
        stream.add(term, factor)
        wanted.add_(term, alpha=factor)
    assert torch.equal(stream.normed(norm), norm(wanted.to(like.dtype)))
    stream.add(terms[1], 2.0)
    stream.add(terms[2], 1.0)
    wanted.add_(terms[1], alpha=2.0).add_(terms[2])
    stream.keep()
    assert torch.equal(stream.normed(norm), norm(wanted.to(like.dtype)))
    tapped = stream.kept
    assert torch.equal(tapped, wanted.to(like.dtype))
    stream.add_normed(terms[0], norm, 3.0)
    assert torch.equal(tapped, wanted.to(like.dtype)), "what is kept stays as it was"
    wanted.add_(norm(terms[0]), alpha=3.0)
    stream.keep()
    # The norm that is added may be another form than the norm that is called: they round differently.
    torch.testing.assert_close(stream.read(), wanted.to(like.dtype))
    wanted.copy_(stream.sum())
    kept, before = stream.kept, wanted.to(like.dtype, copy=True)
    for term in terms[:2]:
        stream.add(term, 0.7)
        wanted.add_(term, alpha=0.7)
    assert torch.equal(stream.normed(norm), norm(wanted.to(like.dtype)))
    assert torch.equal(kept, before)
    assert torch.equal(stream.select(torch.tensor([2, 0])).sum(), wanted[[2, 0]])
    assert torch.equal(stream.sum(), wanted)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_all_of_this_in_the_interpreter(in_interpreter: Callable[[str], int]) -> None:
    assert in_interpreter(__file__) == len(SIZES) * len(DTYPES) + 2
