"""Rules that select the states of a request that stay in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bateleur.mamba.spec import CacheLayout, MambaCacheMode


@dataclass(frozen=True, slots=True)
class PrefixRetention:
    """Selects the block boundaries whose states stay in the prefix cache. A boundary is kept if any rule selects it.

    The rules: multiples of `every` tokens; the newest boundary (`last`); the last one from which the same prompt can
    start (`prompt_end`); and 1, 2, 4, 8, ... blocks (`doubling`).

    Column c of a block table holds the state after (c + 1) * block_size tokens. The step that passes a boundary
    adds its state to the prefix cache. A boundary selected only by `last` is dropped when the request passes the next
    one.

    Raises ValueError for a block size below 1, or an interval `every` that is not a multiple of it.
    """

    block_size: int
    """Tokens of a block."""
    every: int = 0
    """Keep boundaries at multiples of this number of tokens; 0 disables the rule."""
    last: bool = False
    """Keep the newest boundary of a request."""
    prompt_end: bool = False
    """Keep the last boundary that the same prompt could start from, which leaves at least one token to compute."""
    doubling: bool = False
    """Keep the boundaries at 1, 2, 4, 8, ... blocks, so that a hit covers more than half of a shared prefix."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")
        if self.every < 0 or self.every % self.block_size:
            raise ValueError(f"every is {self.every}; it must be a multiple of block_size = {self.block_size}")

    @classmethod
    def of(cls, layout: CacheLayout) -> PrefixRetention:
        """Return the default of a cache mode: NONE keeps no boundary, ALL all, ALIGN the newest and a prompt's last."""
        align = layout.mode is MambaCacheMode.ALIGN
        every = layout.block_size if layout.mode is MambaCacheMode.ALL else 0
        return cls(layout.block_size, every, align, align)

    @classmethod
    def parse(cls, text: str, block_size: int) -> PrefixRetention:
        """Parse "none", or rules joined by "+": "all", "last", "prompt_end", "doubling", "every=N" (N in tokens).

        Raises ValueError for anything else.
        """
        rules = [] if text == "none" else text.split("+")
        every = [int(n) for name, _, n in (rule.partition("=") for rule in rules) if name == "every" and n.isdecimal()]
        known = {"all", "last", "prompt_end", "doubling", *(f"every={n}" for n in every)}
        if len(every) > 1 or 0 in every or not known.issuperset(rules):
            raise ValueError(
                f"retention is {text!r}; it must be 'none', or some of 'all', 'last', 'prompt_end', 'doubling', "
                f"'every=N' joined by '+', with one N above 0"
            )
        parsed = cls(block_size, sum(every), "last" in rules, "prompt_end" in rules, "doubling" in rules)
        return replace(parsed, every=block_size) if "all" in rules else parsed

    def keeps(self, column: int, computed: int, prompt_len: int) -> bool:
        """Return whether the state in block-table `column` is in the prefix cache after `computed` tokens."""
        boundary = (column + 1) * self.block_size
        if boundary > computed:
            return False
        return bool(
            self.always_keeps(column)
            or (self.last and boundary + self.block_size > computed)
            or (self.prompt_end and column == (prompt_len - 1) // self.block_size - 1)
        )

    def always_keeps(self, column: int) -> bool:
        """Return whether the state in block-table `column` stays in the prefix cache for every request."""
        boundary = (column + 1) * self.block_size
        return bool((self.every and boundary % self.every == 0) or (self.doubling and not column & (column + 1)))

    def columns_to_cache(self, before: int, after: int, prompt_len: int) -> list[int]:
        """Return the block-table columns to add to the prefix cache after a step from `before` to `after` tokens."""
        passed = range(before // self.block_size, after // self.block_size)
        return [column for column in passed if self.keeps(column, after, prompt_len)]
