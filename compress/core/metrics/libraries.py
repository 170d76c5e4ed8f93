"""Metrics by libraries: of torchmetrics, the user's own, and the mean average precision of COCO."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_args

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable, first_line
from compress.common.factories import local_sources, resolve, sources_digest
from compress.common.forward import first_output, output_argument
from compress.common.lazy_modules import np, torch
from compress.common.requirements import pip_install
from compress.core.metrics.builtin import label_decisions
from compress.core.metrics.metric import (
    JACKKNIFE_GROUPS,
    FunctionMeter,
    Metric,
    MetricMeter,
    one_number,
)
from compress.core.objectives.loss import loss_kind
from compress.core.objectives.task import describe_outputs, describe_targets, need_tensor
from compress.data.batch import IGNORED_LABEL

if TYPE_CHECKING:
    from compress.common.forward import Outputs
    from compress.data.targets import Targets


class Torchmetrics(Metric):
    """A class of the library by its name: ``torchmetrics.classification.BinaryF1Score``."""

    pattern, form = "^torchmetrics[.]", "torchmetrics.…"
    higher: ClassVar[bool | None] = None
    adds_states = True
    path: ClassVar[str] = ""
    """The class's place inside torchmetrics; by default what follows in the name."""

    def declared_direction(self) -> bool | None:
        """Return whether larger is better by the class."""
        return getattr(self.implementation(), "higher_is_better", None)

    def implementation(self, inferred: Mapping[str, Any] | None = None) -> Any:
        """Make the object of torchmetrics; `inferred` are arguments that follow from the data."""
        target = import_library(self.name)
        for part in (self.path or self.name.partition(".")[2]).split("."):
            target = getattr(target, part, None)
        return create(self.name, target, {**(inferred or {}), **dict(self.arguments)})

    def compared(self, outputs: Outputs, targets: Targets) -> tuple[Any, Targets, Any]:
        """Return what the object is updated with, and arguments of its class that fit it."""
        if self.takes_all_outputs:
            return output_argument(outputs, self.outputs), targets, None
        return first_output(outputs), targets, None

    def meter(self) -> MetricMeter:
        """Return what updates the object."""
        return TorchmetricsMeter(self, self.implementation())

    def check_settings(self) -> None:
        """Raise PipelineInvalid for a class or arguments that do not exist, or no direction."""
        self.implementation()
        _ = self.higher_is_better


class UserMetric(Torchmetrics):
    """``module:callable``: a function of all outputs and targets, or a class of torchmetrics."""

    pattern, form = ":", "module:callable"
    # The updates of the user's own class may depend on how samples are divided.
    adds_states = False
    takes_all_outputs = True

    def code(self) -> str:
        """Return a hash of the module and of what it imports beside it."""
        return sources_digest(local_sources(self.name, self.folder))

    def implementation(self, inferred: Mapping[str, Any] | None = None) -> Any:
        """Import the function, or make the object of torchmetrics."""
        target: Any = resolve(self.name, self.folder)
        is_class = isinstance(target, type)
        return create(self.name, target, dict(self.arguments)) if is_class else target

    def meter(self) -> MetricMeter:
        """Return what updates the object, or keeps the outputs for the function."""
        own = self.implementation()
        if hasattr(own, "metric_state"):
            return TorchmetricsMeter(self, own)
        return FunctionMeter(self, own, dict(self.arguments))


class _LabelMetric(Torchmetrics):
    # A mean over classes, by a class of torchmetrics whose arguments follow from the data.
    pattern = form = ""
    higher = True
    is_fraction = in_points = reads_loss = True
    labels = "any"

    def meter(self) -> MetricMeter:
        return TorchmetricsMeter(self)  # makes the object when the first batch shows its arguments

    def check_settings(self) -> None:
        import_library(self.name)

    def compared(self, outputs: Outputs, targets: Targets) -> tuple[Any, Targets, Any]:
        targets = need_tensor(f"metric {self.name}", targets)
        first, targets = self.loss.align(first_output(outputs), targets)
        labels, known = label_decisions(self.name, first, targets, self.loss)
        settings: dict[str, Any] = {"average": "macro", "ignore_index": IGNORED_LABEL}
        if labels.dtype != torch.bool:
            settings |= {"task": "multiclass", "num_classes": first.shape[1]}
            return labels.flatten(), known.flatten().long(), settings
        if first.dim() > 1 and first.shape[1] > 1:
            settings |= {"task": "multilabel", "num_labels": first.shape[1]}
            return labels.long(), known.long(), settings
        binary = {"task": "binary", "ignore_index": IGNORED_LABEL}
        return labels.flatten().long(), known.flatten().long(), binary


class F1(_LabelMetric):
    """The harmonic mean of precision and recall."""

    path = "F1Score"


class MeanIoU(_LabelMetric):
    """Intersection over union of the pixels of each class."""

    path = "JaccardIndex"


class Spearman(Metric):
    """The correlation of ranks of numbers; of several outputs, the mean of theirs."""

    def meter(self) -> FunctionMeter:
        """Return what keeps the numbers: a rank depends on all of them."""
        return FunctionMeter(self, self._correlation, jackknife_groups=JACKKNIFE_GROUPS)

    def _correlation(self, outputs: torch.Tensor, targets: Targets) -> torch.Tensor:
        from torchmetrics.functional.regression import spearman_corrcoef

        targets = need_tensor(f"metric {self.name}", targets)
        pair = loss_kind("mse").match(outputs, targets)
        return spearman_corrcoef(*(x.reshape(len(x), -1) for x in pair)).mean()

    def check_settings(self) -> None:
        """Raise Unavailable if the library is not installed."""
        import_library(self.name)


class TorchmetricsMeter(MetricMeter):
    """Updates an object of torchmetrics."""

    metric: Torchmetrics

    def __init__(self, metric: Torchmetrics, own: Any = None) -> None:
        super().__init__(metric)
        self.own = own
        self.inferred: dict[str, Any] | None = None

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> None:
        compared, targets, self.inferred = self.metric.compared(outputs, targets)
        # The number of classes is that of the first batch's outputs.
        self.own = self.own or self.metric.implementation(self.inferred)
        before = None if group is None else summed_state(self.own)
        self._call(self.own.update, compared, targets)
        if before is not None and (now := summed_state(self.own)) is not None:
            self._add_group(group, now - before)

    def _copied(self) -> Self:
        copied = super()._copied()
        copied.own = copy.deepcopy(self.own)
        return copied

    def _compute_of(self, sums: torch.Tensor) -> float:
        start = 0
        for module in metrics_in(self.own):
            for name in module._reductions:
                value = getattr(module, name)
                part = sums[start : start + value.numel()].reshape(value.shape).to(value.dtype)
                setattr(module, name, part)
                start += value.numel()
            module._computed = None
        return self.compute()

    def state(self) -> Any:
        """Return the object's state, with the arguments that it was made with."""
        if self.own is None or not self.own.update_called:
            return None
        return self.inferred, [module.metric_state for module in metrics_in(self.own)]

    def add_shares_(self, states: Sequence[Any]) -> None:
        """Merge the states of all processes."""
        known = [state for state in states if state is not None]
        if not known:
            return
        self.own = self.own or self.metric.implementation(known[0][0])
        # As `Metric.sync` does. But that exchanges tensor by tensor, so that processes with lists
        # of different lengths wait for ever, and counts the initial state of one without samples;
        # and `Metric.merge_state` refuses some metrics.
        shares = (state for _, state in known)
        for module, *parts in zip(metrics_in(self.own), *shares, strict=True):
            module._update_count = module._update_count or 1  # this process may have no samples
            for name, reduce in module._reductions.items():
                values = [part[name] for part in parts]
                if isinstance(values[0], list):
                    setattr(module, name, [tensor for value in values for tensor in value])
                else:
                    stacked = torch.stack(values)
                    setattr(module, name, stacked if reduce is None else reduce(stacked))

    def _value(self, added: Any) -> float:
        return one_number(self.metric.name, self._call(self.own.compute))


def import_library(name: str, library: str = "torchmetrics", extra: str = "metrics") -> Any:
    """Import the library for a metric; raise Unavailable if it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise Unavailable(f"metric {name!r} needs {library}: {pip_install(extra)}") from None


def create(name: str, target: Any, arguments: Mapping[str, Any]) -> Any:
    """Make an object of a class of torchmetrics; raise PipelineInvalid where that fails."""
    if not isinstance(target, type) or not issubclass(target, import_library(name).Metric):
        raise PipelineInvalid(
            f"metric {name!r}: no such class of torchmetrics; expected one, a subclass of "
            "torchmetrics.Metric, or a function of outputs and targets"
        )
    try:
        with warnings.catch_warnings():
            # Of metrics that keep all outputs in memory.
            warnings.filterwarnings("ignore", ".*save all targets and predictions", UserWarning)
            made = target(**arguments)
    except Exception as error:
        raise PipelineInvalid(
            f"metric {name!r} with arguments {dict(arguments)}: {error}"
        ) from error
    for module in metrics_in(made):
        # Rank 0 may evaluate alone, and must not wait for other ranks in `compute`.
        module.distributed_available_fn = lambda: False
    return made


def metrics_in(metric: Any) -> list[Any]:
    """Return an object of torchmetrics and those that it is computed from."""
    return [module for module in metric.modules() if hasattr(module, "metric_state")]


def summed_state(metric: Any) -> torch.Tensor | None:
    """Return the state of an object of torchmetrics as float64 numbers, if all of it is sums."""
    from torchmetrics.utilities import dim_zero_sum

    values: list[torch.Tensor] = []
    for module in metrics_in(metric):
        for name, reduce in module._reductions.items():
            if reduce is not dim_zero_sum:
                return None
            values.append(getattr(module, name).double().flatten())
    # A larger state is not kept for each group of samples.
    return torch.cat(values) if 0 < sum(map(len, values)) <= 2**15 else None


BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]
Scores: TypeAlias = Literal["softmax", "sigmoid"]


class MeanAveragePrecision(Metric):
    """COCO's mean average precision, with the settings of :func:`matched_boxes`."""

    is_fraction = in_points = takes_all_outputs = needs_output_names = True

    def meter(self) -> FunctionMeter:
        """Return what keeps the boxes for COCO's evaluator."""
        self.check_settings()
        return _BoxMeter(self, matched_boxes, dict(self.arguments), JACKKNIFE_GROUPS)

    def check_settings(self) -> None:
        """Raise PipelineInvalid for another setting or value, Unavailable without pycocotools."""
        settings = dict(self.arguments)
        try:
            inspect.signature(matched_boxes).bind(None, None, **settings)
        except TypeError as error:
            raise PipelineInvalid(f"metric 'map': {first_line(error)}") from error
        for name, known in (("box_format", get_args(BoxFormat)), ("scores", get_args(Scores))):
            if (value := settings.get(name)) is not None and value not in known:
                raise PipelineInvalid(
                    f"metric map: {name}: found {value!r}, expected {' or '.join(known)}"
                )
        import_library(self.name, "pycocotools", "detection")


class _BoxMeter(FunctionMeter):
    """Matches boxes once for all parts of the samples, as that takes longer than what follows."""

    evaluation: Any = None

    def _value(self, added: Any) -> float:
        self.evaluation = self._call(self.function, *added, **self.settings)
        return 0.0 if self.evaluation is None else mean_precision(self.evaluation)

    def _values_of(self, added: Any, parts: Sequence[torch.Tensor]) -> list[float]:
        if self.evaluation is None:
            return [0.0] * len(parts)
        return [mean_precision(self.evaluation, part) for part in parts]


def matched_boxes(
    outputs: torch.Tensor | Mapping[str, torch.Tensor],
    targets: Targets,
    *,
    iou_thresholds: Sequence[float] | None = None,
    box_format: BoxFormat | None = None,
    scores: Scores = "softmax",
) -> Any:
    """Match boxes by COCO's evaluator, and return it; None where the model found none.

    Args:
        outputs: `boxes` (samples, boxes, 4), `scores` and `labels` (samples, boxes), where a label
            below 0 marks padding; or `pred_boxes` (samples, boxes, 4) and `logits` (samples,
            boxes, classes) as of DETR.
        targets: of each sample `boxes` (boxes, 4) and `labels` (or `class_labels`).
        iou_thresholds: overlaps from which a box counts as found, over which the precision is
            averaged; COCO's 0.5, 0.55 to 0.95 by default.
        box_format: corners (`xyxy`), corner and size (`xywh`) or centre and size (`cxcywh`) of
            outputs and targets; by default `cxcywh` for `pred_boxes`, else `xyxy`.
        scores: what makes scores of `logits`: `softmax` over the classes, of which the last is
            "no object", or `sigmoid`.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    boxes, confidences, labels = predicted_boxes(outputs, scores)
    box_format = box_format or ("cxcywh" if "pred_boxes" in outputs else "xyxy")
    annotations: list[dict[str, Any]] = []
    for image, (true_boxes, true_labels) in enumerate(_ground_truth(targets)):
        sizes = as_xywh(true_boxes.double(), box_format)
        for box, label in zip(sizes.tolist(), true_labels.tolist(), strict=True):
            # COCO's evaluator takes the number 0 for "no annotation".
            own = {"id": len(annotations) + 1, "image_id": image, "category_id": int(label)}
            annotations.append({**own, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
    if not annotations:
        raise StageFailed("metric map: the targets have no box")
    is_box = labels >= 0
    if not bool(is_box.any()):
        return None
    images = torch.arange(len(boxes))[:, None].expand_as(labels)
    parts = (images[is_box][:, None], as_xywh(boxes[is_box].double(), box_format))
    found = torch.cat([*parts, confidences[is_box][:, None], labels[is_box][:, None]], 1)
    classes = {a["category_id"] for a in annotations} | set(labels[is_box].tolist())
    with redirect_stdout(io.StringIO()):  # COCO's evaluator prints what it does
        truth = COCO()
        truth.dataset = {
            "info": {},
            "images": [{"id": image} for image in range(len(boxes))],
            "annotations": annotations,
            "categories": [{"id": label} for label in sorted(classes)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found.double().numpy()), "bbox")
        if iou_thresholds is not None:
            evaluation.params.iouThrs = np.array(iou_thresholds)
        evaluation.evaluate()
    return evaluation


def mean_precision(evaluation: Any, images: torch.Tensor | None = None) -> float:
    """Return the mAP of matched boxes, or that of some images, by a mask of these."""
    matches = evaluation.evalImgs  # of each image, class and range of areas, None without boxes
    if images is not None:
        evaluation.evalImgs = [m if m and images[m["image_id"]] else None for m in matches]
    with redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    evaluation.evalImgs = matches
    # By overlap, recall, class, area and most boxes in an image; -1 for classes without a box.
    precision = evaluation.eval["precision"][..., 0, -1]
    known = precision[precision > -1]
    return float(known.mean()) if known.size else math.nan


def predicted_boxes(
    outputs: torch.Tensor | Mapping[str, torch.Tensor], scores_of_logits: Scores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return boxes, their scores and their labels of a detector's outputs by name."""
    if isinstance(outputs, dict) and {"boxes", "scores", "labels"} <= outputs.keys():
        return outputs["boxes"], outputs["scores"], outputs["labels"].long()
    if isinstance(outputs, dict) and {"logits", "pred_boxes"} <= outputs.keys():
        logits = outputs["logits"].double()
        if scores_of_logits == "softmax":
            scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        else:
            scores, labels = logits.sigmoid().max(-1)
        return outputs["pred_boxes"], scores, labels
    raise StageFailed(
        "metric map takes outputs named boxes, scores and labels, or logits and pred_boxes, "
        f"found {describe_outputs(outputs)}; name them with model.outputs, or write metric: "
        "module:callable"
    )


def _ground_truth(targets: Targets) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = []
    for target in targets if isinstance(targets, list) else [targets]:
        if target is None:
            pairs.append((torch.zeros(0, 4), torch.zeros(0)))
            continue
        parts = target if isinstance(target, dict) and target is not targets else {}
        labels = parts.get("labels", parts.get("class_labels"))  # transformers' name
        if labels is None or "boxes" not in parts:
            raise StageFailed(
                "metric map takes a mapping of boxes and labels for each sample as its target, "
                f"found {describe_targets(targets)}"
            )
        # A list without boxes is a tensor of shape [0].
        pairs.append((parts["boxes"].reshape(-1, 4), labels.reshape(-1)))
    return pairs


def as_xywh(boxes: torch.Tensor, box_format: str) -> torch.Tensor:
    """Return boxes as left, top, width and height: `(boxes, 4)`."""
    first, second = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        return torch.cat([first, second - first], 1)
    return boxes if box_format == "xywh" else torch.cat([first - second / 2, second], 1)
