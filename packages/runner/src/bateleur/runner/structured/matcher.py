"""The state of a request's grammar, on the host."""

# Shape letters: N rows of masks, W words of 32 bits with a bit for every token.

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bateleur.runner.structured.library import error_line, parser_limits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


class CompiledGrammar:
    """A compiled grammar over a vocabulary. num_words: number of 32-bit words in a token mask."""

    def __init__(self, vocabulary: LLTokenizer, eos_token_ids: frozenset[int], source: str) -> None:
        """Raises ValueError if `source` is invalid or exceeds `parser_limits`, or if no tokens form a valid text."""
        self._vocabulary, self._source, self.eos_token_ids = vocabulary, source, eos_token_ids
        self.num_words = -(-vocabulary.vocab_size // 32)
        self._parser = self.compile()
        first = self.begin()
        first.compute_bitmask()
        _check(first)

    def compile(self) -> LLMatcher:
        """Return a newly compiled parser in its initial state. Other Python threads run meanwhile."""
        from llguidance import LLMatcher

        parser = LLMatcher(self._vocabulary, self._source, log_level=0, limits=parser_limits())
        _check(parser)
        return parser

    def begin(self) -> LLMatcher:
        """Return a parser in its initial state, a copy that shares token caches with the grammar's other parsers."""
        return self._parser.deep_copy()


def _check(parser: LLMatcher) -> None:
    if error := parser.get_error():
        raise ValueError(error_line(error))


class Matcher:
    """Follows the tokens of one request through its grammar. Only `accept` and `restart` change its state."""

    def __init__(self, grammar: CompiledGrammar, stop_token_ids: Collection[int]) -> None:
        """stop_token_ids: allowed tokens that end the request; other end-of-sequence tokens are never allowed."""
        self._grammar, self.num_words = grammar, grammar.num_words
        self._no_end = sorted(grammar.eos_token_ids.difference(stop_token_ids))
        self._ends = grammar.eos_token_ids.intersection(stop_token_ids)
        self.restart(())

    def restart(self, token_ids: Sequence[int]) -> None:
        """Return to the initial state, then accept these tokens."""
        self._parser = self._grammar.begin()
        self._tokens: list[int] = []
        for token in token_ids:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Advance the grammar by the next token, which must be allowed."""
        self._tokens.append(token)
        self._parser.consume_token(token)

    @property
    def error(self) -> str:
        """Reason why the grammar can't continue (it exceeds its limits); empty if it can."""
        return error_line(self._parser.get_error())

    def ended(self, *, without_end: bool = False) -> bool:
        """Return whether the engine must end the request, because its text is complete and no token is allowed.

        False if an end-of-sequence token may follow, because the request then ends with this token. No such token may
        follow under ignore_eos, or if min_tokens forbids it now (`without_end`).
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
        """Return how many leading drafts the grammar allows.

        The first end token is the last draft that counts; an id of -1 means that there are no more drafts.
        """
        known: list[int] = []
        for token in drafts:
            if token < 0 or token in self._no_end:
                break
            known.append(token)
            if token in self._ends:
                break
        if not known or self._parser.is_error():
            return 0
        if self._parser.is_stopped():
            return int(known[0] in self._ends)
        return int(self._parser.validate_tokens(known))

    def check(self, masks_NW: NDArray[np.int32], drafts: Sequence[int]) -> None:
        """Correct the masks (N, W) that `fill` wrote for this request: for the next token, and after each draft.

        Clears end-of-sequence tokens that do not end this request. Recomputes all masks if the parser failed.
        """
        if self._parser.is_error():
            self._fill_one_by_one(masks_NW, drafts)
        if self._no_end:
            _clear(masks_NW, self._no_end)

    def _fill_one_by_one(self, masks_NW: NDArray[np.int32], drafts: Sequence[int]) -> None:
        """Recompute masks one by one after a parser error. The mask with the error and later ones allow no token."""
        masks_NW[:] = 0
        parser = self._grammar.compile()
        self._parser = parser.deep_copy()
        for token in self._tokens:
            self._parser.consume_token(token)
            parser.consume_token(token)
        for i, mask_W in enumerate(masks_NW):
            allowed_W = _mask(parser, len(mask_W))
            if parser.is_error():
                break
            mask_W[:] = allowed_W
            if i < len(drafts) and not parser.consume_token(drafts[i]):
                break


def fill(
    executor: LLExecutor, wanted: Sequence[tuple[Matcher, int, Sequence[int]]], masks_NW: NDArray[np.int32]
) -> None:
    """Write token masks of several requests: for the next token, and after each draft.

    masks_NW: N masks of W words. wanted: (matcher, index of its first mask, drafts that its grammar allows).
    Other Python threads run meanwhile.
    """
    at, size, count = masks_NW.ctypes.data, masks_NW.shape[1] * 4, len(masks_NW)
    if alone := [(matcher._parser, first) for matcher, first, drafts in wanted if not drafts]:
        executor.unsafe_compute_mask_ptr(alone, at, size, count)
    if drafted := [(matcher._parser, first, list(drafts)) for matcher, first, drafts in wanted if drafts]:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, at, size, count)
    for matcher, first, drafts in wanted:
        matcher.check(masks_NW[first : first + 1 + len(drafts)], drafts)


def _mask(parser: LLMatcher, num_words: int) -> NDArray[np.int32]:
    """Return the mask of the next token, without the additional word that llguidance appends."""
    return np.frombuffer(parser.compute_bitmask(), np.int32)[:num_words]


def _clear(masks_NW: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    for token in token_ids:
        masks_NW.view(np.uint32)[:, token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
