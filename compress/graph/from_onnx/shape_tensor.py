"""ShapeTensor: a small ONNX tensor held as Python numbers, so that sizes stay symbolic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LARGEST = 1024
"""Constants of integers with more entries are tensors: tables of indices, not shapes."""


@dataclass(frozen=True)
class ShapeTensor:
    """A tensor of at most one axis whose entries are numbers, of which some may be symbolic.

    ONNX computes shapes by the operators that compute everything else. Tensors would make them
    depend on data, which `torch.export` cannot use as sizes.
    """

    values: tuple[Any, ...]
    is_vector: bool
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of axes: 0 or 1."""
        return int(self.is_vector)

    def tensor(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the numbers as a tensor."""
        if any(isinstance(v, torch.SymInt | torch.SymFloat) for v in self.values):
            entries = [torch.scalar_tensor(v, dtype=self.dtype, device=device) for v in self.values]
            return torch.stack(entries) if self.is_vector else entries[0]
        shape = (len(self.values),) if self.is_vector else ()
        return torch.tensor(self.values, dtype=self.dtype, device=device).reshape(shape)

    def map(self, function: Callable[..., Any], *others: ShapeTensor, dtype: Any = None) -> Any:
        """Return a function's results for each entry, broadcast to the longest operand."""
        operands = (self, *others)
        length = max(len(o.values) for o in operands)
        rows = [o.values * length if len(o.values) == 1 else o.values for o in operands]
        is_vector = any(o.is_vector for o in operands)
        values = tuple(function(*row) for row in zip(*rows, strict=True))
        return ShapeTensor(values, is_vector, dtype or self.dtype)


Value = Any
"""A tensor, a ShapeTensor, or a list of them for a sequence: which, the graph decides."""


def vector(values: Any, dtype: torch.dtype = torch.int64) -> ShapeTensor:
    """Return numbers as a ShapeTensor of one axis."""
    return ShapeTensor(tuple(values), True, dtype)


def from_numpy(array: Any) -> torch.Tensor:
    """Return an array of NumPy's or ml_dtypes' types as a tensor."""
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_constant(tensor: torch.Tensor) -> ShapeTensor | None:
    """Return a constant as a ShapeTensor; None if it has more axes or entries."""
    if tensor.ndim > 1 or tensor.numel() > LARGEST or tensor.is_complex():
        return None
    return ShapeTensor(tuple(tensor.reshape(-1).tolist()), tensor.ndim == 1, tensor.dtype)


def to_tensor(value: Any, device: torch.device | None = None) -> torch.Tensor:
    """Return a value as a tensor."""
    return value.tensor(device) if isinstance(value, ShapeTensor) else value


def to_sizes(value: Value) -> list[Any]:
    """Return the entries of an integer tensor as Python numbers, symbolic ones where need be."""
    if isinstance(value, ShapeTensor):
        return list(value.values)
    return value.reshape(-1).tolist()


def to_number(value: Value) -> Any:
    """Return the one entry of a tensor."""
    (number,) = to_sizes(value)
    return number
