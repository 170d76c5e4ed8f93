"""How good a model is: one number on a split, and in which direction it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Any

from compress.core.errors import PipelineInvalid, StageFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from pydantic import JsonValue

    from compress.core.artifact import Predictor
    from compress.core.data import Splits
    from compress.core.stage import Progress

BUILT_IN = ("accuracy", "loss", "fidelity")


@dataclass(frozen=True)
class Metric:
    """A metric by name, resolved where it is needed.

    ``accuracy`` is the fraction of right labels, ``loss`` the mean cross-entropy, ``fidelity`` the
    fraction of labels equal to the reference model's. ``torchmetrics.classification.BinaryF1Score``
    and the like, and ``module:callable`` (outputs, targets → float) are taken as named.
    """

    name: str = "accuracy"
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of a torchmetrics class."""
    folder: Path | None = None
    """Where the module of ``module:callable`` lies."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value is the better one."""
        if self.name.startswith("torchmetrics."):
            return bool(_torchmetrics_class(self.name).higher_is_better)
        return self.name != "loss"

    def identity(self) -> list[JsonValue]:
        """Return what decides a measured value, the user's own code included."""
        code = ""
        if ":" in self.name:
            from compress.core.factory import local_sources, sources_digest

            code = sources_digest(local_sources(self.name, self.folder))
        return [self.name, dict(self.arguments), code]

    def drop_points(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, in hundredths; negative when it is better."""
        return 100 * (before - after if self.higher_is_better else after - before)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the value for a whole split's first outputs and its targets."""
        import torch
        import torch.nn.functional as F

        if self.name in ("accuracy", "fidelity"):
            labels = outputs.argmax(1)
            if labels.shape != targets.shape:
                raise StageFailed(
                    f"metric {self.name}: outputs of shape {tuple(outputs.shape)} give labels of "
                    f"shape {tuple(labels.shape)}, and targets have {tuple(targets.shape)}"
                )
            return float((labels == targets).sum()) / targets.numel()
        if self.name == "loss":
            return float(F.cross_entropy(outputs.float(), targets))
        if self.name.startswith("torchmetrics."):
            # One rank of a training has all outputs; synchronising, it would wait for the others.
            arguments = {**dict(self.arguments), "sync_on_compute": False}
            metric = _torchmetrics_class(self.name)(**arguments)
            metric.update(outputs, targets)
            return float(metric.compute())
        from compress.core.factory import resolve

        function: Callable[..., Any] = resolve(self.name, self.folder)
        with torch.inference_mode():
            return float(function(outputs, targets))

    def check(self) -> None:
        """Raise if the name means nothing, without evaluating."""
        if self.name in BUILT_IN:
            return
        if self.name.startswith("torchmetrics."):
            _torchmetrics_class(self.name)
        elif ":" in self.name:
            from compress.core.factory import resolve

            resolve(self.name, self.folder)
        else:
            raise PipelineInvalid(
                f"metric {self.name!r} is unknown; expected {', '.join(BUILT_IN)}, "
                "torchmetrics.… or module:callable"
            )


def predict_split(
    predict: Predictor, splits: Splits, split: str, progress: Progress | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first output for every sample of a split, and the targets where there are any."""
    import torch

    outputs, targets = [], []
    done, total = 0, len(splits.split(split))  # type: ignore[arg-type]
    for batch in splits.batches(split):
        outputs.append(predict(*batch.inputs)[0].cpu())
        targets.append(batch.target)
        done += len(batch)
        if progress is not None:
            progress(f"evaluate on {split}", done, total)
    known = [t for t in targets if t is not None]
    return torch.cat(outputs), torch.cat(known) if known else None


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress | None = None,
) -> float:
    """Return a predictor's metric on a split.

    Args:
        predict: the model.
        splits: the data.
        split: which split.
        metric: the metric.
        reference: for ``fidelity``, the model whose labels count as right.
        progress: where to say how far it is.

    Raises:
        StageFailed: the split has no targets, there is no reference, or the value is not finite.
    """
    outputs, targets = predict_split(predict, splits, split, progress)
    if metric.name == "fidelity":
        if reference is None:
            raise StageFailed("metric fidelity needs a reference model")
        targets = predict_split(reference, splits, split)[0].argmax(1)
    if targets is None:
        raise StageFailed(f"metric {metric.name} needs targets and split {split!r} has none")
    value = metric.score(outputs, targets)
    if not math.isfinite(value):
        raise StageFailed(f"metric {metric.name} on {split!r} is {value}")
    return value


def _torchmetrics_class(name: str) -> Any:
    try:
        import torchmetrics
    except ImportError:
        raise Unavailable(
            f"metric {name!r} needs torchmetrics: pip install 'compress-pipeline[metrics]'"
        ) from None
    target: Any = torchmetrics
    for part in name.split(".")[1:]:
        target = getattr(target, part, None)
    if not isinstance(target, type):
        raise PipelineInvalid(f"metric {name!r}: torchmetrics has no such class")
    return target
