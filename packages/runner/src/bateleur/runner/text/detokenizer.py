"""From token ids to text, a token at a time.

Two things may not leave too early: a piece of a character (tokens end in the middle of UTF-8 sequences), and
text that may yet turn out to be the beginning of a stop string. Everything else is handed out at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bateleur.runner.outputs import TextTag
from bateleur.runner.text.stop_strings import stop_strings
from bateleur.runner.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PARTIAL = 3
"""Bytes in an incomplete UTF-8 sequence, and so the most U+FFFD it can show as in any decoder."""
_CONTEXT = 6
"""Tokens kept as context, because decoders treat the first token specially (leading space)."""
_WINDOW = 24
"""Tokens after which the window is shortened: decoding costs O(_WINDOW) per token, whatever the length."""


class IncrementalDetokenizer:
    """The text of one request's output, growing with its tokens.

    tokenizer: decodes windows of token ids.
    stop: strings that end the text. The one that is complete first counts, whatever the tokens' borders.
    prompt_token_ids: context to the left; its own text is not part of the output.
    min_tokens: a stop string complete before this many tokens is ordinary text.
    include_stop: the text ends behind the stop string, not before it.
    skip_special_tokens: special tokens have no text.
    tags: ids and texts of the tokens whose places `tags_from` reports, whether they have text or not.

    The pieces returned by `push` and `finish` join to `text`. Without a stop that is what decoding all tokens
    at once gives, less an incomplete character at the very end (`decode_all`).

    Limit: decoders that judge a whole run of byte tokens together (SentencePiece byte fallback) would blot out
    a character already shown if an invalid byte follows it directly; here it stays.
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
        self._tags = tags or {}
        self._stop = stop_strings(tuple(stop)) if stop else None
        self._include_stop, self._skip = include_stop, skip_special_tokens
        self.restart(prompt_token_ids)

    def restart(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int] = ()) -> None:
        """Begin again behind this prompt, and take these tokens."""
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._num_tokens = 0
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._clean = len(self._window)  # window tokens up to which the text is known to end a character
        self._shown = self._decode(self._window)  # text of the window when it was last decoded
        self._settled = len(self._shown)  # how much of it has been handed to the stop search
        self._held, self._state = "", 0  # settled text that may still become a stop string
        self._pieces: list[str] = []
        self._num_characters = 0
        self._found: list[TextTag] = []
        self._finished = False
        for token_id in token_ids:
            self.push(token_id)

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def text_from(self, first: int) -> str:
        """The same from this character on, in time of that."""
        fresh: list[str] = []
        at = self._num_characters
        for piece in reversed(self._pieces):
            if at <= first:
                break
            at -= len(piece)
            fresh.append(piece)
        return "".join(reversed(fresh))[max(0, first - at) :]

    def tags_from(self, first: int) -> list[TextTag]:
        """Tags in the text that was handed out so far, without the first ones of them."""
        return [tag for tag in self._found[first:] if tag.end <= self._num_characters]

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain; "" after a stop string or `finish`."""
        if self.stopped is not None or self._finished:
            return ""
        self._num_tokens += 1
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._shown and not self._decode([token_id, token_id]):
            self._window.pop()  # shows nothing anywhere (a special token): keep it out of byte sequences
            self._note_tag(token_id, "", "")
            return ""
        self._shown = text
        certain = len(text.rstrip(_REPLACEMENT))
        if certain < len(text) and len(self._window) >= _WINDOW:
            return self._hand_out(self._shorten_partial())
        fresh = text[self._settled : certain]
        self._note_tag(token_id, self._tags.get(token_id, ""), fresh)
        self._settled = max(self._settled, certain)
        if certain == len(text):
            self._shorten_clean()
        return self._hand_out(fresh)

    def _note_tag(self, token_id: int, shown: str, fresh: str) -> None:
        """Keep the place of a tag. It ends the text `fresh`, which is about to be handed out, by `shown`."""
        if token_id in self._tags and fresh.endswith(shown):
            end = self._num_characters + len(self._held) + len(fresh)
            self._found.append(TextTag(end - len(shown), end, token_id))

    def finish(self) -> str:
        """Return what was withheld, less an incomplete character at the end, which is dropped."""
        if self.stopped is not None or self._finished:
            return ""
        self._finished = True
        rest = self._hand_out(_complete(self._shown)[self._settled :])
        if self.stopped is None:
            rest += self._keep(self._held)
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _shorten_clean(self) -> None:
        """The text ends a character: once the window is long, drop the tokens before the last such place."""
        if len(self._window) < _WINDOW // 2:
            return
        if self._clean:
            del self._window[: self._clean]
            self._shown = self._decode(self._window)
            self._settled = len(self._shown)
        self._clean = len(self._window)

    def _shorten_partial(self) -> str:
        """The text has long ended in invalid bytes: cut where both halves decode to the text of the whole.

        Every token in the window has at least one byte and a sequence has at most four. So one of four
        neighbouring borders splits no sequence, and what follows it is long enough to tell. Returns the fresh
        text.
        """
        for cut in range(len(self._window) - 5, len(self._window) - 9, -1):
            left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if left + right == self._shown:
                fresh = left[self._settled :]
                self._settled = max(0, self._settled - len(left))
                self._shown, self._window, self._clean = right, self._window[cut:], 0
                return fresh
        return ""

    def _hand_out(self, fresh: str) -> str:
        """Search for stop strings in what is held plus `fresh`; return what is safe to show."""
        if not fresh or self._stop is None:
            return self._keep(fresh)
        text = self._held + fresh
        if self._num_tokens >= self._min_tokens:
            self._state, count, self.stopped = self._stop.read(self._state, fresh)
            if self.stopped is not None:
                end = len(self._held) + count
                self._held = ""
                return self._keep(text[: end if self._include_stop else end - len(self.stopped)])
        else:
            self._state = self._stop.pass_by(self._state, fresh)
        certain = len(text) - self._stop.num_open(self._state)
        self._held = text[certain:]
        return self._keep(text[:certain])

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
            self._num_characters += len(piece)
        return piece


def decode_all(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of a whole output in one go: what an `IncrementalDetokenizer` without stops ends with."""
    context = list(prompt_token_ids[-_CONTEXT:])
    before = len(tokenizer.decode(context, skip_special_tokens=skip_special_tokens))
    text = tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
    return _complete(text)[before:]


def _complete(text: str) -> str:
    """Cut what may be the beginning of a character from the end of `text`."""
    tail = text[-_MAX_PARTIAL:]
    return text[: len(text) - len(tail) + len(tail.rstrip(_REPLACEMENT))]
