"""Proof that a cut is right: the smaller module answers as the original with the channels silenced.

Tracing can miss what Python did outside the graph: a width written into a ``view``, a mean over
channels computed from a shape, an index into channels. So no cut is trusted: it is made on a copy
and compared, on seeded inputs, with its masked twin, in which every entry that would go is zero.
A zero row is silent whatever comes between it and its readers, because their columns are zero too.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from compress.core.eager import run_in_eval
from compress.core.errors import first_line
from compress.core.surgery import keep_indices_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from compress.pruning.families import Kept

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest difference, relative to the largest output; in exact arithmetic there is none."""


class Proof:
    """Compares cuts of a module with their masked twins, in double precision where it runs."""

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        """Take a module, which is not changed, and the inputs it is asked."""
        try:
            self._prepare(module, inputs, torch.float64)
            run_in_eval(self._module, self._inputs)
        except Exception:  # noqa: BLE001 - whatever a forward does when it insists on float32
            self._prepare(module, inputs, torch.float32)

    def refute(self, kept: Kept, attributes: Mapping[str, int]) -> str | None:
        """Return why a cut is wrong, or None when it is proven.

        Args:
            kept: tensor → axis → indices that stay.
            attributes: dotted attribute → value that goes with the cut.
        """
        masked = copy.deepcopy(self._module)
        silence_(masked, kept)
        expected = run_in_eval(masked, self._inputs)
        smaller = shallow_copy(self._module)
        try:
            keep_indices_(smaller, kept, attributes)
            found = run_in_eval(smaller, self._inputs)
        except Exception as error:  # noqa: BLE001 - a forward may fail in any way
            return f"the smaller model fails: {type(error).__name__}: {first_line(error)}"
        if [x.shape for x in found] != [x.shape for x in expected]:
            return "the smaller model's outputs have another shape"
        worst = max(map(_relative_difference, found, expected))
        if not worst <= TOLERANCE[self._dtype]:  # so that NaN is refused too
            return f"the smaller model answers otherwise than its masked twin (by {worst:.1e})"
        return None

    def _prepare(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._module = copy.deepcopy(module).to(dtype).eval()
        self._inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]


@torch.no_grad()
def silence_(module: nn.Module, kept: Kept) -> None:
    """Set all entries that a cut would remove to zero, in place."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
    }
    for name, axes in kept.items():
        for axis, indices in axes.items():
            leaves = torch.ones(tensors[name].shape[axis], dtype=torch.bool)
            leaves[list(indices)] = False
            tensors[name].index_fill_(axis, leaves.nonzero().flatten(), 0)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares its tensors; fit for surgery, which replaces them."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-12))
