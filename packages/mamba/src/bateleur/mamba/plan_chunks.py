"""Where a scheduler cuts prompts: the parts that span a step."""

from __future__ import annotations

from bateleur.mamba.spec import CacheLayout, MambaCacheMode, StatePolicy


def cut_chunk(
    layout: CacheLayout, start: int, want: int, prompt_len: int, *, drop_last_block: bool = False
) -> int:
    """Tokens of a prompt's next step, at most `want`, such that every state which could be published is made.

    In mode ALIGN under SLOTS a step of a prompt stores its last state alone. So it ends on a block boundary unless it
    ends the prompt, and it stops at the last boundary that a prefix hit on this prompt may use; what remains is a step
    of its own. With any other layout it may end anywhere.

    Args:
        layout: of the group; with several groups, cut by each in turn until nothing changes.
        start: tokens already computed.
        want: what budgets allow.
        prompt_len: tokens to compute before anything is sampled.
        drop_last_block: hits lose their last block, as they do where a drafter's keys and values of it are missing; the
            last useful boundary is then one block earlier.

    Returns:
        0 if `want` does not reach the next boundary: the request has to wait for a step with more room. A budget of at
        least `layout.block_size` never waits.

    Raises:
        ValueError: start is not in [0, prompt_len), or want is negative.
    """
    if not 0 <= start < prompt_len:
        raise ValueError(f"start is {start}; it must be in [0, prompt_len = {prompt_len})")
    if want < 0:
        raise ValueError(f"want is {want}; it must be at least 0")
    end = min(start + want, prompt_len)
    if layout.mode is not MambaCacheMode.ALIGN or layout.policy is not StatePolicy.SLOTS:
        return end - start
    last = layout.max_hit_tokens(prompt_len) - (layout.block_size if drop_last_block else 0)
    if end < prompt_len:
        end -= end % layout.block_size
    if start < last < end:
        end = last
    return max(end - start, 0)
