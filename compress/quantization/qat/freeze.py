"""What a quantization-aware training holds still: ranges, BatchNorm statistics, zeros."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.quantization.qat.fake_model import FakeQuantized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass(frozen=True)
class Freezing:
    """Shares of the steps after which ranges and statistics stay; a constraint of the trainer.

    After Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference" (2018),
    section 3.2.2: what still moves in the end makes the last weights fit another grid. Entries of
    matrices and kernels that are zero stay so throughout: a stage before may have made them.
    """

    ranges: float
    batch_norm: float

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Take a step in a block, put zeros back, and freeze what is due after it."""
        zeros = [(weight, weight == 0) for weight in module.parameters() if weight.ndim > 1]
        for weight, where in zeros:
            if weight.grad is not None:
                weight.grad.masked_fill_(where, 0)
        yield
        with torch.no_grad():
            for weight, where in zeros:
                weight.masked_fill_(where, 0)
        if isinstance(module, FakeQuantized):
            self.apply_(module, (step + 1) / steps)

    def apply_(self, module: FakeQuantized, share: float) -> None:
        """Freeze, in place, what is due after a share of the steps."""
        module.freeze_(ranges=share >= self.ranges, batch_norm=share >= self.batch_norm)

    def is_met(self, share: float) -> bool:
        """Return True: any weights can be the result."""
        return True
