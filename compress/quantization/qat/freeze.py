"""Freeze ranges and BatchNorm statistics late in training; keep zero weights at zero throughout."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.quantization.qat.fake_model import FakeQuantizedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass(frozen=True)
class FreezeSchedule:
    """The shares of the training after which ranges and statistics stay; a weight constraint.

    After Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference" (2018),
    section 3.2.2: ranges that still move at the end would make the last weights fit another scale.
    Entries of matrices and kernels that are zero stay so: an earlier stage may have pruned them.
    """

    ranges: float
    batch_norm: float

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Context of an optimizer step: restores zeros after it, and freezes what is due."""
        zeros = [(weight, weight == 0) for weight in module.parameters() if weight.ndim > 1]
        for weight, mask in zeros:
            if weight.grad is not None:
                weight.grad.masked_fill_(mask, 0)
        yield
        with torch.no_grad():
            for weight, mask in zeros:
                weight.masked_fill_(mask, 0)
        if isinstance(module, FakeQuantizedModel):
            self.apply_(module, (step + 1) / steps)

    def apply_(self, module: FakeQuantizedModel, share: float) -> None:
        """Freeze what is due after a share of the steps."""
        module.freeze_(ranges=share >= self.ranges, batch_norm=share >= self.batch_norm)

    def is_met(self, share: float) -> bool:
        """Return True: the weights of every epoch may be kept."""
        return True
