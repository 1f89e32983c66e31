"""Grammars over the vocabulary of a model. They are compiled once and shared by requests."""

from __future__ import annotations

import atexit
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from bateleur.runner.errors import MissingExtra
from bateleur.runner.structured.library import (
    HEAD,
    SPECIAL,
    error_line,
    json_grammar,
    lark_rules,
    parser_limits,
    pattern,
)
from bateleur.runner.structured.matcher import Matcher
from bateleur.runner.structured.structural_tag import TagTokens, compile_structural_tag, escaped
from bateleur.runner.structured.trial import GrammarCompilers
from bateleur.runner.structured_outputs import StructuredOutputsParams
from bateleur.runner.text.token_bytes import decoder_steps, is_byte_piece, piece_bytes
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer, special_token_ids, tag_tokens
from bateleur.runner.utils.arguments import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHE_SIZE = 64
"""Maximum number of cached grammars; the least recently used one is dropped."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each of `vocab_size` tokens adds to a text.

    b"" for ids that the tokenizer lacks, and for a byte token if another token has the same bytes.
    Raises ValueError for a tokenizer whose tokens can't be read one by one.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise ValueError("structured_outputs is given; it needs a tokenizer: leave skip_tokenizer_init False")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = "structured_outputs is given; the tokenizer of this checkpoint is"
    if backend is None:
        raise ValueError(f"{about} a {type(tokenizer).__name__}, and must be one of the tokenizers library")
    described = json.loads(backend.to_str())
    try:
        steps = decoder_steps(described["decoder"])
    except ValueError as error:
        raise ValueError(f"{about} {error}") from error
    special = {each["id"] for each in described["added_tokens"] if each["special"]}
    found, plain, pieces = [b""] * vocab_size, set(), []
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            pieces.append((token in special or is_byte_piece(piece), token, piece))
    for _, token, piece in sorted(pieces):  # byte tokens come last
        if token in special:
            found[token] = SPECIAL + piece.encode()
            continue
        data = piece_bytes(piece, steps)
        if data not in plain:
            found[token] = data
            plain.add(data)
    return found


class Vocabulary:
    """The tokens of a model as an llguidance tokenizer. Building it takes a second for 250,000 tokens."""

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
        """Return a newly compiled parser in its initial state. Other Python threads run meanwhile."""
        from llguidance import LLMatcher

        parser = LLMatcher(self._vocabulary.library, self._source, log_level=0, limits=parser_limits())
        _check(parser)
        return parser

    def begin(self) -> LLMatcher:
        """Return a parser in its initial state, a copy that shares token caches with the grammar's other parsers."""
        return self._parser.deep_copy()


class Grammars:
    """Compiles and caches the grammars of requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Builds the vocabulary and imports llguidance only at the first use."""
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
        self, params: StructuredOutputsParams, stop_token_ids: Collection[int], *, already_compiled: bool = False
    ) -> Matcher:
        """Return a matcher for a new request that ends at `stop_token_ids`.

        already_compiled: whether another process has already compiled the grammar, so that it is known to be valid.
        Raises ValueError that names the invalid constraint (such as regex), and MissingExtra if llguidance is missing.
        """
        vocabulary = self.prepare()
        name = f"structured_outputs.{params.form}"
        try:
            source = grammar_source(params, self._tag_tokens)
            return Matcher(self._grammar(vocabulary, source, already_compiled=already_compiled), stop_token_ids)
        except ValueError as error:
            raise ValueError(f"{name} is {shown(getattr(params, params.form))}; {error}") from error

    def prepare(self) -> Vocabulary:
        """Build the vocabulary unless it is built. Blocks other Python threads, for a second with 250,000 tokens."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                _require_library()
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, sorted(self._eos_token_ids))
            return self._vocabulary

    def _grammar(self, vocabulary: Vocabulary, source: str, *, already_compiled: bool) -> CompiledGrammar:
        with self._lock:
            if (found := self._cache.get(source)) is not None:
                self._cache.move_to_end(source)
                return found
        if not already_compiled and (error := _COMPILERS.error(source, self._vocab_size)):
            raise ValueError(error_line(error))
        made = CompiledGrammar(vocabulary, self._eos_token_ids, source)
        with self._lock:
            self._cache[source] = made
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return made


_COMPILERS = GrammarCompilers()
atexit.register(_COMPILERS.close)


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


_SCHEMA = HEAD + "start: @schema\n"


def grammar_source(params: StructuredOutputsParams, tokens: TagTokens) -> str:
    """Return the source text of a grammar for llguidance. Grammars with equal sources are equal.

    Raises ValueError for EBNF that can't be parsed, and for an invalid structural tag.
    """
    if params.structural_tag is not None:
        tag = json.loads(str(params.structural_tag))
        grammars = compile_structural_tag(tag, tokens, compact=params.disable_any_whitespace)
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    if params.json is not None or params.json_object:
        schema = '{"type": "object"}' if params.json is None else str(params.json)
        grammar = json_grammar(json.loads(schema), compact=params.disable_any_whitespace)
        grammars = [{"lark_grammar": _SCHEMA}, {"name": "schema", **grammar}]
        return json.dumps({"grammars": grammars}, ensure_ascii=False)
    if params.regex is not None:
        return _lark(HEAD + f"start: /{pattern(params.regex)}/\n")
    if params.choice is not None:
        return _lark(HEAD + f"start: /{'|'.join(map(escaped, params.choice))}/\n")
    assert params.grammar is not None
    return _lark(HEAD + lark_rules(params.grammar))


def _lark(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]}, ensure_ascii=False)
