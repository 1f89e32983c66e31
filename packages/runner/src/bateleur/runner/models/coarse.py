"""Matrices in eight bits, for what need not be exact: drafts, each of which the target tests."""

from __future__ import annotations

from torch import Tensor

from bateleur.eagle.heads.spec import CProduct
from bateleur.runner.models.matrix import Projection
from bateleur.runner.models.native import coarse


class CoarseProjection(Projection):
    """A projection that is packed in eight bits, and tokens with it: a quarter of the bytes of float32 to read, and
    products of four columns at once, off by a hundredth of their size. What can't be packed so is packed as others are.
    """

    __slots__ = ("_coarse", "_columns")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._coarse: Tensor | None = None
        self._columns = weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """(T, rows) of x (T, columns)."""
        if self._coarse is None:
            return super().__call__(x)
        return coarse.coarse_product(x, self._coarse, self.bias, self._rows, self._columns)

    @property
    def weight(self) -> Tensor:
        """W: the tensor that was given, or once it is packed what it was rounded to."""
        if self._coarse is None:
            return super().weight
        return coarse.unpack(self._coarse, self._rows, self._columns)

    @property
    def in_c(self) -> CProduct | None:
        """How a kernel in C calls it."""
        if self._coarse is None:
            return super().in_c
        return CProduct(coarse.address(), self._coarse, self.bias, self._rows, self._columns)

    def pack(self, *, recorded: bool = False) -> None:
        """Lay W out in eight bits, in place of the tensor that was given."""
        if self._weight is None or not coarse.packs(self._weight):
            return super().pack(recorded=recorded)
        self._coarse, self._weight = coarse.pack(self._weight), None
        return None
