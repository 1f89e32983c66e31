"""Passes the tensors of a checkpoint to a head: each is taken once, by name, with its required shape."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bateleur.eagle.heads.spec import Project

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that computes x W^T + b in torch, the default `Project`."""
    return lambda x: F.linear(x, weight, bias)


class Weights:
    """Tensors by name, converted to one dtype on one device when taken.

    Missing tensors, wrong shapes and dtypes such as quantised weights are only recorded (a placeholder without storage
    is returned), so that `check` can list all of them at once.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        stored_name: Callable[[str], str] = str,
        project: Project = linear,
    ) -> None:
        """stored_name: returns a name as in the file, for messages. project: creates functions that multiply with
        matrices.
        """
        self.dtype, self.device, self.project = dtype, torch.device(device), project
        self.own: dict[str, tuple[int, int]] = {}
        self._tensors, self._stored_name = tensors, stored_name
        self._taken: set[str] = set()
        self._problems: dict[str, list[str]] = {"missing weights": [], "unexpected shapes": [], "unexpected dtypes": []}

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has the tensor."""
        return name in self._tensors

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of this name. If it is missing or unsuitable, return a placeholder and let `check` raise.

        dtype: integer dtype of the result, which is then on the CPU; None for a tensor of floats.
        """
        self._taken.add(name)
        spelled, tensor = self._stored_name(name), self._tensors.get(name)
        if tensor is None:
            self._problems["missing weights"].append(f"{spelled} {shape}")
        elif dtype is None and tensor.dtype not in _FLOATS:
            floats = ", ".join(str(each) for each in _FLOATS)
            self._problems["unexpected dtypes"].append(f"{spelled} is {tensor.dtype} and must be one of {floats}")
        elif tuple(tensor.shape) != shape:
            self._problems["unexpected shapes"].append(f"{spelled} is {tuple(tensor.shape)} and must be {shape}")
        else:
            # A copy: memory of a mapped file may be unaligned, and may change.
            device = "cpu" if dtype else self.device
            copied = tensor.to(device=device, dtype=dtype or self.dtype, copy=True).contiguous()
            self.own[spelled] = copied.numel(), copied.nbytes
            return copied
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def product(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool = False
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies with stacked matrices, and adds their stacked biases if `bias` is True.

        Matrix i is the tensor `names[i] + ".weight"` (rows[i], columns), its bias `names[i] + ".bias"` (rows[i],).
        """
        weight = self._stacked([f"{name}.weight" for name in names], rows, columns)
        return self.project(weight, self._stacked([f"{name}.bias" for name in names], rows) if bias else None)

    def integers(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of integers as int64 on the CPU, see `take`. Raises ValueError if its dtype is no integer."""
        if name in self._tensors and self._tensors[name].dtype not in _WHOLE:
            raise ValueError(f"{self._stored_name(name)} is {self._tensors[name].dtype}; it must hold whole numbers")
        return self.take(name, *shape, dtype=torch.int64)

    def check(self, ignorable: Callable[[str], bool]) -> tuple[str, ...]:
        """Return the sorted names of unused tensors, if `ignorable` is True for each name.

        Raises ValueError that lists missing tensors, wrong shapes or dtypes, and other unused tensors.
        """
        rest = sorted(self._tensors.keys() - self._taken)
        unknown = [self._stored_name(name) for name in rest if not ignorable(name)]
        problems = self._problems | {"weights of no known use": unknown}
        if found := [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]:
            raise ValueError("; ".join(found))
        return tuple(self._stored_name(name) for name in rest)

    def _stacked(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        parts = [self.take(name, n, *columns) for name, n in zip(names, rows, strict=True)]
        if any(shard.is_meta for shard in parts):
            return torch.empty(sum(rows), *columns, dtype=self.dtype, device="meta")
        return parts[0] if len(parts) == 1 else torch.cat(parts)
