"""Output error: how much worse a changed model is than the model it was made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.common.tensor_difference import relative_error
from compress.core.metrics import predict_batches, predicted_decisions
from compress.data.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.common.signature import Signature
    from compress.core.context import Context

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
        """Run the unchanged module in eval mode; it is moved to the context's device.

        Errors are judged by the metric if `val` has targets, unless ``judged_by`` says otherwise,
        on at most ``samples`` samples of `val`; without data on a few seeded ones.

        Raises:
            StageFailed: the metric is asked for and cannot be measured.
        """
        self.signature, self.context = signature, context
        self.batches = list(_batches(signature, context, samples))
        self.expected, self.targets = self._run(module.to(context.device))
        if context.metric.name == "fidelity" and judged_by != "outputs":
            self.targets = predicted_decisions(self.expected)
        if judged_by == "metric" and self.targets is None:
            raise StageFailed(
                f"judged_by: metric needs a split 'val' with targets for {context.metric.name}; "
                "bring one, or use judged_by: outputs"
            )
        by_metric = judged_by != "outputs" and self.targets is not None
        self.base = self._score(self.expected) if by_metric else None

    @property
    def judged_by(self) -> JudgedBy:
        """What errors are ranked by."""
        return "outputs" if self.base is None else "metric"

    def measure(self, changed: nn.Module) -> OutputError:
        """Measure the error of a changed module.

        Raises:
            StageFailed: the outputs have another shape, or are NaN or infinite where they were not.
        """
        outputs = self._run(changed)[0]
        if outputs.shape != self.expected.shape:
            raise StageFailed(
                f"the outputs' shape becomes {tuple(outputs.shape)}, from "
                f"{tuple(self.expected.shape)}"
            )
        distance = relative_error(self.expected, outputs)
        if not math.isfinite(distance):
            raise StageFailed("the outputs are NaN or infinite where they were not")
        if self.base is None:
            return OutputError(distance)
        drop = self.context.metric.drop_points(self.base, self._score(outputs))
        return OutputError(distance, drop)

    def _run(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch_predictor(module.eval(), self.context.device, self.context.threads) as predict:
            return predict_batches(accept_any_batch(predict, self.signature), self.batches)

    def _score(self, outputs: torch.Tensor) -> float:
        assert self.targets is not None
        value = self.context.metric.score(outputs, self.targets)
        if not math.isfinite(value):
            raise StageFailed(f"metric {self.context.metric.name} is {value}")
        return value


def _batches(signature: Signature, context: Context, samples: int) -> Iterator[Batch]:
    data = context.data
    if data is not None and "val" in data.datasets:
        count = len(data.split("val"))  # type: ignore[arg-type]  # Splits admits sized datasets only
        order = torch.randperm(count, generator=torch.Generator().manual_seed(context.seed))
        yield from data.read("val", sorted(order[:samples].tolist()), data.batch_size)
    else:
        for inputs in context.comparison_inputs(signature):
            yield Batch(inputs, None)
