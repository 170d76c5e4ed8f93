"""PredictorModule: an artifact of any format as a torch module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch

    from compress.common.forward import Predictor


class PredictorModule(nn.Module):
    """Calls a predictor of another runtime; it has no parameters and cannot be trained."""

    def __init__(self, predict: Predictor) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the model's output, or all of them where it has several."""
        outputs = self.predict(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs
