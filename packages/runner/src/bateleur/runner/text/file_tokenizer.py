"""A tokenizer out of `tokenizer.json` alone, without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(eq=False)
class FileTokenizer:
    """What `tokenizer.json` says, behind the names that transformers has for it."""

    backend_tokenizer: Backend = field(repr=False)
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    """Special tokens by what they are for, such as `bos_token`."""
    extra_special_tokens: tuple[str, ...] = ()
    """Others, which have no such name."""
    chat_template: str | None = None
    """A Jinja program that writes conversations."""

    @classmethod
    def read(cls, file: Path) -> FileTokenizer:
        """Of this `tokenizer.json`; whatever the tokenizers library raises for one that it cannot read."""
        from tokenizers import Tokenizer as Backend

        return cls(Backend.from_file(str(file)))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """The id of every token."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    @property
    def all_special_tokens(self) -> list[str]:
        """Every special token that has a name or is listed, once."""
        return list(dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens)))

    def __getattr__(self, name: str) -> Any:
        """Special tokens by name, and their ids: `eos_token`, `eos_token_id`. None for one that the tokenizer lacks."""
        if name.endswith("_token"):
            return self.special_tokens_map.get(name)
        if name.endswith("_token_id"):
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer puts around a prompt, or without."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids, invalid or incomplete UTF-8 as U+FFFD."""
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tokenize: Literal[False] = False,
        **names: Any,
    ) -> str:
        """What the template writes of a conversation, see `write_chat`; `names` go before special tokens.

        tokenize: of the method of transformers that this one stands in for.
        """
        from bateleur.runner.text.template import write_chat

        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ValueError("the checkpoint has no chat template")
        return write_chat(
            template,
            conversation,
            continue_final_message=continue_final_message,
            names={**self.special_tokens_map, "tools": tools, "documents": None, **names},
        )
