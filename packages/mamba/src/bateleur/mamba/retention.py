"""Which block boundaries of a request are published to others: the host's side of the cache modes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bateleur.mamba.spec import CacheLayout, MambaCacheMode


@dataclass(frozen=True, slots=True)
class Retention:
    """Which columns of a request stay in the prefix cache: any of the rules below may hold, and none means nothing.

    Column p holds the state after (p + 1) * block_size tokens. Every boundary is passed once, so every column is
    published once, by the step that passes it; it may be dropped later, when it is no longer the last.

    Raises ValueError for a block size below 1, or an interval that is not a multiple of it.
    """

    block_size: int
    every: int = 0
    """Boundaries at multiples of this many tokens; 0 for none."""
    last: bool = False
    """The newest boundary: the previous one is dropped."""
    prompt_end: bool = False
    """The last boundary that the same prompt could start from; one token is left to compute."""
    doubling: bool = False
    """Boundaries at 1, 2, 4, 8, ... blocks: close where prefixes are short, so that a hit on a shared beginning is more
    than half of it."""

    def __post_init__(self) -> None:
        """Validate once."""
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if self.every < 0 or self.every % self.block_size:
            raise ValueError(
                f"every is {self.every}; it must be a multiple of block_size = {self.block_size}"
            )

    @classmethod
    def of(cls, layout: CacheLayout) -> Retention:
        """What the layout's cache mode keeps: nothing, the last boundary and the prompt's, or all."""
        align = layout.mode is MambaCacheMode.ALIGN
        every = layout.block_size if layout.mode is MambaCacheMode.ALL else 0
        return cls(layout.block_size, every, align, align)

    @classmethod
    def parse(cls, text: str, block_size: int) -> Retention:
        """From "none", or rules joined by "+" in any order: "all", "last", "prompt_end", "doubling", "every=N", where N
        counts tokens.

        Raises ValueError for anything else.
        """
        rules = [] if text == "none" else text.split("+")
        every = [
            int(n)
            for name, _, n in (rule.partition("=") for rule in rules)
            if name == "every" and n.isdecimal()
        ]
        known = {"all", "last", "prompt_end", "doubling", *(f"every={n}" for n in every)}
        if len(every) > 1 or 0 in every or not known.issuperset(rules):
            raise ValueError(
                f"retention is {text!r}; it must be 'none', or some of 'all', 'last', 'prompt_end', 'doubling', "
                f"'every=N' joined by '+', with one N above 0"
            )
        kept = cls(block_size, sum(every), "last" in rules, "prompt_end" in rules, "doubling" in rules)
        return replace(kept, every=block_size) if "all" in rules else kept

    def keeps(self, column: int, computed: int, prompt_len: int) -> bool:
        """Whether column `column` of a request with `computed` tokens is in the cache.

        `prompt_len` counts the tokens the request was admitted with.
        """
        boundary = (column + 1) * self.block_size
        if boundary > computed:
            return False
        return bool(
            self.lasting(column)
            or (self.last and boundary + self.block_size > computed)
            or (self.prompt_end and column == (prompt_len - 1) // self.block_size - 1)
        )

    def lasting(self, column: int) -> bool:
        """Whether column `column` stays in the cache from when it is full, whatever request it is of."""
        boundary = (column + 1) * self.block_size
        return bool(
            (self.every and boundary % self.every == 0) or (self.doubling and not column & (column + 1))
        )

    def published(self, before: int, after: int, prompt_len: int) -> list[int]:
        """Columns to publish after a step that took a request from `before` to `after` tokens, in order."""
        passed = range(before // self.block_size, after // self.block_size)
        return [column for column in passed if self.keeps(column, after, prompt_len)]

    def dropped(self, before: int, after: int, prompt_len: int) -> list[int]:
        """Columns published by earlier steps that the cache need not keep after this one: at most one."""
        column = before // self.block_size - 1
        kept = self.keeps(column, before, prompt_len) and column >= 0
        return [column] if kept and not self.keeps(column, after, prompt_len) else []
