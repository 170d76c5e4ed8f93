"""Measuring a model: weights, multiply-accumulates, latency."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compress.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.core.artifact import Predictor

WARM_UP_SECONDS = 0.15
MEASURED_SECONDS = 0.6
MINIMUM_ROUNDS = 15


class Latency(Settings):
    """Time of one call."""

    batch: int
    """Samples per call."""
    p50: float
    """Median, in milliseconds."""
    p95: float
    """95th percentile, in milliseconds."""


@dataclass(frozen=True)
class Comparison:
    """Latencies of two models measured in turn in one process."""

    before: Latency
    after: Latency

    @property
    def speedup(self) -> float:
        """How many times faster ``after`` is, by the medians."""
        return self.before.p50 / self.after.p50


def compare_latency(
    before: Predictor, after: Predictor, inputs: Sequence[torch.Tensor]
) -> Comparison:
    """Measure two models call by call in turn, so that both see the same noise.

    Args:
        before: the model compared with.
        after: the candidate.
        inputs: one batch, the same for both.
    """
    times_before, times_after = _rounds([before, after], inputs)
    batch = len(inputs[0])
    return Comparison(_latency(times_before, batch), _latency(times_after, batch))


def count_macs(module: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Count the multiply-accumulates (convolutions, products, attention) for one sample."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The counter does not see fused attention: run it as the products it is made of.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH),
            torch.no_grad(),
        ):
            module(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return int(counter.get_total_flops()) // 2 // len(inputs[0])


def count_graph_weights(program: torch.export.ExportedProgram) -> int:
    """Count a graph's weights: parameters, and the integer tensors that quantization made of them.

    Scales and zero points (and BatchNorm statistics) are not weights.
    """
    tensors = {**program.state_dict, **program.constants}
    quantized = {
        str(node.args[0].target)
        for node in program.graph.nodes
        if "dequantize" in str(node.target) and node.args[0].op in ("get_attr", "placeholder")
    }
    inputs = program.graph_signature
    by_placeholder = {
        **inputs.inputs_to_parameters,
        **inputs.inputs_to_buffers,
        **inputs.inputs_to_lifted_tensor_constants,
    }
    names = {by_placeholder.get(q, q) for q in quantized} | set(inputs.parameters)
    return sum(t.numel() for k, t in tensors.items() if k in names and isinstance(t, torch.Tensor))


def _rounds(predictors: Sequence[Predictor], inputs: Sequence[torch.Tensor]) -> list[list[float]]:
    deadline = time.perf_counter() + WARM_UP_SECONDS * len(predictors)
    while True:
        for predict in predictors:
            predict(*inputs)
        if time.perf_counter() >= deadline:
            break
    times: list[list[float]] = [[] for _ in predictors]
    deadline = time.perf_counter() + MEASURED_SECONDS * len(predictors)
    while len(times[0]) < MINIMUM_ROUNDS or time.perf_counter() < deadline:
        for predict, own in zip(predictors, times, strict=True):
            start = time.perf_counter()
            predict(*inputs)
            own.append(time.perf_counter() - start)
    return times


def _latency(seconds: Sequence[float], batch: int) -> Latency:
    p95 = statistics.quantiles(seconds, n=20)[-1]
    return Latency(batch=batch, p50=statistics.median(seconds) * 1e3, p95=p95 * 1e3)
