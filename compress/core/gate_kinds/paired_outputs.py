"""Outputs of two models for the same inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


def paired_outputs(
    before: Artifact, after: Artifact, context: Context
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield both models' outputs for the same batches, on the CPU; there are as many of both."""
    with context.predictor(before) as expected, context.predictor(after) as got:
        batch_size = context.judged_batch_size(before, after)
        for inputs in context.comparison_inputs(before.signature, batch_size):
            one, other = (tuple(x.cpu() for x in run(*inputs)) for run in (expected, got))
            if len(one) != len(other):
                raise StageFailed(f"{len(one)} outputs against {len(other)}")
            yield one, other
