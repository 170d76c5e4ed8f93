"""Asking a model whose batch size is fixed about any number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from compress.artifacts.artifact import Predictor
    from compress.common.signature import Signature


def any_batch(predict: Predictor, signature: Signature) -> Predictor:
    """Return a predictor that takes any number of samples.

    Of a model with a fixed batch the samples are asked in groups of that size, the last one filled
    up with copies whose answers are dropped. Outputs must have the batch on their first axis.
    """
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else None
    if not isinstance(size, int):
        return predict

    def predict_in_groups(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import torch

        rows = len(inputs[0])
        answers = []
        for start in range(0, rows, size):
            wanted = torch.arange(start, start + size).clamp(max=rows - 1)
            answers.append(predict(*(x[wanted] for x in inputs)))
        return tuple(torch.cat(column)[:rows] for column in zip(*answers, strict=True))

    return predict_in_groups
