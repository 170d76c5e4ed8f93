"""Set zeros by calibration data, block by block: Wanda and SparseGPT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.pruning.importance.activation_saliency import MAX_COLUMNS, Moments
from compress.pruning.importance.layer_calls import observe_layer_calls
from compress.pruning.unstructured.masks import sparsegpt, wanda
from compress.pruning.unstructured.weight_layout import group_by_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from compress.core.progress import Progress
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
    """Set entries of weights to zero, in place; return the weights that were skipped → why.

    The module is in eval mode, and is moved to the device. ``layouts`` are in the order of use.

    Raises:
        StageFailed: the module does not take the batches.
    """
    module.to(device)
    weights, skipped = dict(module.named_parameters()), {}
    groups = group_by_block(module, list(layouts))
    # Blocks in order, so that each is calibrated on the outputs of the pruned ones before.
    for done, group in enumerate(groups, 1):
        moments = _moments(module, {name: layouts[name] for name in group}, batches, device)
        for name in group:
            if not moments[name].positions:
                skipped[name] = (
                    "it was not called on the calibration data, or reads more than "
                    f"{MAX_COLUMNS} numbers"
                )
                continue
            if not bool(torch.isfinite(moments[name].gram_gii).all()):
                skipped[name] = "what it reads on the calibration data is not finite"
                continue
            layout, gram = layouts[name], moments[name].gram_gii
            matrix = layout.matrix(weights[name].detach().double())
            if method == "sparsegpt":
                matrix = sparsegpt(matrix, gram, amount, n_of_m)
            else:
                matrix = matrix.masked_fill(wanda(matrix, gram, amount, n_of_m), 0)
            weights[name].copy_(layout.weight(matrix, weights[name].shape))
        progress(method, done, len(groups))
    return skipped


def _moments(
    module: nn.Module, layouts: Mapping[str, WeightLayout], batches: Sequence[Batch], device: str
) -> dict[str, Moments]:
    """Return the second moments of the inputs of some weights."""
    moments = {name: Moments() for name in layouts}

    def add_to_moments(call: LayerCall) -> None:
        if call.weight in moments and call.columns <= MAX_COLUMNS:
            layout = layouts[call.weight]
            for columns_gpi, _ in call.parts():
                moments[call.weight].add_(layout.columns(columns_gpi))

    observe_layer_calls(module, batches, add_to_moments, device)
    return moments
