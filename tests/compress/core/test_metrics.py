import pytest
import torch

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.metrics import Metric, default_metric, evaluate
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.data.splits import Splits


def _first_features(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x[:, :3],)


def test_accuracy_equals_torchmetrics(blobs: Splits) -> None:
    theirs = Metric(
        "torchmetrics.classification.MulticlassAccuracy",
        (("average", "micro"), ("num_classes", 3)),
    )
    mine = evaluate(_first_features, blobs, "val", Metric("accuracy")).value
    assert 0.5 < mine < 1
    assert mine == pytest.approx(evaluate(_first_features, blobs, "val", theirs).value)


def test_loss_is_lower_when_better(blobs: Splits) -> None:
    metric = Metric("loss")
    good = evaluate(lambda x: (3 * x[:, :3],), blobs, "val", metric).value
    bad = evaluate(lambda x: (-x[:, :3],), blobs, "val", metric).value
    assert good < bad
    assert metric.drop_points(good, bad) > 0
    assert Metric("accuracy").drop_points(0.98, 0.97) == pytest.approx(1.0)


def test_fidelity_compares_with_the_reference(blobs: Splits) -> None:
    metric = Metric("fidelity")
    same = evaluate(_first_features, blobs, "val", metric, _first_features).value
    other = evaluate(lambda x: (-x[:, :3],), blobs, "val", metric, _first_features).value
    assert same == 1.0
    assert other < 0.5
    with pytest.raises(StageFailed, match="reference"):
        evaluate(_first_features, blobs, "val", metric)


def test_the_users_own_metric(blobs: Splits, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "def misses(outputs, targets):\n    return (outputs.argmax(1) != targets).float().mean()\n"
    )
    metric = Metric("mine:misses", direction=False, folder=tmp_path)
    metric.check()
    misses = evaluate(_first_features, blobs, "val", metric).value
    assert not metric.higher_is_better
    right = evaluate(_first_features, blobs, "val", Metric("accuracy")).value
    assert misses == pytest.approx(1 - right)


def test_what_cannot_be_measured_is_refused(blobs: Splits) -> None:
    with pytest.raises(StageFailed, match="not all finite"):
        evaluate(lambda x: (x[:, :3] * float("nan"),), blobs, "val", Metric("loss"))
    unlabelled = Splits({"val": [torch.ones(4)] * 3})
    with pytest.raises(StageFailed, match="needs targets"):
        evaluate(_first_features, unlabelled, "val", Metric("accuracy"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("acuracy", "expected accuracy"), ("torchmetrics.Nothing", "no such class")],
)
def test_an_unknown_name_is_refused(name: str, reason: str) -> None:
    with pytest.raises(PipelineInvalid, match=reason):
        Metric(name).check()


def test_targets_of_another_shape_are_refused(blobs: Splits) -> None:
    pairs = Splits({"val": [(torch.ones(4), torch.tensor([0, 1])) for _ in range(6)]})
    with pytest.raises(StageFailed, match=r"labels have shape \(6,\) and targets \(6, 2\)"):
        evaluate(_first_features, pairs, "val", Metric("accuracy"))


def test_evaluation_reports_progress(blobs: Splits) -> None:
    said: list[tuple[str, int, int]] = []
    progress = lambda task, done, total, note="": said.append((task, done, total))  # noqa: E731
    evaluate(_first_features, blobs, "val", Metric("accuracy"), progress=progress)
    assert said == [("evaluate on val", 32, 60), ("evaluate on val", 60, 60)]


def test_a_metric_without_a_direction_needs_a_setting(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def error(outputs, targets):\n    return 0.0\n")
    for metric in (
        Metric("mine:error", folder=tmp_path),
        Metric("torchmetrics.ConfusionMatrix", (("num_classes", 3), ("task", "multiclass"))),
    ):
        with pytest.raises(PipelineInvalid, match="higher_is_better"):
            metric.check()
    wrapped = Metric("torchmetrics.Accuracy", (("num_classes", 3), ("task", "multiclass")))
    assert wrapped.higher_is_better
    assert wrapped.drop_points(0.9, 0.8) == pytest.approx(10)


def test_arguments_of_built_in_metrics_are_refused() -> None:
    with pytest.raises(PipelineInvalid, match="takes no settings"):
        Metric("accuracy", (("task", "x"),)).check()
    with pytest.raises(PipelineInvalid, match="num_clases"):
        Metric("torchmetrics.classification.MulticlassF1Score", (("num_clases", 3),)).check()


def test_the_code_of_the_users_metric_is_part_of_its_identity(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def score(outputs, targets):\n    return 0.0\n")
    metric = Metric("mine:score", direction=True, folder=tmp_path)
    before = metric.identity()
    (tmp_path / "mine.py").write_text("def score(outputs, targets):\n    return 1.0\n")
    assert metric.identity() != before


def test_a_single_logit_has_no_argmax(blobs: Splits) -> None:
    with pytest.raises(StageFailed, match="no classes to choose from"):
        evaluate(lambda x: (x[:, :1],), blobs, "val", Metric("accuracy"))


def _masked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Answer scores of which a class that no sample has is masked."""
    return (torch.cat([x[:, :3], torch.full((len(x), 1), -torch.inf)], 1),)


@pytest.mark.parametrize("name", ["accuracy", "loss", "fidelity"])
def test_a_masked_class_is_never_predicted(name: str, blobs: Splits) -> None:
    metric, reference = Metric(name), _first_features
    masked = evaluate(_masked, blobs, "val", metric, reference).value
    assert masked == evaluate(_first_features, blobs, "val", metric, reference).value


@pytest.mark.parametrize(
    ("value", "reason"),
    [(torch.nan, "some are NaN"), (torch.inf, "some are infinite"), (-torch.inf, "all classes")],
)
@pytest.mark.parametrize("name", ["accuracy", "loss", "fidelity"])
def test_nan_and_samples_without_a_label_are_refused(
    name: str, value: float, reason: str, blobs: Splits
) -> None:
    def broken(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = _masked(x)[0]
        scores[-1] = value
        return (scores,)

    with pytest.raises(StageFailed, match=reason):
        evaluate(broken, blobs, "val", Metric(name), _first_features)


def test_the_loss_of_a_masked_label_is_refused(blobs: Splits) -> None:
    def masks_labels(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_masked(x)[0].roll(1, 1),)

    with pytest.raises(StageFailed, match="metric loss on 'val' is inf"):
        evaluate(masks_labels, blobs, "val", Metric("loss"))


def test_infinite_regression_outputs_are_refused(blobs: Splits) -> None:
    metric = Metric("torchmetrics.MeanSquaredError")
    with pytest.raises(StageFailed, match="some are infinite"):
        metric.score(torch.tensor([1.0, -torch.inf]), torch.zeros(2))


@pytest.mark.parametrize(
    ("task", "metric"), [("detection", "map"), ("regression", "loss"), (None, "loss")]
)
def test_the_metric_beside_a_loss_of_your_own(task: str | None, metric: str) -> None:
    kind = "numbers" if task == "regression" else "nested"
    loss = Loss("own:loss", targets=kind, task=TASKS[task] if task else None)
    assert default_metric(loss).name == metric


@pytest.mark.parametrize("name", ["accuracy", "f1", "loss"])
def test_a_label_without_a_class_is_named_with_its_split_and_sample(name: str) -> None:
    pytest.importorskip("torchmetrics")
    x, y = torch.randn(50, 4), torch.arange(50) % 4
    y[20], y[47] = -100, 4
    data = Splits({"val": torch.utils.data.TensorDataset(x, y)}, batch_size=16)
    reason = r"^split 'val', sample 47: label 4 is out of range: the model has 4 classes, 0 to 3 "
    with pytest.raises(StageFailed, match=reason):
        evaluate(lambda x: (x,), data, "val", Metric(name))
