"""A tokenizer read from `tokenizer.json` without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(eq=False)
class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, with the interface of transformers' tokenizers."""

    backend_tokenizer: Backend = field(repr=False)
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    """Special tokens by name, such as `bos_token`."""
    extra_special_tokens: tuple[str, ...] = ()
    chat_template: str | None = None

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens, without duplicates."""
        return list(dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens)))

    def __getattr__(self, name: str) -> Any:
        """Return special tokens and their ids by name (`eos_token`, `eos_token_id`); None if the tokenizer has none."""
        if name.endswith("_token"):
            return self.special_tokens_map.get(name)
        if name.endswith("_token_id"):
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with or without the special tokens around a prompt."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the ids, with U+FFFD for invalid or incomplete UTF-8."""
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tokenize: Literal[False] = False,
        **names: Any,
    ) -> str:
        """Return a conversation as text. names: variables of the template, which override special tokens."""
        from bateleur.runner.text.template import write_chat

        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ValueError("the checkpoint has no chat template")
        names = {**self.special_tokens_map, "tools": None, "documents": None, **names}
        return write_chat(template, conversation, continue_final_message=continue_final_message, names=names)
