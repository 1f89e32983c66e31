"""Argument checks shared by the planners."""

from collections.abc import Mapping

from torch import Tensor

from bateleur.mamba.spec import CacheLayout, StatePolicy


def require(layout: CacheLayout, policy: StatePolicy, table: Tensor, rows: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError if the state policy is wrong, the table too narrow, or a tensor not one entry per table row."""
    require_policy(layout, policy)
    num_rows, columns = table.shape
    if columns < layout.columns():
        raise ValueError(
            f"table has {columns} columns; a layout of {layout.num_speculative_tokens} draft tokens and "
            f"{layout.max_model_len} tokens in blocks of {layout.block_size} needs {layout.columns()}"
        )
    require_rows("table", num_rows, rows)


def require_policy(layout: CacheLayout, policy: StatePolicy) -> None:
    """Raise ValueError if the layout has another state policy than `policy`."""
    if layout.policy is not policy:
        raise ValueError(f"layout has the policy {layout.policy.value!r}; this plan is for {policy.value!r}")


def require_rows(of: str, num_rows: int, rows: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError unless each tensor is (num_rows,): other shapes would be broadcast, or would resize `out`."""
    shape = (num_rows,)
    for name, tensor in rows.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the {of} has {num_rows} rows")
