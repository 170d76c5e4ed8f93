"""How good a model is: one number on a split, and in which direction it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Any

from compress.core.errors import PipelineInvalid, StageFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from pydantic import JsonValue

    from compress.core.artifact import Predictor
    from compress.core.data import Batch, Splits
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
    """Keyword arguments of a torchmetrics class or of the callable."""
    direction: bool | None = None
    """Whether higher is better, where the metric itself does not tell."""
    folder: Path | None = None
    """Where the module of ``module:callable`` lies."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value is the better one.

        Raises:
            PipelineInvalid: neither the metric nor the user tells.
        """
        known = self.direction
        if self.name in BUILT_IN:
            known = self.name != "loss"
        elif known is None and self.name.startswith("torchmetrics."):
            known = self._torchmetric().higher_is_better
        if known is None:
            raise PipelineInvalid(
                f"metric {self.name!r} does not tell its direction; write "
                f"metric: {{name: {self.name!r}, higher_is_better: true}} (or false)"
            )
        return bool(known)

    def identity(self) -> list[JsonValue]:
        """Return what decides a measured value, the user's own code included."""
        code = ""
        if ":" in self.name:
            from compress.core.factory import local_sources, sources_digest

            code = sources_digest(local_sources(self.name, self.folder))
        return [self.name, dict(self.arguments), self.direction, code]

    def drop_points(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, in hundredths; negative when it is better."""
        return 100 * (before - after if self.higher_is_better else after - before)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the value for a whole split's first outputs and its targets.

        Raises:
            StageFailed: the outputs are not finite or of another shape than the metric needs.
        """
        import torch
        import torch.nn.functional as F

        if not bool(torch.isfinite(outputs).all()):
            raise StageFailed(f"metric {self.name}: the model's outputs are not all finite")
        if self.name in ("accuracy", "fidelity"):
            return _share_of_right_labels(self.name, labels_of(outputs), targets)
        if self.name == "loss":
            return float(F.cross_entropy(outputs.float(), targets))
        if self.name.startswith("torchmetrics."):
            metric = self._torchmetric()
            metric.update(outputs, targets)
            return float(metric.compute())
        from compress.core.factory import resolve

        function: Callable[..., Any] = resolve(self.name, self.folder)
        with torch.inference_mode():
            return float(function(outputs, targets, **dict(self.arguments)))

    def check(self) -> None:
        """Refuse a name, arguments or a direction that mean nothing, without evaluating.

        Raises:
            PipelineInvalid: the metric cannot be used as it is written.
            Unavailable: torchmetrics is not installed.
        """
        if self.name in BUILT_IN:
            if self.arguments or self.direction is not None:
                raise PipelineInvalid(f"metric {self.name!r} takes no settings")
            return
        if ":" in self.name:
            from compress.core.factory import resolve

            resolve(self.name, self.folder)
        elif not self.name.startswith("torchmetrics."):
            raise PipelineInvalid(
                f"metric {self.name!r} is unknown; expected {', '.join(BUILT_IN)}, "
                "torchmetrics.… or module:callable"
            )
        _ = self.higher_is_better

    def _torchmetric(self) -> Any:
        made = _torchmetrics_class(self.name)
        try:
            # In a training of several processes rank 0 evaluates alone and must not wait.
            return made(**dict(self.arguments), sync_on_compute=False)
        except Exception as error:
            raise PipelineInvalid(
                f"metric {self.name!r} with arguments {dict(self.arguments)}: {error}"
            ) from error


def labels_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return the class with the largest output for each sample.

    Raises:
        StageFailed: the outputs have no axis of at least two classes, or are not finite.
    """
    if outputs.dim() < 2 or outputs.shape[1] < 2:
        raise StageFailed(
            f"outputs of shape {tuple(outputs.shape)} hold no classes to choose from; labels need "
            "at least two outputs a sample"
        )
    if not bool(outputs.isfinite().all()):
        raise StageFailed("the model's outputs are not all finite")
    return outputs.argmax(1)


def _share_of_right_labels(name: str, labels: torch.Tensor, targets: torch.Tensor) -> float:
    if labels.shape != targets.shape:
        raise StageFailed(
            f"metric {name}: labels have shape {tuple(labels.shape)} and targets "
            f"{tuple(targets.shape)}"
        )
    return float((labels == targets).sum()) / targets.numel()


def predict_split(
    predict: Predictor,
    splits: Splits,
    split: str,
    progress: Progress | None = None,
    batch_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first output for every sample of a split, and the targets where there are any."""

    def told() -> Iterator[Batch]:
        done, total = 0, len(splits.split(split))  # type: ignore[arg-type]
        for batch in splits.batches(split, batch_size):
            yield batch
            done += len(batch)
            if progress is not None:
                progress(f"evaluate on {split}", done, total)

    return predict_batches(predict, told())


def predict_batches(
    predict: Predictor, batches: Iterable[Batch]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first output for every sample, and the targets where there are any."""
    import torch

    outputs, targets = [], []
    for batch in batches:
        outputs.append(predict(*batch.inputs)[0].cpu())
        targets.append(batch.target)
    known = [t for t in targets if t is not None]
    return torch.cat(outputs), torch.cat(known) if known else None


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress | None = None,
    batch_size: int | None = None,
) -> float:
    """Return a predictor's metric on a split.

    Args:
        predict: the model.
        splits: the data.
        split: which split.
        metric: the metric.
        reference: for ``fidelity``, the model whose labels count as right.
        progress: where to say how far it is.
        batch_size: samples per call; the splits' own by default.

    Raises:
        StageFailed: the split has no targets, there is no reference, or the value is not finite.
    """
    outputs, targets = predict_split(predict, splits, split, progress, batch_size)
    if metric.name == "fidelity":
        if reference is None:
            raise StageFailed("metric fidelity needs a reference model")
        targets = labels_of(predict_split(reference, splits, split, None, batch_size)[0])
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
