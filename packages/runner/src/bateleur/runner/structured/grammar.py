"""Grammars over the vocabulary of a model. They are compiled once and shared by requests."""

from __future__ import annotations

import atexit
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from bateleur.runner.errors import MissingExtra
from bateleur.runner.structured.limits import error_line, parser_limits
from bateleur.runner.structured.matcher import Matcher
from bateleur.runner.structured.source import grammar_source
from bateleur.runner.structured.structural_tag import TagTokens
from bateleur.runner.structured.trial import Trials
from bateleur.runner.structured.vocabulary import SPECIAL, token_bytes
from bateleur.runner.structured_outputs import StructuredOutputsParams
from bateleur.runner.text.tokenizer import Tokenizer, special_token_ids, tag_tokens
from bateleur.runner.utils.arguments import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHE_SIZE = 64
"""Maximum number of cached grammars; the least recently used one is dropped."""


class Vocabulary:
    """The tokens of a model in the form of llguidance. Building it takes a second for 250,000 tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Build the vocabulary. Raises ValueError as `token_bytes`."""
        from llguidance import LLTokenizer

        self.tokens = token_bytes(tokenizer, vocab_size)
        ends = sorted(set(eos_token_ids))
        for token in ends:  # not always a special token of the tokenizer
            self.tokens[token] = SPECIAL + b"%d" % token
        if not ends:  # llguidance needs one: an id after the last token, which no mask includes
            ends = [vocab_size]
            self.tokens.append(SPECIAL)
        self.eos_token_id = ends[0]
        self.special_token_ids: list[int] = []
        self.num_words = -(-len(self.tokens) // 32)
        self.library: LLTokenizer = LLTokenizer(self, eos_token=ends)  # type: ignore[arg-type]
        self.tokens = []

    def __call__(self, text: str) -> list[int]:
        """Raise NotImplementedError.

        llguidance would call it to tokenise bytes that a grammar forces, but forcing is off.
        """
        raise NotImplementedError


class CompiledGrammar:
    """A compiled grammar over a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: frozenset[int], source: str) -> None:
        """Compile the grammar.

        Raises ValueError if it is over the limits, or if these tokens can't form any matching text.
        """
        self.eos_token_ids = eos_token_ids
        self.num_words = vocabulary.num_words
        self._vocabulary, self._source = vocabulary, source
        self._parser = self.compile()
        first = self._parser.deep_copy()
        first.compute_bitmask()
        _check(first)

    def compile(self) -> LLMatcher:
        """Compile a parser at the start of a text that shares nothing. Other Python threads run meanwhile."""
        from llguidance import LLMatcher

        parser = LLMatcher(self._vocabulary.library, self._source, log_level=0, limits=parser_limits())
        _check(parser)
        return parser

    def begin(self) -> LLMatcher:
        """Return a parser at the start of a text, which shares caches about tokens with the grammar's other parsers."""
        return self._parser.deep_copy()


class Grammars:
    """Compiles and caches the grammars of requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Builds nothing, and imports nothing of the extra `structured`, before the first use."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        tags = {text: token for token, text in tag_tokens(tokenizer).items() if token < vocab_size}
        special = frozenset(token for token in special_token_ids(tokenizer) if token < vocab_size)
        self._tag_tokens = TagTokens(tags, special, self._eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = Lock()
        self._vocabulary_lock = Lock()

    def matcher(
        self, params: StructuredOutputsParams, stop_token_ids: Collection[int], *, tried: bool = False
    ) -> Matcher:
        """Return a matcher for a new request that ends at `stop_token_ids`.

        tried: whether another process has already compiled the grammar, so that it is known to be valid.
        Raises ValueError that names the form and the error, and MissingExtra without the extra.
        """
        vocabulary = self.prepare()
        name = f"structured_outputs.{params.form}"
        try:
            source = grammar_source(params, self._tag_tokens)
            return Matcher(self._grammar(vocabulary, source, tried=tried), stop_token_ids)
        except ValueError as error:
            raise ValueError(f"{name} is {shown(getattr(params, params.form))}; {error}") from error

    def prepare(self) -> Vocabulary:
        """Build the vocabulary unless it is built. Blocks other Python threads, for a second with 250,000 tokens."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                _require_library()
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, sorted(self._eos_token_ids))
            return self._vocabulary

    def _grammar(self, vocabulary: Vocabulary, source: str, *, tried: bool) -> CompiledGrammar:
        with self._lock:
            if (found := self._cache.get(source)) is not None:
                self._cache.move_to_end(source)
                return found
        if not tried and (error := _TRIALS.error(source, self._vocab_size)):
            raise ValueError(error_line(error))
        made = CompiledGrammar(vocabulary, self._eos_token_ids, source)
        with self._lock:
            self._cache[source] = made
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return made


_TRIALS = Trials()
atexit.register(_TRIALS.close)


def _check(parser: LLMatcher) -> None:
    if error := parser.get_error():
        raise ValueError(error_line(error))


def _require_library() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "structured_outputs needs llguidance, which comes with an extra: pip install 'bateleur-runner[structured]'"
        ) from error
