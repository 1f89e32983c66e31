"""Grammars over the vocabulary of a model. They are compiled once and shared by requests."""

from __future__ import annotations

import atexit
import json
from collections.abc import Collection
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from bateleur.runner.errors import MissingExtra
from bateleur.runner.structured import library
from bateleur.runner.structured.library import HEAD, SPECIAL
from bateleur.runner.structured.matcher import CompiledGrammar, Matcher
from bateleur.runner.structured.structural_tag import TagTokens, compile_structural_tag, escaped
from bateleur.runner.structured.trial import GrammarCompilers
from bateleur.runner.structured_outputs import StructuredOutputsParams
from bateleur.runner.text.token_bytes import BYTE_PIECE, piece_decoder
from bateleur.runner.text.tokenizer import NoTokenizer, Tokenizer, special_token_ids, tag_tokens
from bateleur.runner.utils.arguments import shown

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_CACHE_SIZE = 64
"""Maximum number of cached grammars; the least recently used one is dropped."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each of `vocab_size` tokens adds to a text; b"" if there are none.

    Of several tokens that add the same bytes, one has them and the others have b"".
    Raises ValueError for a tokenizer whose tokens can't be read one by one.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise ValueError("structured_outputs is given; it needs a tokenizer: leave skip_tokenizer_init False")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = "structured_outputs is given; the tokenizer of this checkpoint is"
    if backend is None:
        raise ValueError(f"{about} a {type(tokenizer).__name__}, and must be one of the tokenizers library")
    try:
        decode = piece_decoder(backend)
    except ValueError as error:
        raise ValueError(f"{about} {error}") from error
    special, found, plain = special_token_ids(tokenizer), [b""] * vocab_size, set()
    pieces = backend.get_vocab(with_added_tokens=True).items()
    for piece, token in sorted(pieces, key=lambda each: (bool(BYTE_PIECE.fullmatch(each[0])), each[1])):
        if token < vocab_size and token in special:
            found[token] = SPECIAL + piece.encode()
        elif token < vocab_size and (data := decode(piece)) not in plain:
            found[token] = data
            plain.add(data)
    return found


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Return the tokens of a model for llguidance. Raises ValueError as `token_bytes`."""
    tokens, ends = token_bytes(tokenizer, vocab_size), sorted(eos_token_ids)
    for token in ends:  # not always a special token of the tokenizer
        tokens[token] = SPECIAL + b"%d" % token
    if not ends:  # llguidance needs one: an id after the last token, which no mask includes
        ends = [vocab_size]
        tokens.append(SPECIAL)
    return library.library_tokenizer(tokens, ends)


class Grammars:
    """Compiles and caches the grammars of requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Builds the vocabulary and imports llguidance only at the first use."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = frozenset(eos_token_ids)
        tags = {text: token for token, text in tag_tokens(tokenizer).items() if token < vocab_size}
        special = frozenset(token for token in special_token_ids(tokenizer) if token < vocab_size)
        self._tag_tokens = TagTokens(tags, special, self._ends)
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = Lock()
        self._test = lru_cache(_CACHE_SIZE)(self._test_in_child)
        self._compiled = lru_cache(_CACHE_SIZE)(lambda source: CompiledGrammar(self.prepare(), self._ends, source))

    def matcher(
        self, params: StructuredOutputsParams, stop_token_ids: Collection[int], *, already_compiled: bool = False
    ) -> Matcher:
        """Return a matcher for a new request that ends at `stop_token_ids`.

        already_compiled: whether another process has already compiled the grammar, so that it is known to be valid.
        Raises ValueError that names the invalid constraint (such as regex), and MissingExtra if llguidance is missing.
        """
        self.prepare()
        try:
            source = grammar_source(params, self._tag_tokens)
            if not already_compiled:
                self._test(source)
            return Matcher(self._compiled(source), stop_token_ids)
        except ValueError as error:
            value = shown(getattr(params, params.form))
            raise ValueError(f"structured_outputs.{params.form} is {value}; {error}") from error

    def prepare(self) -> LLTokenizer:
        """Build the vocabulary unless it is built. Blocks other Python threads, for a second with 250,000 tokens."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    import llguidance  # noqa: F401
                except ImportError as error:
                    install = "pip install 'bateleur-runner[structured]'"
                    raise MissingExtra(
                        f"structured_outputs needs llguidance, which comes with an extra: {install}"
                    ) from error
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._ends)
            return self._vocabulary

    def _test_in_child(self, source: str) -> None:
        if error := _COMPILERS.error(source, self._vocab_size):
            raise ValueError(library.error_line(error))


_COMPILERS = GrammarCompilers()
atexit.register(_COMPILERS.close)


def grammar_source(params: StructuredOutputsParams, tokens: TagTokens) -> str:
    """Return the text of a grammar for llguidance. Raises ValueError for invalid EBNF and structural tags."""
    compact = params.disable_any_whitespace
    if params.structural_tag is not None:
        grammars = compile_structural_tag(json.loads(str(params.structural_tag)), tokens, compact=compact)
    elif params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
        grammars = [
            {"lark_grammar": f"{HEAD}start: @schema\n"},
            {"name": "schema", **library.json_grammar(schema, compact=compact)},
        ]
    elif params.grammar is not None:
        grammars = [{"lark_grammar": HEAD + library.lark_rules(params.grammar)}]
    else:
        regex = "|".join(map(escaped, params.choice or ())) if params.regex is None else library.pattern(params.regex)
        grammars = [{"lark_grammar": f"{HEAD}start: /{regex}/\n"}]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
