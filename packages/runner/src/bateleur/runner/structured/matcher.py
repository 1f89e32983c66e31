"""Where a request stands in its grammar, on the host."""

# Shape letters: N rows of masks, W words of 32 bits that hold a bit for every token.

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.structured.limits import said

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class Grammar(Protocol):
    """What a matcher needs of its grammar."""

    eos_token_ids: frozenset[int]
    num_words: int

    def begin(self) -> LLMatcher:
        """A parser at the begin of a text, which shares with others what they found out about tokens."""
        ...

    def compile(self) -> LLMatcher:
        """A parser at the begin of a text that shares nothing."""
        ...


class Matcher:
    """The tokens of one request as its grammar sees them.

    Only `accept` and `restart` change where it stands. What else is asked is one call of the library, which an
    interrupt can't leave half done.
    """

    def __init__(self, grammar: Grammar, stop_token_ids: Collection[int]) -> None:
        """`stop_token_ids`: what ends the request. An end-of-sequence token that doesn't is never allowed."""
        self._grammar = grammar
        self._no_end = sorted(grammar.eos_token_ids.difference(stop_token_ids))
        self._ends = grammar.eos_token_ids.intersection(stop_token_ids)
        self.restart(())

    def restart(self, token_ids: Sequence[int]) -> None:
        """Stand behind these tokens, wherever it stood, at a break in the middle of something as well."""
        self._parser = self._grammar.begin()
        self._tokens: list[int] = []
        for token in token_ids:
            self.accept(token)

    @property
    def num_words(self) -> int:
        """W, of its masks."""
        return self._grammar.num_words

    def accept(self, token: int) -> None:
        """One token more, which was allowed."""
        self._tokens.append(token)
        self._parser.consume_token(token)

    @property
    def error(self) -> str:
        """Why it goes no further: the grammar costs more than it may. Empty while it does."""
        return said(self._parser.get_error())

    def ended(self, *, without_end: bool = False) -> bool:
        """Whether nothing may follow; `without_end`: that is, nothing but an end-of-sequence token, which can't be
        drawn: it is to be ignored, there is none, or it would come too soon.
        """
        if self._parser.is_error() or not (without_end or not self._ends):
            return False
        if self._parser.is_stopped():
            return True
        if not self._parser.is_accepting():
            return False
        mask_1W = _mask(self._parser, self.num_words)[None].copy()
        _clear(mask_1W, [*self._no_end, *self._ends])
        return not mask_1W.any()

    def allowed_prefix(self, drafts: Sequence[int]) -> int:
        """How many of these drafts may follow, one after the other; none behind an end, and -1 is none."""
        known = list(drafts)
        for stop, token in enumerate(known):
            if token < 0 or token in self._no_end:
                known = known[:stop]
                break
            if token in self._ends:
                known = known[: stop + 1]
                break
        if not known or self._parser.is_error():
            return 0
        if self._parser.is_stopped():
            return int(known[0] in self._ends)
        return int(self._parser.validate_tokens(known))

    def check(self, masks_NW: NDArray[np.int32], drafts: Sequence[int]) -> None:
        """Finish the rows that `fill` wrote for it: one for what may come next, and one behind each draft."""
        if self._parser.is_error():
            self._fill_one_by_one(masks_NW, drafts)
        if self._no_end:
            _clear(masks_NW, self._no_end)

    def _fill_one_by_one(self, masks_NW: NDArray[np.int32], drafts: Sequence[int]) -> None:
        """Something went wrong at one of the places, which perhaps is never reached: there nothing is allowed.

        It may have been what others of this grammar left behind, so this begins with a parser that shares nothing.
        """
        masks_NW[:] = 0
        parser = self._grammar.compile()
        self._parser = _behind(parser.deep_copy(), self._tokens)
        parser = _behind(parser, self._tokens)
        for place, mask_W in enumerate(masks_NW):
            allowed_W = _mask(parser, len(mask_W))
            if parser.is_error():
                break
            mask_W[:] = allowed_W
            if place < len(drafts) and not parser.consume_token(drafts[place]):
                break


def fill(
    executor: LLExecutor,
    wanted: Sequence[tuple[Matcher, int, Sequence[int]]],
    masks_NW: NDArray[np.int32],
) -> None:
    """For each matcher, with `first` and `drafts` that it allows, write what may come next into row `first` of the
    masks, and what may come behind each draft into those that follow. The interpreter is free meanwhile.
    """
    at, size, count = masks_NW.ctypes.data, masks_NW.shape[1] * 4, len(masks_NW)
    alone = [(matcher._parser, first) for matcher, first, drafts in wanted if not drafts]
    if alone:
        executor.unsafe_compute_mask_ptr(alone, at, size, count)
    drafted = [(matcher._parser, first, list(drafts)) for matcher, first, drafts in wanted if drafts]
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, at, size, count)
    for matcher, first, drafts in wanted:
        matcher.check(masks_NW[first : first + 1 + len(drafts)], drafts)


def _mask(parser: LLMatcher, num_words: int) -> NDArray[np.int32]:
    """The library has a word more than there are tokens for."""
    return np.frombuffer(parser.compute_bitmask(), np.int32)[:num_words]


def _behind(parser: LLMatcher, token_ids: Sequence[int]) -> LLMatcher:
    for token in token_ids:
        parser.consume_token(token)
    return parser


def _clear(masks_NW: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    """These tokens are not allowed."""
    for token in token_ids:
        masks_NW.view(np.uint32)[:, token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
