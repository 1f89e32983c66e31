"""A tokenizer of bytes and tags, and what parsers read in its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from bateleur.runner.serve.openai.tools import Tools
from bateleur.runner.serve.parsers.answer import AnswerParser
from bateleur.runner.serve.parsers.events import Arguments, Content, Event, Reasoning, ToolCall, merged
from bateleur.runner.serve.parsers.options import TOOL_PARSERS
from bateleur.runner.serve.parsers.source import THINK, THINK_END, TagTable
from bateleur.runner.text.detokenizer import IncrementalDetokenizer
from bateleur.runner.text.tokenizer import tag_tokens

EOS = "<|im_end|>"
TAGS = sorted({THINK, THINK_END, *(tag for each in TOOL_PARSERS.values() for tag in each.tags())} - {"<function="})
KINDS = ("special", "added", "text")


class TagModel:
    """A tokenizer with a token for each byte, and one for each tag unless tags are text."""

    def __init__(self, kind: str) -> None:
        words = {piece: i for i, piece in enumerate(_bytes())}
        made = Tokenizer(models.BPE(words, []))
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(EOS, special=True), AddedToken("<|other|>", special=True)])
        if kind == "special":
            made.add_special_tokens([AddedToken(tag, special=True) for tag in TAGS])
        elif kind == "added":
            made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
        self.tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made)
        self.size = made.get_vocab_size()
        self.ids: dict[str, int] = {text: token for token, text in tag_tokens(self.tokenizer).items()}
        self.end = self.ids[EOS]
        self._split = re.compile("|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))))

    def encode(self, text: str) -> list[int]:
        """Tags as tokens, everything else as bytes."""
        tokens, at = list[int](), 0
        for found in self._split.finditer(text):
            tokens += [*text[at : found.start()].encode(), self.ids[found[0]]]
            at = found.end()
        return [*tokens, *text[at:].encode()]

    def reads(
        self,
        name: str,
        tools: Tools,
        tokens: Sequence[int],
        *,
        opened: bool | None = None,
        cut: bool = False,
        each: bool = False,
    ) -> list[Any]:
        """Reasoning in sets, content, and calls as pairs. each: report every token by itself."""
        tags = {token: text for text, token in self.ids.items() if text in TAGS}
        table = TagTable(tags)
        reader = AnswerParser(opened=opened, calls=TOOL_PARSERS[name](tools, None, table), table=table)
        detokenizer = IncrementalDetokenizer(self.tokenizer, tags=tags)
        events: list[Event] = []
        told = known = 0
        for i, token in enumerate(tokens):
            detokenizer.push(token)
            if i == len(tokens) - 1:
                detokenizer.finish()
            if each or i == len(tokens) - 1:
                fresh = detokenizer.tags_from(known)
                moved = [tag._replace(start=tag.start - told, end=tag.end - told) for tag in fresh]
                events += reader.feed(detokenizer.text[told:], moved)
                told, known = len(detokenizer.text), known + len(fresh)
        found: list[Any] = []
        for event in merged(events + reader.finish(cut=cut)):
            match event:
                case Reasoning(text):
                    found.append({text})
                case Content(text):
                    found.append(text)
                case ToolCall(_, _, called):
                    found.append([called, ""])
                case Arguments(index, text):
                    [call for call in found if isinstance(call, list)][index][1] += text
        return found


def _bytes() -> list[str]:
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256))
    return [chr(byte if byte in itself else 256 + next(others)) for byte in range(256)]
