"""COCO's mean average precision (mAP) of the boxes that a detector returns."""

from __future__ import annotations

import inspect
import io
import math
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable, first_line
from compress.common.requirements import pip_install
from compress.core.metrics.metric import JACKKNIFE_GROUPS, FunctionMeter, Metric
from compress.core.objectives.task import describe_outputs, describe_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from compress.data.targets import Targets

BoxFormat: TypeAlias = Literal["xyxy", "xywh", "cxcywh"]
Scores: TypeAlias = Literal["softmax", "sigmoid"]


class MeanAveragePrecision(Metric):
    """COCO's mean average precision, with the settings of :func:`matched_boxes`."""

    is_fraction = in_points = takes_all_outputs = needs_output_names = True

    def meter(self) -> FunctionMeter:
        """Return what keeps the boxes for COCO's evaluator."""
        self.check_settings()
        settings = dict(self.arguments)
        return _BoxMeter(self, matched_boxes, settings, JACKKNIFE_GROUPS)

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
        try:
            import pycocotools  # noqa: F401
        except ImportError:
            raise Unavailable(
                f"metric 'map' needs pycocotools: {pip_install('detection')}"
            ) from None


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
    import numpy as np
    import torch
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    boxes, confidences, labels = _predictions(outputs, scores)
    box_format = box_format or ("cxcywh" if "pred_boxes" in outputs else "xyxy")
    annotations: list[dict[str, Any]] = []
    for image, (true_boxes, true_labels) in enumerate(_ground_truth(targets)):
        sizes = _as_xywh(true_boxes.double(), box_format)
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
    parts = (images[is_box][:, None], _as_xywh(boxes[is_box].double(), box_format))
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


def _predictions(
    outputs: torch.Tensor | Mapping[str, torch.Tensor], scores_of_logits: Scores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    import torch

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


def _as_xywh(boxes: torch.Tensor, box_format: str) -> torch.Tensor:
    """Return boxes as left, top, width and height: `(boxes, 4)`."""
    import torch

    first, second = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        return torch.cat([first, second - first], 1)
    return boxes if box_format == "xywh" else torch.cat([first - second / 2, second], 1)
