"""Incremental detokenization. It holds back incomplete characters and the possible start of a stop string."""

from collections.abc import Mapping, Sequence
from io import SEEK_END, StringIO

from bateleur.runner.outputs import TextTag
from bateleur.runner.text.stop_strings import stop_strings
from bateleur.runner.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PARTIAL = 3
"""Maximum bytes of an incomplete UTF-8 sequence, and so of U+FFFD that any decoder shows for it."""
_CONTEXT = 6
"""Tokens kept as context, because decoders treat the first token specially (leading space)."""
_WINDOW = 24
"""Tokens after which the window is shortened. Decoding costs O(_WINDOW) per token, whatever the length of the text."""


class IncrementalDetokenizer:
    """Text of one request's output, extended token by token.

    stop: strings that end the text. The first complete one counts, even if it ends inside a token.
    prompt_token_ids: context; its text is not part of the output.
    min_tokens: a stop string that is complete before this many tokens is ordinary text.
    include_stop: end the text after the stop string instead of before it.
    tags: ids and texts of the tokens that `tags_from` reports, even those that are skipped as special tokens.

    The pieces returned by `push` and `finish` join to `text`. Without stop strings that is the text of all tokens
    decoded at once, without an incomplete character at the end (`decode_all`).

    Limit: some decoders decode a run of byte tokens as a whole (SentencePiece byte fallback). They replace a complete
    character by U+FFFD if an invalid byte follows; here a character that was returned stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        tags: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer, self._min_tokens = tokenizer, min_tokens
        self._stop = stop_strings(tuple(stop)) if stop else None
        self._include_stop, self._skip, self._tags = include_stop, skip_special_tokens, tags or {}
        self.restart(prompt_token_ids)

    def restart(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int] = ()) -> None:
        """Start again with this prompt, and process these output tokens."""
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._num_tokens = 0
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._clean = len(self._window)  # window tokens up to which the text is known to end a character
        self._shown = self._decode(self._window)  # text of the window when it was last decoded
        self._settled = len(self._shown)  # characters of it that were passed to the stop search
        self._held, self._state = "", 0  # text that may still become a stop string, and the state of the search
        self._text = StringIO()  # all text returned so far
        self._found: list[TextTag] = []
        self._finished = False
        for token_id in token_ids:
            self.push(token_id)

    @property
    def text(self) -> str:
        """All text returned so far."""
        return self._text.getvalue()

    def text_from(self, first: int) -> str:
        """Return the text from character `first` on, in time proportional to its length."""
        self._text.seek(first)
        return self._text.read()

    def _length(self) -> int:
        """Return the length of the text, and continue at its end: an interrupted `text_from` may have left it."""
        return self._text.seek(0, SEEK_END)

    def tags_from(self, first: int) -> list[TextTag]:
        """Return the tags in the text returned so far, in order, without the first `first` tags."""
        length = self._length()
        return [tag for tag in self._found[first:] if tag.end <= length]

    def push(self, token_id: int) -> str:
        """Process the next token and return the text that is now final; "" after a stop string or `finish`."""
        if self.stopped is not None or self._finished:
            return ""
        self._num_tokens += 1
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._shown and not self._decode([token_id, token_id]):
            self._window.pop()  # a token without text (special) must not split byte sequences
            self._note_tag(token_id, "", "")
            return ""
        self._shown = text
        certain = len(text.rstrip(_REPLACEMENT))
        if certain < len(text) and len(self._window) >= _WINDOW:
            return self._release(self._shorten_partial())
        fresh = text[self._settled : certain]
        self._note_tag(token_id, self._tags.get(token_id, ""), fresh)
        self._settled = max(self._settled, certain)
        if certain == len(text):
            self._shorten_clean()
        return self._release(fresh)

    def _note_tag(self, token_id: int, shown: str, fresh: str) -> None:
        """If the token is in `tags` (reported), record where its text `shown` is: at the end of new text `fresh`."""
        if token_id in self._tags and fresh.endswith(shown):
            end = self._length() + len(self._held) + len(fresh)
            self._found.append(TextTag(end - len(shown), end, token_id))

    def finish(self) -> str:
        """Return the text that is held back, without an incomplete character at the end."""
        if self.stopped is not None or self._finished:
            return ""
        fresh, stopped = _complete(self._shown)[self._settled :], None
        rest = self._held + fresh
        if self._stop is not None and self._num_tokens >= self._min_tokens:
            _, count, stopped = self._stop.read(self._state, fresh)
            if stopped is not None:
                rest = self._cut(rest, len(self._held) + count, stopped)
        self._length()
        write = self._text.write
        # No call before the last one, so that an interrupt loses no text.
        self._finished, self.stopped = True, stopped
        write(rest)
        return rest

    def _cut(self, text: str, end: int, stop: str) -> str:
        """Return the text before a stop string that ends at character `end`, or up to there with `include_stop`."""
        return text[: end if self._include_stop else end - len(stop)]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _shorten_clean(self) -> None:
        """Drop old tokens of a long `_window` (the tokens that `push` decodes), up to one that ended a character.

        Called when the last token ends a character.
        """
        if len(self._window) < _WINDOW // 2:
            return
        if self._clean:
            del self._window[: self._clean]
            self._shown = self._decode(self._window)
            self._settled = len(self._shown)
        self._clean = len(self._window)

    def _shorten_partial(self) -> str:
        """Drop old tokens of a long `_window` (the tokens that `push` decodes) with invalid bytes at its end.

        Returns the dropped text that was not searched for stop strings yet; "" if nothing is dropped. The window is
        split where the texts of both halves join to the text of the whole. A UTF-8 sequence has at most four bytes, so
        at least one of four adjacent token borders is not inside of a sequence.
        """
        for cut in range(len(self._window) - 5, len(self._window) - 9, -1):
            left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if left + right == self._shown:
                fresh = left[self._settled :]
                self._settled = max(0, self._settled - len(left))
                self._shown, self._window, self._clean = right, self._window[cut:], 0
                return fresh
        return ""

    def _release(self, fresh: str) -> str:
        """Search for stop strings in the text held back plus `fresh`, and return the text that is now final."""
        if not fresh or self._stop is None:
            return self._keep(fresh)
        text = self._held + fresh
        if self._num_tokens >= self._min_tokens:
            self._state, count, self.stopped = self._stop.read(self._state, fresh)
            if self.stopped is not None:
                end = len(self._held) + count
                self._held = ""
                return self._keep(self._cut(text, end, self.stopped))
        else:
            self._state = self._stop.pass_by(self._state, fresh)
        certain = len(text) - self._stop.num_open(self._state)
        self._held = text[certain:]
        return self._keep(text[:certain])

    def _keep(self, piece: str) -> str:
        self._length()
        self._text.write(piece)
        return piece


def decode_all(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of a complete output: the final text of an `IncrementalDetokenizer` without stop strings."""
    context = list(prompt_token_ids[-_CONTEXT:])
    before = len(tokenizer.decode(context, skip_special_tokens=skip_special_tokens))
    text = tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
    return _complete(text)[before:]


def _complete(text: str) -> str:
    """Return `text` without a possibly incomplete character at its end."""
    tail = text[-_MAX_PARTIAL:]
    return text[: len(text) - len(tail) + len(tail.rstrip(_REPLACEMENT))]
