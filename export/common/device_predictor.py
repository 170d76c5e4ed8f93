"""Answers from another device, brought to where they are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from compress.common.forward import Predictor


def on_cpu(predict: Predictor) -> Predictor:
    """Return a predictor whose answers are on the CPU, where the source's are."""

    def answer(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.cpu() for t in predict(*inputs))

    return answer
