"""What a cut network can win back without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.core.errors import StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.core.data import Batch


@torch.no_grad()
def reestimate_batch_norms_(
    module: nn.Module, batches: Iterable[Batch], device: str = "cpu"
) -> None:
    """Average BatchNorm statistics anew over batches, in place, and leave the module in eval mode.

    Removed channels shift the statistics of all that follow (Li et al., "EagleEye", 2020).

    Raises:
        StageFailed: the module does not take the batches.
    """
    norms = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
    ]
    # One sample has no variance where BatchNorm sees no other axis.
    usable = [batch for batch in batches if len(batch) > 1]
    if not norms or not usable:
        return
    momenta = [norm.momentum for norm in norms]
    module.eval().to(device)
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    for batch in usable:
        _run(module, batch.to(device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    module.cpu()


def _run(module: nn.Module, batch: Batch) -> None:
    try:
        module(*batch.inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.inputs)
        raise StageFailed(
            f"averaging BatchNorm statistics: the model does not take the calibration samples, a "
            f"batch of shape {shapes}: {type(error).__name__}: {first_line(error)}; "
            "the data must give what model.inputs declares"
        ) from error
