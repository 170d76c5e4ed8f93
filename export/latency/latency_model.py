"""From the kernels of a model to its latency."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from scipy.optimize import nnls

from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.export.onnx.session import opened_session
from compress.profiling.benchmark import compare_latencies, unmeasurable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from compress.export.latency.kernels import Kernel, KernelTable


def measure_files(
    files: Sequence[Path], batches: Sequence[Sequence[torch.Tensor]], threads: int
) -> list[float]:
    """Return the median latency of ONNX files in seconds, measured in turn.

    Raises:
        StageFailed: the machine is too busy to measure them.
    """
    openers = [partial(opened_session, file, threads) for file in files]
    measured = compare_latencies(openers, batches, threads=threads).latencies
    for latency in measured:
        if latency.p50_doubt:
            raise StageFailed(unmeasurable("the latency of a variant", latency.p50_doubt))
    return [1e-3 * latency.p50 for latency in measured]


class KernelCost(NamedTuple):
    """What the kernels of a model add up to."""

    seconds: float
    """Of all kernels, each measured alone."""
    weight_bytes: int
    """Bytes of constants that they read."""

    @classmethod
    def of_kernels(cls, kernels: Sequence[Kernel], table: KernelTable) -> Self:
        """Add up the kernels of a model; all of them are in the table."""
        return cls(sum(map(table.seconds, kernels)), sum(k.weight_bytes for k in kernels))


class LatencyModel(Settings):
    """A model's latency as a sum over its kernels, corrected by the latencies of whole models."""

    per_kernel_second: float
    """Seconds for each second of the kernels alone."""
    per_weight_byte: float
    """Seconds for each byte of weights. A kernel that is called alone again and again finds its
    weights in the processor's nearest cache; in a model whose weights do not fit, the layers
    between have replaced them. On a ResNet-20 of 1.1 M weights this is two thirds of the time."""
    per_call: float
    """Seconds for each call of the model."""

    @classmethod
    def fit(cls, costs: Sequence[KernelCost], seconds: Sequence[float]) -> Self:
        """Fit the three coefficients, none negative, to the least relative errors."""
        measured = np.array(seconds)
        features = np.array([[cost.seconds, cost.weight_bytes, 1.0] for cost in costs])
        # Columns of the same magnitude, as bytes are millions and seconds fractions.
        scale = features.max(axis=0)
        scale[scale == 0] = 1.0
        relative = features / scale / measured[:, None]
        coefficients, _ = nnls(relative, np.ones(len(measured)))
        kernels, weights, call = (coefficients / scale).tolist()
        return cls(per_kernel_second=kernels, per_weight_byte=weights, per_call=call)

    def predict(self, cost: KernelCost) -> float:
        """Return the seconds of one call of a model."""
        return (
            self.per_kernel_second * cost.seconds
            + self.per_weight_byte * cost.weight_bytes
            + self.per_call
        )
