"""Zeros where they matter least to what layers answer on calibration data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.pruning.importance.layer_calls import observe_layer_calls
from compress.pruning.importance.moments import MAX_COLUMNS, Moments
from compress.pruning.unstructured.masks import sparsegpt, wanda
from compress.pruning.unstructured.weight_layout import in_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from compress.core.stage import Progress
    from compress.data.batch import Batch
    from compress.pruning.importance.layer_calls import LayerCall
    from compress.pruning.unstructured.masks import Method, NofM
    from compress.pruning.unstructured.weight_layout import WeightLayout


@torch.no_grad()
def set_calibrated_zeros_(
    module: nn.Module,
    layouts: Mapping[str, WeightLayout],
    batches: Sequence[Batch],
    *,
    method: Method,
    amount: float,
    n_of_m: NofM | None,
    device: str,
    progress: Progress,
) -> dict[str, str]:
    """Set entries of weights to zero, in place, and return those left alone and why.

    Block by block, so that each sees what those before it now answer.

    Args:
        module: a module in eval mode, which ends up on the device.
        layouts: weight in the order of its use → how it is read.
        batches: calibration data.
        method: `wanda` or `sparsegpt`, which changes other entries, too.
        amount: share of zeros.
        n_of_m: or so many of so many neighbours stay.
        device: where to compute.
        progress: told of each block.

    Raises:
        StageFailed: the module does not take the batches.
    """
    module.to(device)
    weights, left = dict(module.named_parameters()), {}
    groups = in_groups(module, list(layouts))
    for done, group in enumerate(groups, 1):
        moments = _moments(module, {name: layouts[name] for name in group}, batches, device)
        for name in group:
            reason = _unusable(moments[name])
            if reason:
                left[name] = reason
                continue
            layout, gram = layouts[name], moments[name].gram_gii
            matrix = layout.matrix(weights[name].detach().double())
            if method == "sparsegpt":
                matrix = sparsegpt(matrix, gram, amount, n_of_m)
            else:
                matrix = matrix.masked_fill(wanda(matrix, gram, amount, n_of_m), 0)
            weights[name].copy_(layout.weight(matrix, weights[name].shape))
        progress(method, done, len(groups))
    return left


def _moments(
    module: nn.Module, layouts: Mapping[str, WeightLayout], batches: Sequence[Batch], device: str
) -> dict[str, Moments]:
    """Return the products of what some weights are multiplied with."""
    moments = {name: Moments() for name in layouts}

    def watch(call: LayerCall) -> None:
        if call.weight in moments and call.columns <= MAX_COLUMNS:
            layout = layouts[call.weight]
            for columns_gpi, _ in call.parts():
                moments[call.weight].add_(layout.columns(columns_gpi))

    observe_layer_calls(module, batches, watch, device)
    return moments


def _unusable(moments: Moments) -> str | None:
    """Return why nothing can be learnt from what a layer was seen to read."""
    if not moments.positions:
        return (
            f"it was not called on the calibration data, or reads more than {MAX_COLUMNS} numbers"
        )
    if not bool(torch.isfinite(moments.gram_gii).all()):
        return "what it reads on the calibration data is not finite"
    return None
