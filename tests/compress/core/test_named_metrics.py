"""Metrics by name that other libraries compute, against values computed by hand."""

import math

import pytest
import torch

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.metrics import Metric, MetricMeter

FAR = [500.0, 500.0, 510.0, 510.0]
# Class 0: found, not found, found. Class 1: 62 % of the only box.
TARGETS = [
    {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [100, 0, 200, 10]]),
        "labels": torch.tensor([0, 1]),
    },
    {"boxes": torch.tensor([[20.0, 20, 40, 40]]), "labels": torch.tensor([0])},
    {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0)},
]
BOXES = torch.tensor(
    [
        [[0.0, 0, 10, 10], [100, 0, 162, 10]],
        [FAR, [20, 20, 40, 40]],
        [FAR, FAR],
    ]
)
SCORES = torch.tensor([[0.9, 0.6], [0.8, 0.7], [0.1, 0.1]])
LABELS = torch.tensor([[0, 1], [0, 0], [-1, -1]])
# Precision 1 up to a recall of a half, 2/3 above: 51 and 50 of COCO's 101 points.
CLASS_0 = (51 + 50 * 2 / 3) / 101


def detections(**arguments) -> MetricMeter:
    names = ("boxes", "scores", "labels")
    return Metric("map", tuple(arguments.items()), outputs=names).meter()


def test_the_map_of_boxes_is_that_of_coco():
    meter = detections()
    for i in range(3):
        meter.update([x[i : i + 1] for x in (BOXES, SCORES, LABELS)], TARGETS[i : i + 1])
    # 0.62 is above three of the ten thresholds, 0.5, 0.55 and 0.6.
    assert meter.compute() == pytest.approx((CLASS_0 + 0.3) / 2, abs=1e-9)
    half = detections(iou_thresholds=[0.5])
    half.update([BOXES, SCORES, LABELS], TARGETS)
    assert half.compute() == pytest.approx((CLASS_0 + 1) / 2, abs=1e-9)


def test_the_map_of_logits_and_normalized_boxes_is_the_same():
    # DETR: centre and size, and a last class for "no object".
    def centred(boxes):
        return (
            torch.cat([boxes[..., :2] + boxes[..., 2:], 2 * (boxes[..., 2:] - boxes[..., :2])], -1)
            / 2
        )

    logits = torch.full((3, 2, 3), -20.0)
    for image, query in ((i, q) for i in range(3) for q in range(2)):
        score = SCORES[image, query]
        logits[image, query, LABELS[image, query] % 2] = score.log()
        logits[image, query, 2] = (1 - score).log()
    targets = [{"boxes": centred(y["boxes"]), "class_labels": y["labels"]} for y in TARGETS]
    metric = Metric("map", outputs=("logits", "pred_boxes"))
    assert metric.score([logits, centred(BOXES)], targets) == pytest.approx(
        (CLASS_0 + 0.3) / 2, abs=1e-6
    )


def test_shares_of_two_processes_give_the_same_map():
    whole, *shares = (detections() for _ in range(3))
    whole.update([BOXES, SCORES, LABELS], TARGETS)
    for rank, meter in enumerate(shares):
        meter.update([x[rank::2] for x in (BOXES, SCORES, LABELS)], TARGETS[rank::2])
    shares[0].add_shares_([meter.state() for meter in shares])
    assert shares[0].compute() == whole.compute()


@pytest.mark.parametrize(
    ("outputs", "names", "targets", "message"),
    [
        (
            [torch.zeros(2, 3)],
            (),
            TARGETS[:2],
            r"named boxes, scores and labels, .*float32 \[n, 3\]",
        ),
        ([BOXES, SCORES, LABELS], ("boxes", "scores", "labels"), torch.zeros(3), "found float32"),
        ([BOXES, SCORES, LABELS], ("boxes", "scores", "labels"), [None] * 3, "targets have no box"),
    ],
)
def test_what_is_no_detection_is_refused(outputs, names, targets, message):
    with pytest.raises(StageFailed, match=message):
        Metric("map", outputs=names).score(outputs, targets)


def test_unknown_settings_of_map_are_refused():
    for arguments, message in (
        ((("iou", 0.5),), "unexpected keyword argument 'iou'"),
        ((("box_format", "xyyx"),), "box_format: found 'xyyx', expected xyxy or xywh or cxcywh"),
    ):
        with pytest.raises(PipelineInvalid, match=message):
            Metric("map", arguments).check()


# Predicted and true labels: class 0 2 right of 3 predicted and 2 true; 1: 1, 1, 2; 2: 1, 1, 1.
PREDICTED, TRUE = torch.tensor([0, 0, 0, 1, 2, 1]), torch.tensor([0, 0, 1, 1, 2, -100])
MACRO_F1 = (2 * 2 / 5 + 2 * 1 / 3 + 1) / 3
MACRO_IOU = (2 / 3 + 1 / 2 + 1) / 3
BINARY, BITS = torch.tensor([3.0, 2, -1, -2]), torch.tensor([1.0, 0, 1, 0])
PAIR, PAIR_BITS = torch.stack([BINARY, -BINARY], 1), torch.stack([BITS, BITS], 1)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "value"),
    [
        ("f1", torch.nn.functional.one_hot(PREDICTED).float(), TRUE, MACRO_F1),
        ("miou", torch.nn.functional.one_hot(PREDICTED).float(), TRUE, MACRO_IOU),
        ("f1", BINARY[:, None], BITS[:, None], 1 / 2),
        ("miou", BINARY, BITS, 1 / 3),
        ("f1", PAIR, PAIR_BITS.long(), 1 / 2),
        ("spearman", torch.tensor([1.0, 2, 3, 10]), torch.tensor([2.0, 1, 3, 4]), 0.8),
        ("spearman", torch.tensor([[1.0, 1], [2, 0]]), torch.tensor([[1.0, 0], [2, 1]]), 0.0),
    ],
)
def test_known_values_whatever_the_batches_and_processes(name, outputs, targets, value):
    metric = Metric(name)
    metric.check()
    assert metric.score(outputs, targets) == pytest.approx(value, abs=1e-6)
    meters = [metric.meter() for _ in range(2)]
    for i, (x, y) in enumerate(zip(outputs.split(1), targets.split(1), strict=True)):
        meters[i % 2].update(x, y)
    meters[0].add_shares_([meter.state() for meter in meters])
    assert meters[0].compute() == pytest.approx(value, abs=1e-6)


def test_perplexity_weighs_tokens_and_leaves_out_ignored_ones():
    # Classes on axis 1; probabilities of the right tokens 1/2, 1/4 and 1/8.
    probabilities = torch.tensor([[[0.5, 0.25], [0.5, 0.75]], [[0.125, 0.5], [0.875, 0.5]]])
    targets = torch.tensor([[0, 0], [0, -100]])
    meter = Metric("perplexity").meter()
    for row in range(2):
        meter.update(probabilities[row : row + 1].log(), targets[row : row + 1])
    assert meter.compute() == pytest.approx(math.exp(math.log(2 * 4 * 8) / 3))
    assert not Metric("perplexity").higher_is_better
