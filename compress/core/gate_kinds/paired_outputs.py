"""Outputs of two models for the same inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


def paired_outputs(
    before: Artifact, after: Artifact, context: Context
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield both models' outputs for the same batches, on the CPU."""
    with context.predictor(before) as expected, context.predictor(after) as got:
        batch_size = context.judged_batch_size(before, after)
        for inputs in context.comparison_inputs(before.signature, batch_size):
            outputs = expected(*inputs), got(*inputs)
            yield tuple(t.cpu() for t in outputs[0]), tuple(t.cpu() for t in outputs[1])
