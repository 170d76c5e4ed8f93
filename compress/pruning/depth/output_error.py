"""Output error: how much worse a changed model is than the model it was made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.common.tensor_difference import relative_error_of_batches
from compress.core.metrics.builtin import joint_decisions
from compress.data.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.common.tensor_difference import Pair
    from compress.core.context import Context
    from compress.core.metrics import MetricMeter

JudgedBy: TypeAlias = Literal["metric", "outputs"]


@dataclass(frozen=True)
class OutputError:
    """Effect of a change on a model's outputs."""

    distance: float
    """Norm of the difference of the outputs, over the norm of the unchanged outputs."""
    points: float | None = None
    """Drop of the metric in hundredths (percentage points); None without targets."""

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: the metric drop, and among equals the distance of the outputs."""
        return (self.points or 0.0, self.distance)

    def facts(self) -> dict[str, float]:
        """Return the error as rounded facts."""
        points = {} if self.points is None else {"points": round(self.points, 6)}
        return {**points, "distance": float(f"{self.distance:.6g}")}


class OutputErrorMeter:
    """Compares changed modules with the unchanged one on the same samples."""

    def __init__(
        self,
        module: nn.Module,
        signature: Signature,
        context: Context,
        judged_by: JudgedBy | None = None,
        samples: int = 512,
    ) -> None:
        """Run the unchanged module in eval mode; modules are moved to the context's device.

        Errors are judged by the metric if `val` has targets, unless ``judged_by`` says otherwise,
        on at most ``samples`` samples of `val`; without data on a few seeded ones.

        Raises:
            StageFailed: the metric is asked for and cannot be measured.
        """
        self.signature, self.context = signature, context
        metric = context.metric.for_model(signature)
        self.metric = metric.with_inferred_loss(context.data)
        if context.data is not None and "val" in context.data.datasets:
            self.batches = list(context.data.batches("val", limit=samples))
        else:
            self.batches = [Batch(x, None) for x in context.comparison_inputs(signature)]
        # Kept, because every changed module is compared with them.
        self.expected = list(self._outputs(module))
        self.targets = [batch.target for batch in self.batches]
        if self.metric.needs_reference and judged_by != "outputs":
            self.targets = [joint_decisions(outputs, context.task) for outputs in self.expected]
        has_targets = all(target is not None for target in self.targets) and self.metric.is_measured
        if judged_by == "metric" and not has_targets:
            raise StageFailed(
                f"judged_by: metric needs a split 'val' with targets for {self.metric.name}; "
                "bring one, or use judged_by: outputs"
            )
        self.by_metric = judged_by != "outputs" and has_targets
        self.base = self._measure(self.expected)[1]

    @property
    def judged_by(self) -> JudgedBy:
        """What errors are ranked by."""
        return "outputs" if self.base is None else "metric"

    def measure(self, changed: nn.Module) -> OutputError:
        """Measure the error of a changed module.

        Raises:
            StageFailed: the outputs have another shape, or are NaN or infinite where they were not.
        """
        return self._error(self._outputs(changed))

    def measure_predictor(self, predict: Predictor) -> OutputError:
        """Measure the error of a model in any format, that takes any number of samples."""
        return self._error(self._outputs_read(predict))

    def _error(self, outputs: Iterable[list[torch.Tensor]]) -> OutputError:
        distance, value = self._measure(outputs)
        if value is None or self.base is None:
            return OutputError(distance)
        return OutputError(distance, self.metric.drop_points(self.base, value))

    def _outputs(self, module: nn.Module) -> Iterator[list[torch.Tensor]]:
        device, threads = self.context.device, self.context.threads
        with torch_predictor(module.eval().to(device), device, threads) as predict:
            yield from self._outputs_read(accept_any_batch(predict, self.signature))

    def _outputs_read(self, predict: Predictor) -> Iterator[list[torch.Tensor]]:
        """Yield the outputs that the metric reads, and at least the first."""
        for batch in self.batches:
            read = self.metric.outputs_read(predict(*batch.inputs))
            yield [read] if isinstance(read, torch.Tensor) else list(read)

    def _measure(self, batches: Iterable[list[torch.Tensor]]) -> tuple[float, float | None]:
        """Return the relative error of outputs, and the metric if errors are judged by it."""
        meter = self.metric.meter()
        distance = relative_error_of_batches(self._compared(batches, meter))
        if not math.isfinite(distance):
            raise StageFailed("the outputs are NaN or infinite where they were not")
        if not self.by_metric:
            return distance, None
        return distance, self.metric.require_finite(meter.compute(), "val")

    def _compared(
        self, batches: Iterable[list[torch.Tensor]], meter: MetricMeter
    ) -> Iterator[Pair]:
        """Yield the unchanged module's first output beside others', and add these to a meter."""
        for (expected, *_), outputs, target in zip(
            self.expected, batches, self.targets, strict=True
        ):
            if outputs[0].shape != expected.shape:
                raise StageFailed(
                    f"the outputs' shape becomes {tuple(outputs[0].shape)}, from "
                    f"{tuple(expected.shape)}"
                )
            yield expected, outputs[0]
            if self.by_metric and target is not None:
                meter.update(outputs, target)
