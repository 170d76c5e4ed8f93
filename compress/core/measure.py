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
    before: Predictor,
    after: Predictor,
    inputs: Sequence[torch.Tensor],
    seconds: float = MEASURED_SECONDS,
) -> Comparison:
    """Measure two models call by call in turn, so that both see the same noise.

    Args:
        before: the model compared with.
        after: the candidate.
        inputs: one batch, the same for both.
        seconds: how long each is measured, after a quarter of that to warm up.
    """
    return Comparison(*latencies([before, after], inputs, seconds))


def latencies(
    predictors: Sequence[Predictor],
    inputs: Sequence[torch.Tensor],
    seconds: float = MEASURED_SECONDS,
) -> list[Latency]:
    """Measure any number of models call by call in turn, so that all see the same noise.

    Args:
        predictors: the models.
        inputs: one batch, the same for all.
        seconds: how long each is measured, after a quarter of that to warm up.
    """
    return [_latency(times, len(inputs[0])) for times in _rounds(predictors, inputs, seconds)]


def count_macs(module: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Count the multiply-accumulates (convolutions, products, attention) for one sample."""
    # torch's counter fails on a parameter that is handed to a submodule and asks for gradients.
    learning = [p for p in module.parameters() if p.requires_grad]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The counter sees neither fused attention nor oneDNN's LSTM: run them as products.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with (
            FlopCounterMode(display=False) as counter,
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
            sdpa_kernel(SDPBackend.MATH),
            torch.no_grad(),
        ):
            module(*inputs)
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return int(counter.get_total_flops()) // 2 // len(inputs[0])


def count_graph_weights(program: torch.export.ExportedProgram) -> int:
    """Count a graph's weights: parameters, and the integer tensors that quantization made of them.

    Scales and zero points (and BatchNorm statistics) are not weights.
    """
    inputs = program.graph_signature
    by_placeholder = {
        **inputs.inputs_to_parameters,
        **inputs.inputs_to_buffers,
        **inputs.inputs_to_lifted_tensor_constants,
    }
    tensors = {**program.state_dict, **program.constants}
    per_element = {name: 1 for name in inputs.parameters if name in tensors}
    for node in program.graph.nodes:
        name = by_placeholder.get(node.name, str(node.target))
        if node.op in ("get_attr", "placeholder") and name in tensors:
            held = max((_weights_per_element(node, reader) for reader in node.users), default=0)
            per_element[name] = max(held, per_element.get(name, 0))
    return sum(int(tensors[name].numel()) * count for name, count in per_element.items())


def _weights_per_element(tensor: Any, reader: Any) -> int:
    """Return how many weights an operator finds in each element of an integer tensor."""
    value, operator = tensor.meta["val"], str(reader.target)
    if value.is_floating_point() or reader.args[0] is not tensor or value.dim() < 1:
        return 0
    if "bitwise_and" in operator:
        return 2  # two of four bits in a byte
    is_table = "embedding" in operator and value.shape[-1] > 1
    is_packed = "view" in operator and value.dtype is torch.uint8
    return int("dequantize" in operator or is_table or is_packed)


def _rounds(
    predictors: Sequence[Predictor], inputs: Sequence[torch.Tensor], seconds: float
) -> list[list[float]]:
    deadline = time.perf_counter() + seconds / 4 * len(predictors)
    while True:
        for predict in predictors:
            predict(*inputs)
        if time.perf_counter() >= deadline:
            break
    times: list[list[float]] = [[] for _ in predictors]
    deadline = time.perf_counter() + seconds * len(predictors)
    while len(times[0]) < MINIMUM_ROUNDS or time.perf_counter() < deadline:
        for predict, own in zip(predictors, times, strict=True):
            start = time.perf_counter()
            predict(*inputs)
            own.append(time.perf_counter() - start)
    return times


def _latency(seconds: Sequence[float], batch: int) -> Latency:
    p95 = statistics.quantiles(seconds, n=20)[-1]
    return Latency(batch=batch, p50=statistics.median(seconds) * 1e3, p95=p95 * 1e3)
